"""`GenerationConfig.explain`, the trace record of a request, and the error of one without candidates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from descant.config.generation_config import DEFAULT_NEW_TOKENS, FIELDS, GenerationConfig
from descant.core.interfaces import Drafter, Model
from descant.decoding.pipeline import (
    LOGITS_WARPERS,
    PROCESSOR_SPECS,
    ProcessorSpec,
    end_token_ids,
    processor_order,
)
from descant.engine.planning.cache_factory import cache_name
from descant.engine.planning.drafter_factory import DraftInputs, describe_drafter, drafter_spec
from descant.engine.planning.planner import (
    WRAPPERS,
    DecodingPlan,
    as_model,
    choose_cache,
    has_own_length,
    make_plan,
    strategy_name,
)
from descant.errors import MissingExtra, RowError, format_value
from descant.models.fast_paths import fast_paths
from descant.trace.records import RequestRecord


def explain_config(config: GenerationConfig, model: object = None) -> str:
    """The methods that a config selects on a model, and the source of each of its values."""
    if model is not None:
        model_config = getattr(model, "generation_config", None)
        if model_config is not None:
            model_config = GenerationConfig.from_transformers(model_config)
        merged = GenerationConfig.merge({}, config, model_config)
        target = as_model(model)
        plan = make_plan(merged, target.traits, drafter_spec(merged, target, DraftInputs()))
        paths = _describe_fast_paths(target, merged)
        has_sound = target.traits.has_aligned_inputs
    else:
        merged = GenerationConfig.merge({}, config)
        plan, paths, has_sound = None, [], False
    order = processor_order(merged)
    processors = sorted(
        (spec for spec in PROCESSOR_SPECS if spec.is_enabled(merged)),
        key=lambda spec: order.index(spec.name),
    )
    lines = [f"strategy    {strategy_name(merged)}"]
    wrappers = [spec.name for spec in WRAPPERS.values() if spec.is_enabled(merged)]
    if wrappers:
        lines.append("model       " + ", ".join(f"with {name}" for name in wrappers))
    drafter = describe_drafter(merged)
    lines += [f"drafts      {drafter}"] if drafter else []
    lines.append(
        "processors  "
        + (", ".join(_describe_processor(processor, merged) for processor in processors) or "none")
    )
    lines.append("stops       " + ", ".join(_describe_stops(merged, has_sound)))
    if plan is not None:
        lines.append(f"padding     token {plan.params.pad_token_id}")
    lines += paths
    lines.append("values")
    shown = [name for name in FIELDS if name in merged.given]
    width = max((len(name) for name in shown), default=0)
    lines += [f"  {name:<{width}}  {getattr(merged, name)!r}  ({merged.source(name)})" for name in shown]
    lines += [
        f"  {name:<{width}}  {value!r}  (unused: no effect in this mode)"
        for name, value in merged.unused.items()
    ]
    return "\n".join(lines)


def request_record(
    request_id: int,
    prompt: Sequence[int],
    plan: DecodingPlan,
    processors: Sequence[str],
    drafter: Drafter | None,
) -> RequestRecord:
    """The trace record of a request with these processors; the tracer sets its root."""
    config, recipe, constraints = plan.config, plan.recipe, plan.method_params.get("constraint_state")
    method = strategy_name(config)
    if recipe is not None and recipe.kind == "strategy":
        method = f"recipe {recipe.name}"
    return RequestRecord(
        request_id,
        0,
        tuple(max(token, 0) for token in prompt),  # placeholders of media may be negative
        method,
        {name: _jsonable(getattr(config, name)) for name in sorted(config.given)},
        tuple(processors),
        config.num_beams,
        config.num_beam_groups,
        config.num_return_sequences,
        None if drafter is None else type(drafter).__name__,
        None if constraints is None else constraints.total_steps,
    )


def no_candidates_error(
    request_id: int,
    plan: DecodingPlan,
    has_own_processors: bool,
    got: str = "only scores of -inf or NaN",
    nonfinite: bool = False,
) -> RowError:
    """The error of a request without candidates, which names the fields that may have ruled out all tokens.

    `nonfinite` says that the model's own logits were not finite.
    """
    config = plan.config
    # A warper always leaves a token, but a value that the user set may overflow.
    names = [
        f"`{name}`"
        for _, spec in plan.processors
        if spec.is_enabled(config)
        for name in spec.fields
        if spec not in LOGITS_WARPERS or config.source(name) != "default"
    ]
    names += ["`recipe`"] if plan.recipe is not None else []
    names += ["`logits_processor`"] if has_own_processors else []
    names += ["`num_return_sequences`"] if config.num_return_sequences > 1 else []
    source = "the model" if nonfinite or not names else " and ".join(names)
    do = "check its logits" if nonfinite or not names else "loosen it"
    must = f"{source} must leave enough to choose from"
    return RowError(f"{must}, got {got}: {do} (request {request_id})", request_id)


def _describe_fast_paths(model: Model, config: GenerationConfig) -> list[str]:
    """A line for each fast path on the cache that a config selects."""
    named = cache_name(config) is not None and model.traits.cache_type == "kv"
    # The number of positions has no effect here: a cache takes memory with its first write.
    try:
        cache = choose_cache(model, [config], num_slots=1, shared=0) if named else None
    except MissingExtra as error:
        return ["fast paths", f"  unknown: {error}"]
    paths = fast_paths(model, cache)
    width = max((len(path.name) for path in paths), default=0)
    lines = ["fast paths"] if paths else []
    for path in paths:
        state, detail = ("on ", path.detail) if path.is_on else ("off", f"{path.detail} ({path.switch})")
        lines.append(f"  {path.name:<{width}}  {state}  {detail}")
    return lines


def _jsonable(value: Any) -> Any:
    """A value as short JSON; of anything else the name of its type."""
    try:
        plain = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        return type(value).__name__
    return plain if len(str(plain)) <= 200 else type(value).__name__


def _describe_processor(spec: ProcessorSpec, config: GenerationConfig) -> str:
    """A processor with the values of its fields."""
    names = dict.fromkeys((*spec.fields, *spec.processor.config_fields))
    values = {name: getattr(config, name) for name in names}
    shown = ", ".join(f"{name}={format_value(value)}" for name, value in values.items() if value is not None)
    return f"{type(spec.processor).__name__}({shown})"


def _describe_length(config: GenerationConfig) -> str:
    """The most tokens of a row."""
    if config.max_new_tokens is not None:
        return f"{config.max_new_tokens} new tokens"
    if "max_length" in config.given:
        return f"{config.max_length} tokens, prompt included"
    return f"{DEFAULT_NEW_TOKENS} new tokens (default)"


def _describe_stops(config: GenerationConfig, has_sound: bool) -> list[str]:
    """The ends of a row; one that hears sound beside its tokens ends with the sound at the latest."""
    stops = ["the end of its sound"] if has_sound else []
    if not has_sound or has_own_length(config):
        stops.append(_describe_length(config))
    stops += [f"end token {token}" for token in end_token_ids(config)]
    texts = (config.stop_strings,) if isinstance(config.stop_strings, str) else config.stop_strings or ()
    stops += [f"text {text!r}" for text in texts]
    stops += [f"text matching {config.stop_regex!r}"] if config.stop_regex is not None else []
    if config.max_time is not None:
        stops.append(f"{config.max_time} s")
    return stops
