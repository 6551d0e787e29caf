"""From a config to what runs: the strategy, processors, wrappers and row parameters."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from operator import itemgetter
from typing import Any, Final

from descant.config.generation_config import GenerationConfig
from descant.core.context import PromptInfo
from descant.core.interfaces import ModelTraits, RowCache
from descant.decoding.guidance import ClassifierFreeGuidance, DoLa, early_layers
from descant.decoding.pipeline import (
    BACKTRACK_MASK,
    PROCESSOR_SPECS,
    ProcessorSpec,
    end_token_ids,
    is_set,
    processor_order,
)
from descant.decoding.processors.base import as_id_list
from descant.engine.planning.cache_factory import CACHE_FIELD, choose_cache
from descant.engine.planning.drafter_factory import DrafterSpec
from descant.engine.planning.strategy_choice import (
    StrategyChoice,
    check_config,
    choose_strategy,
    resolve_max_length,
)
from descant.errors import ConfigError
from descant.models.model_adapter import as_model
from descant.models.transformers_model import new_cache
from descant.recipes.recipe import Recipe

__all__ = [
    "WRAPPERS",
    "DecodingPlan",
    "PlanParams",
    "PromptParams",
    "RowIds",
    "WrapperSpec",
    "as_model",
    "choose_cache",
    "make_plan",
    "new_cache",
    "pad_token_id",
    "validate_cache",
]


@dataclass(frozen=True)
class WrapperSpec:
    """A wrapper, when a config enables it, and the parameters of the rows that use it."""

    name: str
    make: Callable[[Any], Any]  # returns a Wrapper
    is_enabled: Callable[[GenerationConfig], bool]
    row_params: Callable[[GenerationConfig, ModelTraits], dict[str, Any]]


def _dola_params(config: GenerationConfig, traits: ModelTraits) -> dict[str, Any]:
    assert config.dola_layers is not None
    if traits.is_encoder_decoder or not traits.has_lm_head:
        reason = "an encoder" if traits.is_encoder_decoder else "no output embeddings of its own"
        must = f"is not supported for a model with {reason}"
        raise ConfigError("dola_layers", must, config.dola_layers, "leave it out")
    return {"early_layers": early_layers(config.dola_layers, traits)}


def _guidance_params(config: GenerationConfig, traits: ModelTraits) -> dict[str, Any]:
    if traits.is_encoder_decoder:
        must = "is not supported for a model with an encoder, whose prompt is not in the decoder"
        raise ConfigError("guidance_scale", must, config.guidance_scale, "leave it out")
    return {"uses_guidance": 1, "guidance_scale": float(config.guidance_scale or 0.0)}


# The innermost wrapper first.
WRAPPERS: Final[Mapping[str, WrapperSpec]] = {
    "dola": WrapperSpec("DoLa", DoLa, is_set("dola_layers"), _dola_params),
    "guidance": WrapperSpec(
        "guidance", ClassifierFreeGuidance, is_set("guidance_scale", 1.0), _guidance_params
    ),
}


@dataclass(frozen=True, kw_only=True)
class PlanParams:
    """Row parameters that follow from the config: equal for all requests of a plan."""

    eos_token_ids: list[int]
    stop_token_ids: list[int]
    end_token_ids: list[int]  # both of the above
    pad_token_id: int
    do_sample: int  # 0 or 1
    num_sequences: int  # rows that a prompt becomes after its prefill, without beams
    seed: int  # -1: none given
    early_stopping: int  # 0: False, 1: True, 2: "never"
    length_penalty: float
    min_tokens_to_keep: int  # by filters, so that enough candidates remain
    logprobs: int  # alternatives to record per token; -1: no log-probabilities


_PLAN_FIELDS: Final = frozenset(entry.name for entry in fields(PlanParams))


@dataclass(frozen=True, kw_only=True)
class PromptParams:
    """Row parameters that follow from the prompt."""

    max_length: int  # tokens, prompt included
    last_length: int  # the length of a row before its last choice
    begin_index: int  # length at which the first new token is chosen
    padded_width: int  # width of the padded prompts of its call
    prompt_index: int  # index of the prompt in its call
    deadline: float  # monotonic seconds; inf: none


@dataclass(frozen=True, kw_only=True)
class RowIds:
    """Row parameters that admission assigns: ids of shared objects, and where the row draws its noise."""

    strategy_id: int
    processor_chain_id: int
    criteria_id: int  # -1 here and below: none
    stop_strings_id: int
    stop_regex_id: int
    seed: int  # -1: it draws from torch's generator
    noise_row: int  # its first row of torch's noise
    has_side_inputs: int  # 1: inputs besides tokens, so the prompt is prefilled before anything is drafted
    processor_seed: int | None = None  # for random processors; None: it has none
    batch_id: int = -1  # the call that it belongs to, for user code that keeps state by row
    batch_row: int = 0  # the index of its first sequence among the rows of that call
    batch_size: int = 1  # the number of these rows; 1: it is shown as it is


@dataclass(frozen=True)
class DecodingPlan:
    """The strategy, processors, wrappers and row parameters of all requests of one config on a model."""

    config: GenerationConfig
    strategy: StrategyChoice
    processors: tuple[tuple[int, ProcessorSpec], ...]  # each with its position in the order
    order: tuple[str, ...]  # the names of all processors, the user's own among them
    params: PlanParams
    method_params: Mapping[str, Any]  # row parameters of the strategy, wrappers, drafter and recipe
    wrappers: tuple[str, ...] = ()  # names of the model wrappers that its rows use
    recipe: Recipe | None = None

    @property
    def base_params(self) -> dict[str, Any]:
        """The row parameters that do not depend on the prompt."""
        return {**vars(self.params), **self.method_params}

    @property
    def max_rewind(self) -> int | None:
        """The number of tokens that its rows may take back at once; None: any number."""
        return self.strategy.traits.max_rewind

    @property
    def needs_full_prefill(self) -> bool:
        """Whether the whole prompt must be fed in one forward, also where a prefix of it is cached."""
        return self.strategy.traits.needs_prompt_states

    @property
    def forks(self) -> bool:
        """Whether one prompt becomes several rows."""
        return self.num_rows > 1 or self.strategy.traits.forks

    @property
    def num_rows(self) -> int:
        """The most rows of a request between steps."""
        own = int(self.method_params.get("max_rows", 1))  # of a recipe
        return max(self.config.num_beams, self.params.num_sequences, own)

    @cached_property
    def has_open_count(self) -> bool:
        """Whether a recipe forks its rows at any step, so that it says how many sequences there are."""
        return self.recipe is not None and self.recipe.forks(self.config)

    @property
    def is_final_at_end(self) -> bool:
        """Whether its tokens are certain only at its end, but for those that all its sequences share."""
        return self.config.num_beams > 1 or self.has_open_count

    def shared_positions(self, length: int) -> int:
        """The positions of a prompt of that length that its rows share, once for each row."""
        return max(self.num_rows * self.strategy.num_candidates, 2) * length if self.forks else 0

    @cached_property
    def prefill_chunk_size(self) -> int | None:
        """Positions per prefill forward; None: the whole prompt. A model's own default is ignored."""
        config = self.config
        return None if config.source("prefill_chunk_size") == "model" else config.prefill_chunk_size

    def row_params(self, prompt: PromptInfo, traits: ModelTraits) -> dict[str, Any]:
        """The parameters of a row with that prompt, without those that admission assigns."""
        own = self.prompt_params(prompt, traits)
        return {
            **vars(self.params),
            **vars(own),
            **self.row_method_params(prompt),
        }

    def prompt_params(self, prompt: PromptInfo, traits: ModelTraits) -> PromptParams:
        """The engine's parameters of a row with that prompt."""
        config, length = self.config, prompt.length
        max_length = resolve_max_length(config, prompt, traits)
        return PromptParams(
            max_length=max_length,
            last_length=max_length - 1,
            begin_index=length + 1 if length == 1 and config.forced_bos_token_id is not None else length,
            padded_width=prompt.padded_width or length,
            prompt_index=prompt.prompt_index,
            deadline=float("inf") if config.max_time is None else time.monotonic() + config.max_time,
        )

    def row_method_params(self, prompt: PromptInfo) -> dict[str, Any]:
        """The method parameters of a row with that prompt, those of its processors included."""
        params = dict(self.method_params)
        for _, spec in self.processors:
            params |= spec.processor.params_from_config(self.config, prompt)
        if prompt.healed_suffix is not None and "min_new_tokens" in params:
            # The tokens that replace a healed suffix do not count as new.
            params["min_new_tokens"] += len(prompt.healed_suffix)
        return params


def make_plan(
    config: GenerationConfig,
    traits: ModelTraits,
    drafts: DrafterSpec | None = None,
    recipe: Recipe | None = None,
) -> DecodingPlan:
    """The plan of a merged config and a recipe on a model, or a ConfigError that names the field."""
    check_config(config, traits)
    strategy = choose_strategy(config, drafts, recipe)
    if strategy.num_candidates > traits.vocab_size:  # `top_k` may be larger than the vocabulary
        strategy = replace(strategy, num_candidates=traits.vocab_size)
    wrappers = tuple([name for name, spec in WRAPPERS.items() if spec.is_enabled(config)])
    values: dict[str, Any] = {}
    for name in wrappers:
        values |= WRAPPERS[name].row_params(config, traits)
    if drafts is not None:
        values |= drafts.row_params
    values |= strategy.row_params
    if config.low_memory:
        values["low_memory"] = 1
    if recipe is not None:
        values |= recipe.row_params(config)
        wrappers += (recipe.row_flag,) if recipe.kind == "wrapper" else ()
    params = _plan_params(config)
    if overridden := _PLAN_FIELDS & values.keys():
        params = replace(params, **{name: values.pop(name) for name in overridden})
    order = processor_order(config)
    positions = [(order.index(spec.name), spec) for spec in _enabled_processors(config, recipe)]
    plan = DecodingPlan(
        config,
        strategy,
        tuple(sorted(positions, key=itemgetter(0))),
        order,
        params,
        values,
        wrappers,
        recipe,
    )
    if recipe is not None and plan.max_rewind != 0 and traits.cache_type == "recurrent":
        must = "takes tokens back, which is not supported for a model with a recurrent state"
        raise ConfigError("recipe", must, recipe, "leave it out")
    return plan


def _plan_params(config: GenerationConfig) -> PlanParams:
    eos = as_id_list(config.eos_token_id)
    return PlanParams(
        eos_token_ids=eos,
        stop_token_ids=as_id_list(config.stop_token_ids),
        end_token_ids=end_token_ids(config),
        pad_token_id=pad_token_id(config),
        do_sample=int(config.do_sample),
        num_sequences=config.num_return_sequences if config.num_beams == 1 else 1,
        seed=-1 if config.seed is None else config.seed,
        early_stopping={False: 0, True: 1, "never": 2}[config.early_stopping],
        length_penalty=float(config.length_penalty),
        min_tokens_to_keep=len(eos) + 1 if config.num_beams > 1 else 1,
        logprobs=-1 if config.logprobs is None else config.logprobs,
    )


def _enabled_processors(config: GenerationConfig, recipe: Recipe | None) -> list[ProcessorSpec]:
    """The processors that a config enables, and the backtrack mask where a recipe's strategy uses it."""
    uses_mask = (
        recipe is not None and recipe.kind == "strategy" and "masked_tokens" in recipe.strategy_columns
    )
    # No default enables a processor, but for those of sampling.
    given = config.given
    specs = (
        PROCESSOR_SPECS if config.do_sample else [one for one in PROCESSOR_SPECS if one.fields[0] in given]
    )
    enabled = [spec for spec in specs if spec.is_enabled(config)]
    if uses_mask and not any(spec.name == BACKTRACK_MASK for spec in enabled):
        enabled.append(next(spec for spec in PROCESSOR_SPECS if spec.name == BACKTRACK_MASK))
    return enabled


def validate_cache(plan: DecodingPlan, cache: RowCache, name: str | None, num_slots: int) -> None:
    """Raise for a plan that cannot run on the cache of its table, which was requested by that name."""
    config, kind = plan.config, name or type(cache).__name__
    rewind, limit = plan.max_rewind, cache.max_rewind
    if limit is not None and (rewind is None or rewind > limit):
        field = plan.strategy.rewind_field or "recipe"
        value = plan.recipe if field == "recipe" else getattr(config, field)
        must = f"takes tokens back, which the {kind} cache cannot: it has evicted what came before"
        raise ConfigError((field, CACHE_FIELD), must, value, "use another cache")
    if cache.capacity is not None and num_slots > cache.capacity:
        must = f"must leave room: the {kind} cache has {cache.capacity} positions"
        raise ConfigError("max_new_tokens", must, f"{num_slots} in all", "lower it or make the cache larger")


def pad_token_id(config: GenerationConfig) -> int:
    """The token after a row's end: the pad token, else the first end token, else 0."""
    if config.pad_token_id is not None:
        return int(config.pad_token_id)
    return next(iter(as_id_list(config.eos_token_id)), 0)
