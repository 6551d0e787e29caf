"""From a config to what guesses ahead: the drafter and its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from descant.config.generation_config import GenerationConfig
from descant.core.interfaces import Drafter, Model, ModelTraits, NoiseSource, RowCache
from descant.decoding.speculative.acceptance import DRAFT_SCHEDULES
from descant.decoding.speculative.cross_tokenizer import RetokenizingDrafter, SharedVocabDrafter
from descant.decoding.speculative.draft_model import AssistantDrafter
from descant.decoding.speculative.early_exit import EarlyExit, check_early_exit
from descant.decoding.speculative.prompt_lookup import PromptLookup
from descant.decoding.speculative.suffix_lookup import SuffixLookup
from descant.errors import ConfigError, InputError, UnsupportedModel
from descant.models.truncated_model import truncate_model
from descant.recipes.recipe import Recipe
from descant.tokenization.token_bytes import TokenBytes

__all__ = ["DraftInputs", "DrafterSpec", "ModelFactory", "describe_drafter", "make_drafter_spec"]

# What only a draft model or early layers read.
_DRAFT_MODEL_FIELDS: Final = ("num_assistant_tokens", "assistant_confidence_threshold")
_CROSS_TOKENIZER_FIELDS: Final = ("assistant_lookbehind", "target_lookbehind")


@dataclass(frozen=True)
class DraftInputs:
    """What a request brings along to be guessed with: a draft model, and what tells both models' tokens."""

    model: Any = None
    tokenizer: Any = None  # the target's
    assistant_tokenizer: Any = None
    recipe: Recipe | None = None  # whose kind is a drafter

    @property
    def requested_by(self) -> str | None:
        """The argument by which something is to guess."""
        return "recipe" if self.recipe is not None else None if self.model is None else "assistant_model"


class ModelFactory(NamedTuple):
    """How a model that is given becomes one behind the port, with an empty cache."""

    as_model: Callable[[Any], Model]
    new_cache: Callable[[Model], RowCache]


class DrafterSpec(NamedTuple):
    """A drafter to be: requests of one key share it."""

    key: tuple[Any, ...]
    make_drafter: Callable[[NoiseSource], Drafter]
    row_params: Mapping[str, Any]  # parameters of the rows


def make_drafter_spec(
    config: GenerationConfig, target: Model, given: DraftInputs, make: ModelFactory
) -> DrafterSpec | None:
    """The drafter that a config and what came with it ask for: one line a drafter."""
    _check_unused_options(config, given)
    maker = _DrafterFactory(config, target, given, make)
    # As documented, a look-up that is asked for is made, also where a draft model stands by.
    choices: tuple[tuple[Any, str, Callable[[], DrafterSpec]], ...] = (
        (given.recipe, "recipe", maker.recipe),
        (config.assistant_early_exit, "assistant_early_exit", maker.early_exit),
        (config.prompt_lookup_num_tokens, "prompt_lookup_num_tokens", maker.lookup),
        (config.suffix_lookup_num_tokens, "suffix_lookup_num_tokens", maker.suffix),
        (given.model, "assistant_model", maker.assistant),
    )
    for asked, name, made in choices:
        if asked is not None:
            _check_drafts_supported(name, asked, target.traits)
            return made()
    return None


def describe_drafter(config: GenerationConfig) -> str | None:
    """What a config itself has guessed ahead, in words."""
    schedule = config.num_assistant_tokens_schedule
    if config.assistant_early_exit is not None:
        count = config.num_assistant_tokens
        return f"the first {config.assistant_early_exit} layers, up to {count} tokens ({schedule})"
    if config.prompt_lookup_num_tokens is not None:
        return f"prompt lookup, up to {config.prompt_lookup_num_tokens} tokens ({schedule})"
    if config.suffix_lookup_num_tokens is not None:
        return f"suffix lookup, up to {config.suffix_lookup_num_tokens} tokens ({schedule})"
    return None


@dataclass(frozen=True)
class _DrafterFactory:
    """Makes drafters for a config on a model."""

    config: GenerationConfig
    target: Model
    inputs: DraftInputs
    models: ModelFactory

    def lookup(self) -> DrafterSpec:
        """Copies what followed the same n-gram."""
        count = self.config.prompt_lookup_num_tokens or 0
        values = _schedule_params(self.config, None, count)
        values["prompt_lookup_num_tokens"] = count
        values["max_matching_ngram_size"] = self.config.max_matching_ngram_size or 2
        return DrafterSpec(("lookup",), lambda _: PromptLookup(), values)

    def suffix(self) -> DrafterSpec:
        """Copies what followed the longest repeated end."""
        count, shared = self.config.suffix_lookup_num_tokens or 0, self.config.suffix_lookup_shared
        values = _schedule_params(self.config, None, count) | {"suffix_lookup_num_tokens": count}
        return DrafterSpec(("suffix", shared), lambda _: SuffixLookup(shared), values)

    def early_exit(self) -> DrafterSpec:
        """Asks the model's own first layers."""
        layers, facts = self.config.assistant_early_exit or 0, self.target.traits
        check_early_exit(layers, facts)
        network: Any = getattr(self.target, "model", None)

        def build(noise: NoiseSource) -> Drafter:
            return EarlyExit(
                self.models.as_model(truncate_model(network, layers)), noise, vocabulary=facts.vocab_size
            )

        return DrafterSpec(("early exit", layers), build, _draft_model_params(self.config, None))

    def recipe(self) -> DrafterSpec:
        """Asks whoever a recipe makes."""
        recipe = self.inputs.recipe
        assert recipe is not None
        return DrafterSpec(recipe.key, lambda _: recipe.build(), _draft_model_params(self.config, None))

    def assistant(self) -> DrafterSpec:
        """Asks a draft model, in the target's tokens or in its own."""
        given, make, size = self.inputs, self.models, self.target.traits.vocab_size
        if hasattr(given.model, "draft"):  # behind the port already
            return DrafterSpec(
                ("own", id(given.model)), lambda _: given.model, _draft_model_params(self.config, None)
            )
        if not any(hasattr(given.model, name) for name in ("traits", "config", "models")):
            do = "pass a transformers model, or an object with `draft`"
            raise InputError("assistant_model", "must be a model or a drafter", given.model, do)
        try:
            helper = make.as_model(given.model)
        except UnsupportedModel as error:
            do = "pass its language model"
            raise InputError("assistant_model", "must be a model that decodes by itself", error, do) from None
        own = getattr(given.model, "generation_config", None)
        _check_same_architecture(helper.traits, self.target.traits)
        values = _draft_model_params(self.config, own)
        key: tuple[Any, ...] = ("assistant", id(given.model))
        if _has_same_tokens(given, helper.traits, self.target.traits):
            return DrafterSpec(
                key,
                lambda noise: AssistantDrafter(helper, make.new_cache(helper), noise, vocabulary=size),
                values,
            )
        values |= {name: _draft_option(self.config, own, name) for name in _CROSS_TOKENIZER_FIELDS}
        both = (given.tokenizer, given.assistant_tokenizer)
        key += (*map(id, both), self.config.do_sample)
        if not self.config.do_sample:
            return DrafterSpec(
                key,
                lambda _: RetokenizingDrafter(helper, make.new_cache(helper), *both, vocabulary=size),
                values,
            )

        def build(noise: NoiseSource) -> Drafter:
            return SharedVocabDrafter(helper, make.new_cache(helper), noise, *both, vocabulary=size)

        return DrafterSpec(key, build, values)


def _schedule_params(config: GenerationConfig, own: Any, count: int) -> dict[str, Any]:
    """How many tokens to guess, and how that changes."""
    schedule = _draft_option(config, own, "num_assistant_tokens_schedule")
    return {"draft_tokens": count, "draft_schedule": DRAFT_SCHEDULES.index(schedule)}


def _draft_model_params(config: GenerationConfig, own: Any) -> dict[str, Any]:
    """The parameters of rows for which a network guesses."""
    count = int(_draft_option(config, own, "num_assistant_tokens"))
    threshold = float(_draft_option(config, own, "assistant_confidence_threshold"))
    return _schedule_params(config, own, count) | {"assistant_confidence_threshold": threshold}


def _draft_option(config: GenerationConfig, own: Any, name: str) -> Any:
    """A field of the call, else of the draft model's own config, else of the model's, else its default."""
    theirs = getattr(own, name, None)
    given = name in config.given and config.source(name) != "model"
    return getattr(config, name) if given or theirs is None else theirs


def _has_same_tokens(given: DraftInputs, mine: ModelTraits, theirs: ModelTraits) -> bool:
    """Whether draft model and target speak in the same tokens."""
    tokenizers = (given.tokenizer, given.assistant_tokenizer)
    if tokenizers[1] is None:
        if mine.vocab_size != theirs.vocab_size:
            must = f"must have the {theirs.vocab_size} tokens of the model where no tokenizers are given"
            do = "pass `tokenizer` and `assistant_tokenizer`"
            raise InputError("assistant_model", must, f"{mine.vocab_size} tokens", do)
        return True
    if tokenizers[0] is None:
        do = "pass the model's tokenizer as well"
        raise InputError("tokenizer", "must be given with `assistant_tokenizer`", None, do)
    first, second = (TokenBytes.from_tokenizer(one) for one in tokenizers)
    return first.bytes == second.bytes


def _check_unused_options(config: GenerationConfig, given: DraftInputs) -> None:
    """Raise for what has no use here, and for a draft model beside what nothing is guessed for."""
    if config.is_assistant and config.source("is_assistant") != "model":
        do = "pass the draft model as `assistant_model`"
        raise ConfigError("is_assistant", "belongs into a draft model's own config", True, do)
    if given.assistant_tokenizer is not None and given.model is None:
        do = "pass `assistant_model` or leave it out"
        raise InputError("assistant_tokenizer", "has no use without a draft model", "a tokenizer", do)
    guesses = given.requested_by is not None or config.assistant_early_exit is not None
    looks = config.prompt_lookup_num_tokens is not None or config.suffix_lookup_num_tokens is not None
    idle = [
        *(() if guesses else _DRAFT_MODEL_FIELDS),
        *(() if given.model is not None else _CROSS_TOKENIZER_FIELDS),
    ]
    idle += [] if guesses or looks else ["num_assistant_tokens_schedule"]
    for name in idle:
        if name in config.given and config.source(name) != "model":
            must = "has no use where nothing is guessed by a network"
            do = "pass `assistant_model` or leave it out"
            raise ConfigError(name, must, getattr(config, name), do)
    if given.requested_by is None:
        return
    who = type(given.model).__name__ if given.recipe is None else given.recipe
    for name, off in (("num_beams", 1), ("penalty_alpha", None), ("banned_phrases", None)):
        if getattr(config, name) not in (off, (), 0.0):
            must = f"must be None with `{name}`, for which nothing is guessed ahead"
            raise InputError(given.requested_by, must, who, f"leave out `{name}`")
    if given.recipe is None:
        return
    others = ("prompt_lookup_num_tokens", "suffix_lookup_num_tokens", "assistant_early_exit")
    found = [name for name in others if getattr(config, name) is not None]
    found += ["assistant_model"] if given.model is not None else []
    if found:
        raise InputError(
            "recipe", f"must be None with `{found[0]}`, since one alone guesses", who, "leave one out"
        )


def _check_drafts_supported(name: str, asked: Any, facts: ModelTraits) -> None:
    """Raise for guesses on a model that cannot take back what it has read."""
    if facts.cache_type == "recurrent":
        must = "needs a model that can forget tokens, this one remembers more than keys and values"
        got = asked if isinstance(asked, int) else type(asked).__name__
        raise ConfigError(name, must, got, "leave it out")


def _check_same_architecture(mine: ModelTraits, theirs: ModelTraits) -> None:
    """Raise for a draft model that cannot follow the target."""
    if mine.is_encoder_decoder != theirs.is_encoder_decoder:
        kinds = {True: "an encoder", False: "no encoder"}
        must = f"must have {kinds[theirs.is_encoder_decoder]}, as the model has"
        raise InputError("assistant_model", must, f"one with {kinds[mine.is_encoder_decoder]}")
