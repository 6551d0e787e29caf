"""From a config to its drafter and the drafter's row parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

from descant.config.generation_config import FIELDS, GenerationConfig
from descant.config.grammar_spec import GrammarSpec
from descant.config.registry import DRAFTER_FIELDS
from descant.core.interfaces import Drafter, Model, ModelTraits, NoiseSource
from descant.decoding.speculative.acceptance import DRAFT_SCHEDULES
from descant.decoding.speculative.cross_tokenizer import RetokenizingDrafter, SharedVocabDrafter
from descant.decoding.speculative.draft_model import AssistantDrafter, EarlyExit, check_early_exit
from descant.decoding.speculative.lookup import GrammarDrafter, PromptLookup, SuffixLookup
from descant.errors import ConfigError, InputError, UnsupportedModel
from descant.models.model_adapter import as_model
from descant.models.truncated_model import truncate_model
from descant.recipes.recipe import Recipe
from descant.tokenization.token_bytes import TokenBytes

# Fields that only a draft model or early exit uses.
_DRAFT_MODEL_FIELDS: Final = ("num_assistant_tokens", "assistant_confidence_threshold")
USER_DRAFTER: Final = ("own",)  # how the key of a drafter begins that is the user's object
_MAX_FORCED_TOKENS: Final = 32  # that a grammar drafts at once
# Fields of which each drafter has one at least.
DRAFT_FIELDS: Final = {name for name, one in FIELDS.items() if one.group == "speculation"} | {"grammar"}
_CROSS_TOKENIZER_FIELDS: Final = ("assistant_lookbehind", "target_lookbehind")


@dataclass(frozen=True)
class DraftInputs:
    """The parts of a request that serve drafting: a draft model, and the tokenizers of both models."""

    model: Any = None
    tokenizer: Any = None  # the target's
    assistant_tokenizer: Any = None
    recipe: Recipe | None = None  # of kind "drafter"
    has_strategy: bool = False  # whether a recipe selects the strategy

    @property
    def requested_by(self) -> str | None:
        """The argument that requests drafting; None: none does."""
        return "recipe" if self.recipe is not None else None if self.model is None else "assistant_model"


class DrafterSpec(NamedTuple):
    """A drafter to be built: requests with equal keys share one."""

    key: tuple[Any, ...]
    make_drafter: Callable[[NoiseSource], Drafter]
    row_params: Mapping[str, Any]


class LookupDrafter(NamedTuple):
    """A drafter without a network: the field that selects it and says how many tokens it drafts."""

    field: str
    name: str  # in words
    make: Callable[..., Drafter]
    settings: tuple[str, ...] = ()  # fields of its constructor: requests that differ in one do not share it
    row_fields: tuple[str, ...] = ()  # further fields that are parameters of its rows


_MAX_RECURRENT_ROWS: Final = 4  # for which a recurrent model drafts the tokens that a grammar forces

LOOKUPS: Final = (
    LookupDrafter(
        "prompt_lookup_num_tokens", "prompt lookup", PromptLookup, row_fields=("max_matching_ngram_size",)
    ),
    LookupDrafter("suffix_lookup_num_tokens", "suffix lookup", SuffixLookup, ("suffix_lookup_shared",)),
)


def drafter_spec(config: GenerationConfig, target: Model, given: DraftInputs) -> DrafterSpec | None:
    """The drafter that a config or a request's inputs select; None: no drafting."""
    brings_none = given.requested_by is None and given.assistant_tokenizer is None
    if brings_none and config.given.isdisjoint(DRAFT_FIELDS):  # most requests
        return None
    _check_unused_options(config, given)
    other = _make_other_spec(config, target, given)
    if not _drafts_forced_tokens(config, target.traits, given):
        return other
    if other is None:
        values = _schedule_params(config, None, _MAX_FORCED_TOKENS)
        # Rows of a recurrent model that differ in length share no forward: drafts cost more than they save.
        max_rows = _MAX_RECURRENT_ROWS if target.traits.cache_type == "recurrent" else None
        return DrafterSpec(("grammar",), lambda _: GrammarDrafter(max_rows=max_rows), values)
    make_other = other.make_drafter
    key = (
        (*USER_DRAFTER, "grammar", *other.key[1:])
        if other.key[:1] == USER_DRAFTER
        else ("grammar", *other.key)
    )
    return DrafterSpec(key, lambda noise: GrammarDrafter(make_other(noise)), other.row_params)


def _drafts_forced_tokens(config: GenerationConfig, traits: ModelTraits, given: DraftInputs) -> bool:
    """Whether a grammar drafts the tokens that it forces: its method and model must support drafts."""
    return _selects_forced_tokens(config) and not traits.continues_by_one and not given.has_strategy


def _selects_forced_tokens(config: GenerationConfig) -> bool:
    """Whether a config's grammar drafts, with a method that supports drafts."""
    return (
        isinstance(config.grammar, GrammarSpec)
        and config.grammar.drafts
        and config.num_beams == 1
        and not config.penalty_alpha
        and not config.banned_phrases
    )


def _make_other_spec(config: GenerationConfig, target: Model, given: DraftInputs) -> DrafterSpec | None:
    """The drafter beside that of a grammar."""
    # As in transformers, a lookup takes precedence over a draft model.
    choices: tuple[tuple[Any, str, Callable[[], DrafterSpec]], ...] = (
        (given.recipe, "recipe", lambda: _recipe_spec(config, given)),
        (config.assistant_early_exit, "assistant_early_exit", lambda: _early_exit_spec(config, target)),
        *((getattr(config, one.field), one.field, partial(_lookup_spec, config, one)) for one in LOOKUPS),
        (given.model, "assistant_model", lambda: _assistant_spec(config, target, given)),
    )
    for value, name, make in choices:
        if value is not None:
            _check_drafts_supported(name, value, target.traits)
            return make()
    return None


def describe_drafter(config: GenerationConfig) -> str | None:
    """The drafter that a config itself selects, in words."""
    schedule = config.num_assistant_tokens_schedule
    drafter = _describe_other(config, schedule)
    if not _selects_forced_tokens(config):
        return drafter
    return "tokens that the grammar forces" + ("" if drafter is None else f", else {drafter}")


def _describe_other(config: GenerationConfig, schedule: str) -> str | None:
    if config.assistant_early_exit is not None:
        count = config.num_assistant_tokens
        return f"the first {config.assistant_early_exit} layers, up to {count} tokens ({schedule})"
    for lookup in LOOKUPS:
        count = getattr(config, lookup.field)
        if count is not None:
            return f"{lookup.name}, up to {count} tokens ({schedule})"
    return None


def _lookup_spec(config: GenerationConfig, lookup: LookupDrafter) -> DrafterSpec:
    """A drafter without a network."""
    values = _schedule_params(config, None, getattr(config, lookup.field))
    fields = {name: getattr(config, name) for name in (lookup.field, *lookup.row_fields)}
    values |= {name: value for name, value in fields.items() if value is not None}
    settings = [getattr(config, name) for name in lookup.settings]
    return DrafterSpec((lookup.name, *settings), lambda _: lookup.make(*settings), values)


def _early_exit_spec(config: GenerationConfig, target: Model) -> DrafterSpec:
    """Early exit: drafts with the model's first layers."""
    layers, traits, network = config.assistant_early_exit or 0, target.traits, target.network
    check_early_exit(layers, traits)

    def build(noise: NoiseSource) -> Drafter:
        return EarlyExit(as_model(truncate_model(network, layers)), noise, vocabulary=traits.vocab_size)

    return DrafterSpec(("early exit", layers), build, _draft_model_params(config, None))


def _recipe_spec(config: GenerationConfig, given: DraftInputs) -> DrafterSpec:
    """The drafter of a recipe."""
    recipe = given.recipe
    assert recipe is not None
    return DrafterSpec(recipe.key, lambda _: recipe.build(), _draft_model_params(config, None))


def _assistant_spec(config: GenerationConfig, target: Model, given: DraftInputs) -> DrafterSpec:
    """A draft model, with the target's tokenizer or its own."""
    size = target.traits.vocab_size
    if hasattr(given.model, "draft"):  # it is a drafter already
        values = _draft_model_params(config, None)
        return DrafterSpec((*USER_DRAFTER, id(given.model)), lambda _: given.model, values)
    if not any(hasattr(given.model, name) for name in ("traits", "config", "models")):
        do = "pass a transformers model, or an object with `draft`"
        raise InputError("assistant_model", "must be a model or a drafter", given.model, do)
    try:
        draft_model = as_model(given.model)
    except UnsupportedModel as error:
        do = "pass its language model"
        raise InputError("assistant_model", "must be a model that decodes by itself", error, do) from None
    draft_config = getattr(given.model, "generation_config", None)
    _check_same_architecture(draft_model.traits, target.traits)
    values = _draft_model_params(config, draft_config)
    key: tuple[Any, ...] = ("assistant", id(given.model))
    if _has_same_tokens(given, draft_model.traits, target.traits):
        return DrafterSpec(
            key,
            lambda noise: AssistantDrafter(draft_model, draft_model.new_cache(), noise, vocabulary=size),
            values,
        )
    values |= {name: _draft_option(config, draft_config, name) for name in _CROSS_TOKENIZER_FIELDS}
    both, samples = (given.tokenizer, given.assistant_tokenizer), config.do_sample

    def build(noise: NoiseSource) -> Drafter:
        cache = draft_model.new_cache()
        if samples:
            return SharedVocabDrafter(draft_model, cache, noise, *both, vocabulary=size)
        return RetokenizingDrafter(draft_model, cache, *both, vocabulary=size)

    return DrafterSpec((*key, *map(id, both), samples), build, values)


def _schedule_params(config: GenerationConfig, draft_config: Any, count: int) -> dict[str, Any]:
    """The number of draft tokens, and the schedule of that number."""
    schedule = _draft_option(config, draft_config, "num_assistant_tokens_schedule")
    return {"draft_tokens": count, "draft_schedule": DRAFT_SCHEDULES.index(schedule)}


def _draft_model_params(config: GenerationConfig, draft_config: Any) -> dict[str, Any]:
    """The parameters of rows with a draft network."""
    count = int(_draft_option(config, draft_config, "num_assistant_tokens"))
    threshold = float(_draft_option(config, draft_config, "assistant_confidence_threshold"))
    return _schedule_params(config, draft_config, count) | {"assistant_confidence_threshold": threshold}


def _draft_option(config: GenerationConfig, draft_config: Any, name: str) -> Any:
    """A field of the call, else of the draft model's config, else of the model's, else its default."""
    draft_value = getattr(draft_config, name, None)
    given = name in config.given and config.source(name) != "model"
    return getattr(config, name) if given or draft_value is None else draft_value


def _has_same_tokens(given: DraftInputs, draft: ModelTraits, target: ModelTraits) -> bool:
    """Whether draft model and target have the same vocabulary."""
    tokenizers = (given.tokenizer, given.assistant_tokenizer)
    if tokenizers[1] is None:
        if draft.vocab_size != target.vocab_size:
            must = f"must have the {target.vocab_size} tokens of the model where no tokenizers are given"
            do = "pass `tokenizer` and `assistant_tokenizer`"
            raise InputError("assistant_model", must, f"{draft.vocab_size} tokens", do)
        return True
    if tokenizers[0] is None:
        do = "pass the model's tokenizer as well"
        raise InputError("tokenizer", "must be given with `assistant_tokenizer`", None, do)
    first, second = (TokenBytes.from_tokenizer(tokenizer) for tokenizer in tokenizers)
    return first.bytes == second.bytes


def _check_unused_options(config: GenerationConfig, given: DraftInputs) -> None:
    """Raise for fields without effect, and for drafting with a method that does not support it."""
    if config.is_assistant and config.source("is_assistant") != "model":
        do = "pass the draft model as `assistant_model`"
        raise ConfigError("is_assistant", "belongs into a draft model's own config", True, do)
    if given.assistant_tokenizer is not None and given.model is None:
        do = "pass `assistant_model` or leave it out"
        raise InputError("assistant_tokenizer", "has no use without a draft model", "a tokenizer", do)
    has_network = given.requested_by is not None or config.assistant_early_exit is not None
    has_lookup = any(getattr(config, lookup.field) is not None for lookup in LOOKUPS) or (
        isinstance(config.grammar, GrammarSpec) and config.grammar.drafts
    )
    unused = [
        *(() if has_network else _DRAFT_MODEL_FIELDS),
        *(() if given.model is not None else _CROSS_TOKENIZER_FIELDS),
    ]
    unused += [] if has_network or has_lookup else ["num_assistant_tokens_schedule"]
    for name in unused:
        if name in config.given and config.source(name) != "model":
            must = "has no use without a draft model"
            do = "pass `assistant_model` or leave it out"
            raise ConfigError(name, must, getattr(config, name), do)
    if given.requested_by is None:
        return
    drafter = type(given.model).__name__ if given.recipe is None else given.recipe
    for name, off in (("num_beams", 1), ("penalty_alpha", None), ("banned_phrases", None)):
        if getattr(config, name) not in (off, (), 0.0):
            must = f"must be None with `{name}`, which does not support drafting"
            raise InputError(given.requested_by, must, drafter, f"leave out `{name}`")
    if given.recipe is None:
        return
    selected = [name for name in DRAFTER_FIELDS if getattr(config, name) is not None]
    selected += ["assistant_model"] if given.model is not None else []
    if selected:
        must = f"must be None with `{selected[0]}`: there can be only one drafter"
        raise InputError("recipe", must, drafter, "leave one out")


def _check_drafts_supported(name: str, value: Any, traits: ModelTraits) -> None:
    """Raise for drafts on a model that cannot verify several in one forward."""
    if traits.continues_by_one:
        must = "needs a model that reads several tokens after its state, this one reads them one by one"
        got = value if isinstance(value, int) else type(value).__name__
        raise ConfigError(name, must, got, "leave it out")


def _check_same_architecture(draft: ModelTraits, target: ModelTraits) -> None:
    """Raise unless both models have an encoder or neither has."""
    if draft.is_encoder_decoder != target.is_encoder_decoder:
        kinds = {True: "an encoder", False: "no encoder"}
        must = f"must have {kinds[target.is_encoder_decoder]}, as the model has"
        raise InputError("assistant_model", must, f"one with {kinds[draft.is_encoder_decoder]}")
