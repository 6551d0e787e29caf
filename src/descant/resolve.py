"""From a config to what runs: the strategy, the processors in order, the stops. The only factory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from descant.adapters.transformers import TransformersModel
from descant.cache.dense import DenseCache
from descant.config import FIELDS, GenerationConfig, register_explainer
from descant.errors import ConfigError
from descant.ports import Cache, Facts, Noise, Processor, Stop, Strategy
from descant.processors import (
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from descant.strategies.beam import Beam
from descant.strategies.sampling import Sampling

__all__ = ["CUSTOM", "STAGES", "Plan", "Prompt", "Stage", "adapt", "new_cache", "plan", "table"]

DEFAULT_NEW_TOKENS: Final = 20


@dataclass(frozen=True)
class Stage:
    """A processor with the config fields that call for it, and when they do."""

    processor: Processor
    fields: tuple[str, ...]
    wanted: Callable[[GenerationConfig], bool]


def _stage(kind: type[LogitsProcessor], field: str, wanted: Callable[[GenerationConfig], bool]) -> Stage:
    return Stage(kind.bare(), (field,), wanted)


def _set(name: str, *neutral: Any) -> Callable[[GenerationConfig], bool]:
    """Whether a field is set to something that does something."""
    return lambda config: getattr(config, name) not in (None, *neutral)


def _before_end(name: str) -> Callable[[GenerationConfig], bool]:
    """Whether a field keeps rows from an end that they could otherwise choose."""
    return lambda config: bool(getattr(config, name)) and bool(_ids(config.eos_token_id))


def _drawn(name: str, *neutral: Any) -> Callable[[GenerationConfig], bool]:
    """The same as `_set`, of a field that only sampling reads."""
    return lambda config: config.do_sample and getattr(config, name) not in (None, *neutral)


# The documented order: rules, then the user's own processors, then samplers. One line a processor.
RULES: Final[tuple[Stage, ...]] = (
    _stage(RepetitionPenaltyLogitsProcessor, "repetition_penalty", _set("repetition_penalty", 1.0)),
    _stage(MinLengthLogitsProcessor, "min_length", _before_end("min_length")),
    _stage(MinNewTokensLengthLogitsProcessor, "min_new_tokens", _before_end("min_new_tokens")),
    _stage(ForcedBOSTokenLogitsProcessor, "forced_bos_token_id", _set("forced_bos_token_id")),
    _stage(ForcedEOSTokenLogitsProcessor, "forced_eos_token_id", _set("forced_eos_token_id")),
    _stage(InfNanRemoveLogitsProcessor, "remove_invalid_values", _set("remove_invalid_values", False)),
    _stage(SuppressTokensLogitsProcessor, "suppress_tokens", _set("suppress_tokens", ())),
    _stage(SuppressTokensAtBeginLogitsProcessor, "begin_suppress_tokens", _set("begin_suppress_tokens", ())),
)
SAMPLERS: Final[tuple[Stage, ...]] = (
    _stage(TemperatureLogitsWarper, "temperature", _drawn("temperature", 1.0)),
    _stage(TopKLogitsWarper, "top_k", _drawn("top_k", 0)),
    _stage(TopPLogitsWarper, "top_p", _drawn("top_p", 1.0)),
    _stage(MinPLogitsWarper, "min_p", _drawn("min_p")),
    _stage(LogitNormalization, "renormalize_logits", _set("renormalize_logits", False)),
)
STAGES: Final = (*RULES, *SAMPLERS)
CUSTOM: Final = len(RULES)  # where the user's own stand

_MOST: Final = {
    "num_beams": 2**14, "num_return_sequences": 2**16, "max_new_tokens": 2**31, "max_length": 2**31,
}  # fmt: skip

# Fields that name tokens which the model must know, since they are chosen or looked up.
_KNOWN_TOKENS: Final = (
    "forced_bos_token_id",
    "forced_eos_token_id",
    "suppress_tokens",
    "begin_suppress_tokens",
)


@dataclass(frozen=True)
class Prompt:
    """What the length rules need to know of a prompt."""

    length: int  # tokens
    offset: int = 0  # positions without a token
    width: int = 0  # tokens of the padded prompts it came with


@dataclass(frozen=True)
class Plan:
    """What a config comes to on a model: a strategy and its key, which stages, and every row's parameters."""

    config: GenerationConfig
    key: tuple[Any, ...]  # requests of one key share a strategy
    build: Callable[[Noise, Stop], Strategy]
    stages: tuple[int, ...]  # places in STAGES
    values: Mapping[str, Any]

    def row(self, prompt: Prompt, facts: Facts) -> dict[str, Any]:
        """The parameters of a row with that prompt."""
        config, length = self.config, prompt.length
        begins = length + 1 if length == 1 and config.forced_bos_token_id is not None else length
        return {
            **self.values,
            "limit": (limit := _limit(config, prompt, facts)),
            "last": limit - 1,  # a row of this length has its last choice before it
            "begin_index": begins,
            "width": prompt.width or length,
            "deadline": float("inf") if config.max_time is None else time.monotonic() + config.max_time,
        }


def adapt(model: Any, states: Sequence[str] = ()) -> Any:
    """The model behind the Model port; what already offers the port is used as it is."""
    return model if hasattr(model, "facts") else TransformersModel(model, states)


def new_cache(config: GenerationConfig | None = None) -> Cache:  # noqa: ARG001 - one kind so far
    """An empty cache of the kind asked for."""
    return DenseCache()


def plan(config: GenerationConfig, facts: Facts) -> Plan:
    """What a merged config comes to on a model, or a ConfigError that names the field."""
    eos = _ids(config.eos_token_id)
    _refuse_strangers(config, facts)
    _refuse_immense(config)
    key, build = _strategy(config, len(eos))
    values = {
        "eos": eos,
        "pad": _pad(config, eos),
        "do_sample": int(config.do_sample),
        "copies": config.num_return_sequences if config.num_beams == 1 else 1,
        "seed": -1 if config.seed is None else config.seed,
        "early_stopping": {False: 0, True: 1, "never": 2}[config.early_stopping],
        "length_penalty": float(config.length_penalty),
        "min_tokens_to_keep": len(eos) + 1 if config.num_beams > 1 else 1,
        "repetition_penalty": _off(config.repetition_penalty, 1.0),
        "min_length": config.min_length or 0,
        "min_new_tokens": config.min_new_tokens or 0,
        "forced_bos_token_id": -1 if config.forced_bos_token_id is None else config.forced_bos_token_id,
        "forced_eos_token_id": _ids(config.forced_eos_token_id),
        "suppress_tokens": _ids(config.suppress_tokens),
        "begin_suppress_tokens": _ids(config.begin_suppress_tokens),
        "temperature": _off(config.temperature, 1.0),
        "top_k": config.top_k or 0,
        "tail": 1.0 - _off(config.top_p, 1.0),
        "min_p": _off(config.min_p, 0.0),
    }
    stages = tuple(at for at, stage in enumerate(STAGES) if stage.wanted(config))
    return Plan(config, key, build, stages, values)


def table(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Parameters row by row as columns: numbers [R], lists [R, W] padded with -1."""
    columns = {}
    for name, first in rows[0].items():
        values = [row[name] for row in rows]
        if isinstance(first, float):
            columns[name] = torch.tensor(values, dtype=torch.float64)
        elif isinstance(first, list):
            wide = max(1, *(len(value) for value in values))
            columns[name] = torch.tensor([value + [-1] * (wide - len(value)) for value in values])
        else:
            columns[name] = torch.tensor(values, dtype=torch.long)
    return columns


def _strategy(
    config: GenerationConfig, ends: int
) -> tuple[tuple[Any, ...], Callable[[Noise, Stop], Strategy]]:
    """The strategy of a config: one line a method."""
    if config.num_beams > 1:
        width, draws = config.num_beams, config.do_sample
        # Enough candidates that `width` remain when every beam's best choices all end it.
        count = max(2, 1 + ends) * width
        return ("beam", width, count, draws), lambda noise, stop: Beam(width, count, draws, noise, stop)
    return ("sampling",), Sampling


def _limit(config: GenerationConfig, prompt: Prompt, facts: Facts) -> int:
    """How many tokens a row may have, prompt included."""
    length, offset = prompt.length, prompt.offset
    if config.max_new_tokens is not None:
        name, limit = "max_new_tokens", length + config.max_new_tokens
    elif "max_length" in config.given:
        name, limit = "max_length", config.max_length - offset
        if limit <= length:
            must = f"must be > the {length + offset} tokens of the prompt"
            raise ConfigError("max_length", must, config.max_length, "raise it or set max_new_tokens")
    else:
        name, limit = "max_length", length + DEFAULT_NEW_TOKENS
        if facts.context is not None:
            limit = min(limit, max(facts.context - offset, length + 1))
    # The last token is never fed, so the table of positions may be one shorter.
    if facts.table is not None and offset + limit - 1 > facts.table:
        most = f"the model has {facts.table} positions and the prompt takes {length + offset}"
        raise ConfigError(
            name, f"must leave room: {most}", getattr(config, name), "lower it or shorten the prompt"
        )
    least = (
        config.min_new_tokens
        if config.min_new_tokens is not None
        else (config.min_length or 0) - length - offset
    )
    if least > limit - length:
        name = "min_new_tokens" if config.min_new_tokens is not None else "min_length"
        must = f"must not ask for more than the {limit - length} new tokens allowed"
        raise ConfigError(name, must, getattr(config, name), "lower it or raise max_new_tokens")
    return limit


def _refuse_immense(config: GenerationConfig) -> None:
    """Raise for counts that no memory can hold, rather than run out of it."""
    for name, most in _MOST.items():
        value = getattr(config, name)
        if value is not None and value > most:
            raise ConfigError(name, f"must be <= {most}", value, "lower it")


def _refuse_strangers(config: GenerationConfig, facts: Facts) -> None:
    """Raise for tokens that the model does not have, and for a ban that leaves none."""
    for name in _KNOWN_TOKENS:
        unknown = [token for token in _ids(getattr(config, name)) if not 0 <= token < facts.vocabulary]
        if unknown:
            raise ConfigError(name, f"must name tokens below {facts.vocabulary}, the vocabulary", unknown[0])
    if len(set(_ids(config.suppress_tokens))) >= facts.vocabulary:
        raise ConfigError("suppress_tokens", "must leave at least one token", config.suppress_tokens)


def _pad(config: GenerationConfig, eos: list[int]) -> int:
    """What fills the place after a row's end: the pad token, else the first end token, else 0."""
    if config.pad_token_id is not None:
        return int(config.pad_token_id)
    return eos[0] if eos else 0


def _off(value: float | None, neutral: float) -> float:
    """A number, or the one that changes nothing where the field is switched off."""
    return neutral if value is None else float(value)


def _ids(value: int | Sequence[int] | None) -> list[int]:
    """Token ids as a list, whether none, one or several were given."""
    if value is None:
        return []
    return [int(value)] if isinstance(value, int) else [int(one) for one in value]


def explained(config: GenerationConfig, model: object = None) -> str:
    """What a config would run on a model, and where each of its values comes from."""
    if model is not None:
        theirs = getattr(model, "generation_config", None)
        merged = GenerationConfig.merge(
            {}, config, None if theirs is None else GenerationConfig.from_transformers(theirs)
        )
        made = plan(merged, adapt(model).facts)
    else:
        merged = GenerationConfig.merge({}, config)
        made = None
    stages = [stage for stage in STAGES if stage.wanted(merged)]
    mode = "beam" if merged.num_beams > 1 else "greedy"
    names = {("beam", False): "beam search", ("beam", True): "beam sampling", ("greedy", True): "sampling"}
    lines = [f"strategy    {names.get((mode, merged.do_sample), 'greedy search')}"]
    if merged.num_beams > 1:
        lines[0] += f", {merged.num_beams} beams"
    lines.append("processors  " + (", ".join(type(stage.processor).__name__ for stage in stages) or "none"))
    lines.append("stops       " + ", ".join(_stops(merged)))
    if made is not None:
        lines.append(f"padding     token {made.values['pad']}")
    lines.append("values")
    shown = [name for name in FIELDS if name in merged.given]
    width = max((len(name) for name in shown), default=0)
    lines += [f"  {name:<{width}}  {getattr(merged, name)!r}  ({merged.source(name)})" for name in shown]
    lines += [
        f"  {name:<{width}}  {value!r}  (set aside: no use in this mode)"
        for name, value in merged.unused.items()
    ]
    return "\n".join(lines)


def _stops(config: GenerationConfig) -> list[str]:
    stops = []
    if config.max_new_tokens is not None:
        stops.append(f"{config.max_new_tokens} new tokens")
    elif "max_length" in config.given:
        stops.append(f"{config.max_length} tokens, prompt included")
    else:
        stops.append(f"{DEFAULT_NEW_TOKENS} new tokens (default)")
    stops += [f"end token {token}" for token in _ids(config.eos_token_id)]
    if config.max_time is not None:
        stops.append(f"{config.max_time} s")
    return stops


register_explainer(explained)
