"""What a config would do, in words: `GenerationConfig.explain`; and what is said of a request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from descant.config.generation_config import FIELDS, GenerationConfig, register_explainer
from descant.core.interfaces import Drafter
from descant.decoding.processors.pipeline import (
    LOGITS_WARPERS,
    PROCESSOR_SPECS,
    end_token_ids,
    processor_order,
)
from descant.engine.drafter_factory import DraftInputs, describe_drafter
from descant.engine.planner import (
    DEFAULT_NEW_TOKENS,
    WRAPPERS,
    DecodingPlan,
    as_model,
    drafter_spec,
    is_constrained,
    is_contrastive,
    make_plan,
)
from descant.errors import RowError
from descant.trace.records import RequestRecord

__all__ = ["explain_config", "no_candidates_error", "request_record"]


def explain_config(config: GenerationConfig, model: object = None) -> str:
    """What a config would run on a model, and where each of its values comes from."""
    if model is not None:
        theirs = getattr(model, "generation_config", None)
        merged = GenerationConfig.merge(
            {}, config, None if theirs is None else GenerationConfig.from_transformers(theirs)
        )
        target = as_model(model)
        made = make_plan(merged, target.traits, drafter_spec(merged, target, DraftInputs()))
    else:
        merged = GenerationConfig.merge({}, config)
        made = None
    order = processor_order(merged)
    stages = sorted(
        (stage for stage in PROCESSOR_SPECS if stage.is_enabled(merged)),
        key=lambda one: order.index(one.name),
    )
    lines = [f"strategy    {_strategy_name(merged)}"]
    around = [wrap.name for wrap in WRAPPERS.values() if wrap.is_enabled(merged)]
    if around:
        lines.append("model       " + ", ".join(f"with {name}" for name in around))
    guesses = describe_drafter(merged)
    lines += [f"guesses     {guesses}"] if guesses else []
    lines.append("processors  " + (", ".join(type(stage.processor).__name__ for stage in stages) or "none"))
    lines.append("stops       " + ", ".join(_describe_stops(merged)))
    if made is not None:
        lines.append(f"padding     token {made.base_params['pad']}")
    lines.append("values")
    shown = [name for name in FIELDS if name in merged.given]
    width = max((len(name) for name in shown), default=0)
    lines += [f"  {name:<{width}}  {getattr(merged, name)!r}  ({merged.source(name)})" for name in shown]
    lines += [
        f"  {name:<{width}}  {value!r}  (set aside: no use in this mode)"
        for name, value in merged.unused.items()
    ]
    return "\n".join(lines)


def _strategy_name(config: GenerationConfig) -> str:
    """The strategy of a config in words."""
    if config.num_beams == 1:
        single = "sampling" if config.do_sample else "greedy search"
        return f"contrastive search, {config.top_k} candidates" if is_contrastive(config) else single
    kind = "beam sampling" if config.do_sample else "beam search"
    kind = f"constrained {kind}" if is_constrained(config) else kind
    groups = f" in {config.num_beam_groups} groups" if config.num_beam_groups > 1 else ""
    return f"{kind}, {config.num_beams} beams{groups}"


def request_record(
    number: int, prompt: Sequence[int], known: DecodingPlan, stages: Sequence[str], drafter: Drafter | None
) -> RequestRecord:
    """What a trace says of a request, with these stages; its root is for the tracer to say."""
    config, recipe, demands = known.config, known.recipe, known.base_params.get("constraint_state")
    method = _strategy_name(config)
    if recipe is not None and recipe.kind == "strategy":
        method = f"recipe {recipe.name}"
    return RequestRecord(
        number,
        0,
        tuple(max(token, 0) for token in prompt),  # what stands for a medium may have no token
        method,
        {name: _jsonable(getattr(config, name)) for name in sorted(config.given)},
        tuple(stages),
        config.num_beams,
        config.num_beam_groups,
        config.num_return_sequences,
        None if drafter is None else type(drafter).__name__,
        None if demands is None else demands.total_steps,
    )


def no_candidates_error(
    number: int,
    known: DecodingPlan,
    brought: bool,
    got: str = "only scores of -inf or NaN",
    nonfinite: bool = False,
) -> RowError:
    """The error of a request that cannot go on, naming what may have ruled everything out.

    `brought` says whether it has processors of its own, `hopeless` that it was the model itself.
    """
    config = known.config
    # A sampler leaves something of what there is, but a number that was asked for may overflow.
    names = [
        f"`{name}`"
        for _, stage in known.processors
        if stage.is_enabled(config)
        for name in stage.fields
        if stage not in LOGITS_WARPERS or config.source(name) != "default"
    ]
    names += ["`recipe`"] if known.recipe is not None else []
    names += ["`logits_processor`"] if brought else []
    names += ["`num_return_sequences`"] if config.num_return_sequences > 1 else []
    whose = "the model" if nonfinite or not names else " and ".join(names)
    do = "look at its logits" if nonfinite or not names else "loosen it"
    must = f"{whose} must leave enough to choose from"
    return RowError(f"{must}, got {got}: {do} (request {number})", number)


def _jsonable(value: Any) -> Any:
    """A parameter as JSON can say it in few words; of anything else its kind."""
    try:
        plain = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        return type(value).__name__
    return plain if len(str(plain)) <= 200 else type(value).__name__


def _describe_stops(config: GenerationConfig) -> list[str]:
    stops = []
    if config.max_new_tokens is not None:
        stops.append(f"{config.max_new_tokens} new tokens")
    elif "max_length" in config.given:
        stops.append(f"{config.max_length} tokens, prompt included")
    else:
        stops.append(f"{DEFAULT_NEW_TOKENS} new tokens (default)")
    stops += [f"end token {token}" for token in end_token_ids(config)]
    texts = (config.stop_strings,) if isinstance(config.stop_strings, str) else config.stop_strings or ()
    stops += [f"text {text!r}" for text in texts]
    stops += [f"text matching {config.stop_regex!r}"] if config.stop_regex is not None else []
    if config.max_time is not None:
        stops.append(f"{config.max_time} s")
    return stops


register_explainer(explain_config)
