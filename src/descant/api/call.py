"""A call: prompts with their configs, admitted together into a Session of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from descant.api.inputs import RaggedPrompts, prepare_prompts
from descant.api.user_cache import UserCache, return_cache
from descant.config.generation_config import FIELDS, GenerationConfig
from descant.core.interfaces import RowCache
from descant.core.records import Hypothesis, Observation
from descant.decoding.guidance.cfg import NEGATIVE_PROMPT_KEY
from descant.engine.planner import pad_token_id
from descant.engine.session import Request, Session
from descant.errors import ConfigError, InputError
from descant.kv_cache.cached_row import CachedRow
from descant.models.hf_generation_config import explicit_values
from descant.models.no_cache import NoCache
from descant.recipes.loading import load_recipe
from descant.recipes.recipe import Recipe
from descant.tokenization.token_healing import HealedSuffix
from descant.trace.tracer import Tracer

__all__ = ["Call", "CallOptions", "as_tuple", "bind_inputs", "merge_configs", "num_rows", "pop_recipe"]

# What concerns the call as a whole and not one sequence: all rows must say the same.
_SHARED_FIELDS = (
    "return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states",
    "pad_token_id", "bos_token_id", "decoder_start_token_id", "use_cache", "cache_implementation",
    "cache_config", "return_legacy_cache",
)  # fmt: skip


@dataclass(frozen=True)
class CallOptions:
    """What a caller asks for: how to decode, with one config for all prompts or one for each."""

    configs: Sequence[GenerationConfig]  # merged
    processors: Sequence[Any] = ()
    criteria: Sequence[Any] = ()
    tokenizer: Any = None
    list_argument: str = "generation_config"  # the argument that may be a list, and is
    assistant_model: Any = None
    assistant_tokenizer: Any = None
    past: Any = None  # the user's cache
    recipe: Recipe | None = None  # somebody else's part of the loop
    tracer: Tracer | None = None  # who records the run

    @classmethod
    def from_call(cls, model: Any, argument: Any, call: Mapping[str, Any], **others: Any) -> CallOptions:
        """What a call comes to, whose config is `argument` and whose fields are `call`."""
        several = "generation_config" if isinstance(argument, list | tuple) else "seed"
        return cls(merge_configs(model, argument, call), list_argument=several, **others)

    @property
    def config(self) -> GenerationConfig:
        """The config of the call as a whole."""
        return self.configs[0]


def merge_configs(model: Any, argument: Any, call: Mapping[str, Any]) -> list[GenerationConfig]:
    """The configs that count: one for all prompts, or one each where the argument or the seed is a list."""
    own = getattr(model, "generation_config", None)
    given = list(argument) if isinstance(argument, list | tuple) else [argument]
    if not given:
        raise InputError("generation_config", "must hold a config for each prompt", argument)
    calls = _split_by_seed(call, len(given))
    given = given * len(calls) if len(given) == 1 else given
    calls = calls * len(given) if len(calls) == 1 else calls
    made: dict[Any, GenerationConfig] = {}
    configs = []
    for one, how in zip(given, calls, strict=True):
        key = (id(one), id(how))
        if key not in made:
            # A model's own config handed back as the argument is still the model's: leftovers stay harmless.
            made[key] = GenerationConfig.merge(
                how, None if one is own else _as_generation_config(one), _as_generation_config(own)
            )
        configs.append(made[key])
    _validate_shared_fields(configs)
    return configs


def _split_by_seed(call: Mapping[str, Any], count: int) -> list[Mapping[str, Any]]:
    """The call for all prompts, or where its seeds are several, one for each, of `count` unless that is 1."""
    seeds: Any = call.get("seed")
    if not isinstance(seeds, list | tuple) and not getattr(seeds, "ndim", 0):
        return [call]
    each = list(seeds if isinstance(seeds, list | tuple) else seeds.tolist())
    if not each or count not in (1, len(each)):
        many = "one number or a list" if count == 1 else str(count)
        raise ConfigError("seed", f"must be {many}, one a prompt", each)
    kept = {seed: {**call, "seed": seed} for seed in dict.fromkeys(FIELDS["seed"].parse(one) for one in each)}
    return [kept[FIELDS["seed"].parse(seed)] for seed in each]


class Call:
    """The prompts of one call in a Session: which request is which prompt, and which lines are its."""

    def __init__(
        self,
        model: Any,
        asked: CallOptions,
        *,
        states: Sequence[str] = (),
        observe: Callable[[Observation], None] | None = None,
    ) -> None:
        self.options = asked
        self.user_cache = None if asked.past is None else UserCache(asked.past)
        cache = _requested_cache(asked.config, self.user_cache)
        self.session = Session(model, states=states, observe=observe, cache=cache, trace=asked.tracer)
        self.request_ids: list[int] = []
        self.configs: list[GenerationConfig] = []
        self.healed_suffixes: list[HealedSuffix] = []  # what token healing has taken off each prompt

    def admit(self, given: Mapping[str, Any]) -> RaggedPrompts:
        """Take the prompts of the model inputs `given` in."""
        asked, model = self.options, self.session.model
        given = dict(given)
        negative = _negative_prompts(
            given.pop(NEGATIVE_PROMPT_KEY, None), given.pop("negative_prompt_attention_mask", None)
        )
        prompts = prepare_prompts(given, asked.config, model.traits, model.device)
        if negative is not None and len(negative) != len(prompts):
            raise InputError(
                NEGATIVE_PROMPT_KEY,
                f"must have one line for each of the {len(prompts)} prompts",
                len(negative),
            )
        self.configs = _apply_max_length_criteria(asked.configs, asked.criteria)
        if len(self.configs) == 1:
            self.configs *= len(prompts)
        if len(self.configs) != len(prompts):
            must = f"must be one for each of the {len(prompts)} prompts, or one for all"
            raise InputError(asked.list_argument, must, f"{len(self.configs)} of them")
        whole = [prompts.prompt(line) for line in range(len(prompts))]
        self.healed_suffixes = [
            HealedSuffix.from_prompt(asked.tokenizer, ids.tolist())
            if config.token_healing and asked.tokenizer is not None
            else HealedSuffix()
            for config, ids in zip(self.configs, whole, strict=True)
        ]
        pasts = [None] * len(prompts) if self.user_cache is None else self.user_cache.cached_rows(prompts)
        prompts = prompts.drop_last_tokens(
            [len(tail) for tail in self.healed_suffixes], pad_token_id(asked.config)
        )
        keep = self._returns_cache(sum(config.num_return_sequences for config in self.configs))
        first, requests = 0, []
        for line, config in enumerate(self.configs):
            requests.append(
                Request(
                    whole[line],
                    config,
                    prompts.inputs[line]
                    if negative is None
                    else {**prompts.inputs[line], NEGATIVE_PROMPT_KEY: negative[line]},
                    tuple(asked.processors),
                    tuple(asked.criteria),
                    tokenizer=asked.tokenizer,
                    assistant_model=asked.assistant_model,
                    assistant_tokenizer=asked.assistant_tokenizer,
                    past_key_values=pasts[line],
                    recipe=asked.recipe,
                    return_past_key_values=keep,
                    prompt_index=line,
                    padded_width=prompts.padded_ids.shape[1],
                    # How many rows a recipe makes of a prompt is its own affair, and so is its luck.
                    noise_row=-1 if asked.recipe is not None and asked.recipe.kind == "strategy" else first,
                    config_merged=True,
                )
            )
            first += num_rows(config)
        self.request_ids = self.session.admit(*requests, noise_rows=first)
        return prompts

    def _returns_cache(self, sequences: int) -> bool:
        """Whether anybody will see what so many sequences hold."""
        config, facts = self.options.config, self.session.model.traits
        if facts.is_encoder_decoder:
            return False  # what it sees of the encoder is no part of what rows hold
        single = facts.cache_type == "kv" or (facts.cache_type == "recurrent" and sequences == 1)
        if self.user_cache is not None and (not self.user_cache.frozen or config.return_dict_in_generate):
            if not single:
                must = "of a model that keeps more than keys and values is filled for one sequence alone"
                raise InputError("past_key_values", must, f"{sequences} sequences", "pass them one by one")
            return True
        told = config.source("use_cache") in ("call", "argument") and config.use_cache
        wanted = config.return_dict_in_generate and (told or bool(config.return_legacy_cache))
        return wanted and single and not hasattr(self.session.model, "new_cache")

    def result_cache(
        self, pasts: Sequence[CachedRow], found: Sequence[Hypothesis], prompts: RaggedPrompts
    ) -> Any:
        """The cache that holds what the sequences found hold: the user's, if it can be changed."""
        if not pasts:
            return None
        counts = [config.num_return_sequences for config in self.configs]
        whose = [line for line, count in enumerate(counts) for _ in range(count)]
        tokens = [
            torch.cat((prompts.prompt(line).cpu(), one.tokens[:-1]))
            for line, one in zip(whose, found, strict=True)
        ]
        wide = prompts.padded_ids.shape[1]
        # As far as all of them are read: the last token of one that ended early is not.
        columns = torch.ones(len(found), wide + min(len(one.tokens) for one in found) - 1, dtype=torch.bool)
        if prompts.mask is not None:
            columns[:, :wide] = prompts.mask.cpu()[whose]
        return return_cache(self.user_cache, pasts, tokens, columns)

    def first_lines(self, count: Callable[[GenerationConfig], int]) -> dict[int, int]:
        """The first line of each request where each has `count(config)` lines."""
        first, lines = 0, {}
        for number, config in zip(self.request_ids, self.configs, strict=True):
            lines[number] = first
            first += count(config)
        return lines


def _requested_cache(config: GenerationConfig, loan: UserCache | None) -> RowCache | None:
    """The cache of the call, where it is not for the model to say; an error where two are asked for."""
    if config.use_cache is False and config.source("use_cache") != "model":
        if loan is not None:
            raise ConfigError("use_cache", "must not be False with `past_key_values`", False, "leave one out")
        if config.assistant_early_exit is not None:
            must = "must not be False with `assistant_early_exit`, which reads what its layers keep"
            raise ConfigError(("use_cache", "assistant_early_exit"), must, False, "leave one out")
        return NoCache()
    if loan is None:
        return None
    if config.cache_implementation is not None and config.source("cache_implementation") != "model":
        do = "leave one of them out"
        must = "has no use with `past_key_values`, which is of a kind already"
        raise ConfigError("cache_implementation", must, config.cache_implementation, do)
    return loan.empty_like()


def _negative_prompts(ids: Any, mask: Any) -> list[Tensor] | None:
    """Negative prompts [B, L] as lines without padding."""
    if ids is None:
        if mask is not None:
            do = "leave it out"
            raise InputError(
                "negative_prompt_attention_mask", f"has no use without `{NEGATIVE_PROMPT_KEY}`", mask, do
            )
        return None
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point() or not ids.numel():
        raise InputError(NEGATIVE_PROMPT_KEY, "must be [batch, length] of ids", ids)
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != ids.shape):
        raise InputError(
            "negative_prompt_attention_mask", f"must have the shape of `{NEGATIVE_PROMPT_KEY}`", mask
        )
    return [line if mask is None else line[mask[at].bool()] for at, line in enumerate(ids)]


def _apply_max_length_criteria(
    configs: Sequence[GenerationConfig], criteria: Sequence[Any]
) -> list[GenerationConfig]:
    """The configs, their lengths replaced by a MaxLengthCriteria given by hand, as documented."""
    lengths = [one.max_length for one in criteria if type(one).__name__ == "MaxLengthCriteria"]
    if not lengths:
        return list(configs)
    made = {id(one): one.replace(max_length=min(lengths), max_new_tokens=None) for one in configs}
    return [made[id(one)] for one in configs]


def pop_recipe(given: dict[str, Any]) -> tuple[Recipe | None, dict[str, Any]]:
    """The recipe among the keyword arguments of a call, with its own arguments, and all the others."""
    given = dict(given)
    trust = given.pop("trust_remote_code", None)
    both = {name: given.pop(name, None) for name in ("recipe", "custom_generate")}
    named = {name: value for name, value in both.items() if value is not None}
    if not named:
        if trust:
            raise InputError("trust_remote_code", "has no use without `recipe`", trust, "leave it out")
        return None, given
    if len(named) > 1:
        must = "is another name of `recipe`, and must be given alone"
        raise InputError("custom_generate", must, named["custom_generate"], "leave it out")
    [asked] = named.values()
    recipe = load_recipe(asked, trust_remote_code=trust)
    return recipe.split_arguments(given) if recipe.kind != "generate" else (recipe, given)


def as_tuple(name: str, given: Any) -> tuple[Any, ...]:
    """Processors or criteria, one or a list of them, as a tuple."""
    if given is None:
        return ()
    if callable(given) and not isinstance(given, list | tuple):
        return (given,)
    if not isinstance(given, list | tuple):
        raise InputError(name, "must be a list of callables", given)
    return tuple(given)


def bind_inputs(model: Any, inputs: Any, others: Mapping[str, Any]) -> dict[str, Any]:
    """The model's inputs, with `inputs` under its own name."""
    given = dict(others)
    if inputs is None:
        return given
    main = getattr(model, "main_input_name", "input_ids")
    if main != "input_ids" and isinstance(inputs, torch.Tensor) and inputs.is_floating_point():
        return {**given, main: inputs}
    if not isinstance(inputs, torch.Tensor) or inputs.ndim not in (2, 3):
        raise InputError("inputs", "must be [batch, length] of ids or [batch, length, size]", inputs)
    name = "inputs_embeds" if inputs.ndim == 3 else "input_ids"
    if given.get(name) is not None:
        raise InputError(name, "must not be given beside `inputs`, which is the same", given[name])
    return {**given, name: inputs}


def num_rows(config: GenerationConfig) -> int:
    """How many rows a request draws for: beams draw as one."""
    return config.num_return_sequences if config.num_beams == 1 else 1


def _as_generation_config(given: Any) -> GenerationConfig | None:
    """A generation config of ours, from ours or transformers' own."""
    if given is None or isinstance(given, GenerationConfig):
        return given
    if not hasattr(given, "to_dict"):
        raise InputError("generation_config", "must be a GenerationConfig, or a list of them", given)
    # Its attributes and not its `to_dict`, which copies everything deeply at every call.
    return GenerationConfig.from_transformers(explicit_values(given))


def _validate_shared_fields(configs: Sequence[GenerationConfig]) -> None:
    """Raise for configs of one call that differ in what concerns it as a whole."""
    for name in _SHARED_FIELDS:
        values = [getattr(config, name) for config in configs]
        odd = next((value for value in values if value != values[0]), values[0])
        if odd != values[0]:
            must = f"must be the same for every prompt of a call, the first has {values[0]!r}"
            raise ConfigError(name, must, odd)
