"""Rules between generation parameters: precedence, values without effect, and incompatible values.

The functions take plain dicts of given values and of their sources ("call", "argument", "model"), so that a
config is validated both alone and merged with the other levels.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any, Final

from descant.config.parameters import DEFAULT_NEW_TOKENS, STEP_OUTPUT_FIELDS
from descant.config.registry import DRAFTER_FIELDS, FIELDS
from descant.errors import ConfigError, format_value

Values = dict[str, Any]
Sources = Mapping[str, str]

LENGTH_PAIRS: Final = (("max_new_tokens", "max_length"), ("min_new_tokens", "min_length"))
SOURCE_PRIORITY: Final = {"call": 0, "argument": 1, "model": 2}

# Fields that only one mode reads: (fields, the field that selects the mode, its value when off, what to set).
Dependency = tuple[tuple[str, ...], str, Any, str]


def _dependencies() -> tuple[Dependency, ...]:
    """The fields that need the value of another one, as they say themselves; those of sampling first."""
    readers: dict[tuple[str, str], list[str]] = {("do_sample", "do_sample=True"): []}
    for name, field in FIELDS.items():
        for mode in field.needs:
            off = FIELDS[mode].default
            by_type = f"{mode}=True" if off is False else f"{mode} > 1" if off == 1 else mode
            readers.setdefault((mode, field.setting or by_type), []).append(name)
    return tuple(
        (tuple(names), mode, FIELDS[mode].default, setting) for (mode, setting), names in readers.items()
    )


DEPENDS_ON: Final = _dependencies()

# Values without effect that transformers 4.52.4 ignores, most of them with a warning.
TOLERATED: Final = frozenset({
    "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "early_stopping",
    "length_penalty", "num_beam_groups", "low_memory", "max_matching_ngram_size", *STEP_OUTPUT_FIELDS,
})  # fmt: skip

# Incompatible pairs: (field, field, reason). If exactly one of them comes from the model, it is set aside.
INCOMPATIBLE: Final = (
    ("penalty_alpha", "do_sample", "contrastive search ranks candidates and does not sample"),
    ("penalty_alpha", "num_beams", "contrastive search has one hypothesis per row"),
    ("num_beam_groups", "do_sample", "group beam search is deterministic"),
    ("constraints", "do_sample", "constrained beam search is deterministic"),
    ("force_words_ids", "do_sample", "constrained beam search is deterministic"),
    ("banned_phrases", "num_beams", "backtracking is not supported with beam search"),
    ("banned_phrases", "penalty_alpha", "backtracking is not supported with contrastive search"),
    ("banned_phrases", "mirostat_tau", "its state cannot be rolled back"),
    ("banned_phrases", "adaptive_p_target", "its state cannot be rolled back"),
    (
        "token_healing", "prefix_allowed_tokens_fn",
        "the function counts from the end of the prompt, which healing moves",
    ),
    *(
        (name, other, why)
        for name in DRAFTER_FIELDS
        for other, why in (
            ("num_beams", "drafts are not supported with beam search"),
            ("penalty_alpha", "drafts are not supported with contrastive search"),
            ("banned_phrases", "drafts are not supported with backtracking"),
        )
    ),
    *((later, name, "a row has one drafter") for name, later in combinations(DRAFTER_FIELDS, 2)),
    (
        "assistant_early_exit", "guidance_scale",
        "guidance caches two sequences per row, of which the truncated model reads one",
    ),
    *(
        ("grammar", name, "a forced token may not match the grammar")
        for name in ("forced_bos_token_id", "forced_eos_token_id", "forced_decoder_ids")
    ),
    ("grammar", "return_timestamps", "timestamps are not part of the text"),
    ("dola_layers", "guidance_scale", "DoLa masks tokens, whose guided logits would be undefined"),
)  # fmt: skip

_UNUSED_LOW_MEMORY: Final = "has no use without beam search or contrastive search"

# Values without effect, besides a field's default and off value. Temperature 0 is other interfaces' way to
# request greedy search, so it is accepted there.
NO_OP_VALUES: Final[Mapping[str, tuple[Any, ...]]] = {
    "temperature": (0.0,), "min_p": (0.0,), "output_logits": (False,), "penalty_alpha": (0.0,),
    "guidance_scale": (1.0,), "low_memory": (False,),
}  # fmt: skip


def _effective_value(values: Values, name: str) -> Any:
    return values.get(name, FIELDS[name].default)


def _source_note(name: str, sources: Sources) -> str:
    return " (from the model's generation config)" if sources.get(name) == "model" else ""


def drop_unused(values: Values, sources: dict[str, str], *, lenient: bool = False) -> Values:
    """Remove overridden and ineffective values in place and return them.

    Raises for an ineffective value that did not come from the model; if `lenient`, only for one that is not
    in `TOLERATED`.
    """
    dropped: Values = {}

    def is_allowed(name: str) -> bool:
        return sources[name] == "model" or (lenient and name in TOLERATED)

    def drop(name: str) -> None:
        dropped[name] = values.pop(name)
        sources.pop(name)

    for new, total in LENGTH_PAIRS:
        if values.get(new) is not None and total in values:
            drop(total if SOURCE_PRIORITY[sources[new]] <= SOURCE_PRIORITY[sources[total]] else new)
    for first, second, _ in INCOMPATIBLE:
        if not (_is_active(values, first) and _is_active(values, second)):
            continue
        from_model = next((name for name in (first, second) if sources.get(name) == "model"), None)
        if from_model is not None and {sources.get(first), sources.get(second)} != {"model"}:
            drop(from_model)
    for names, mode_field, off_value, setting in DEPENDS_ON:
        if _effective_value(values, mode_field) != off_value:
            continue
        for name in names:
            if name not in values or _is_no_op(name, values[name]):
                continue
            if name == "top_k" and _is_active(values, "penalty_alpha"):  # contrastive search reads it too
                continue
            if not is_allowed(name):
                do = f"set {setting} or leave it out"
                raise ConfigError(name, _unused_text(mode_field, off_value), values[name], do)
            drop(name)
    for name in ("ordered_constraints", "constraint_gap"):
        if _is_active(values, name) and not (
            _is_active(values, "constraints") or _is_active(values, "force_words_ids")
        ):
            if sources[name] != "model":
                do = "set constraints or force_words_ids, or leave it out"
                raise ConfigError(name, "has no use without constraints", values[name], do)
            drop(name)
    if "low_memory" in values and not (
        _is_active(values, "num_beams") or _is_active(values, "penalty_alpha")
    ):
        if values["low_memory"] and not is_allowed("low_memory"):
            raise ConfigError("low_memory", _UNUSED_LOW_MEMORY, True, "leave it out")
        drop("low_memory")
    return dropped


def unused_warning(name: str, value: Any) -> str:
    """The warning of a lenient config about a value that it has ignored."""
    reasons = (
        (_unused_text(mode_field, off_value), f"set {setting} or leave it out")
        for names, mode_field, off_value, setting in DEPENDS_ON
        if name in names
    )
    reason, fix = next(reasons, (_UNUSED_LOW_MEMORY, "leave it out"))
    return f"`{name}` {reason}, got {format_value(value)}, and is ignored: {fix}"


def _unused_text(mode_field: str, off_value: Any) -> str:
    return f"has no use while `{mode_field}` is {off_value}"


def _is_no_op(name: str, value: Any) -> bool:
    field = FIELDS[name]
    return value in (field.default, field.off) or value in NO_OP_VALUES.get(name, ())


def _is_active(values: Values, name: str) -> bool:
    return name in values and not _is_no_op(name, values[name])


def validate_compatibility(values: Values, sources: Sources) -> None:
    """Raise for incompatible methods."""
    for first, second, reason in INCOMPATIBLE:
        if _is_active(values, first) and _is_active(values, second):
            must = f"cannot be combined with `{second}`{_source_note(first, sources)}, since {reason}"
            raise ConfigError((first, second), must, values[first], "choose one of them")


def validate_consistency(values: Values, sources: Sources | None = None) -> None:
    """Raise for given values that contradict each other at any level."""
    known_sources = sources or {}
    pairs = [("min_new_tokens", "max_new_tokens")]
    if values.get("max_new_tokens") is None:
        pairs.append(("min_length", "max_length"))
    for low, high in pairs:
        if low == "min_length" and values.get("min_new_tokens") is not None:
            continue
        minimum, maximum = values.get(low), values.get(high)
        if minimum is not None and maximum is not None and minimum > maximum:
            must = f"must be <= `{high}` ({maximum}){_source_note(low, known_sources)}"
            raise ConfigError((low, high), must, minimum, f"lower `{low}` or raise `{high}`")
    num_beams = values.get("num_beams", 1)
    num_returned = values.get("num_return_sequences", 1)
    if num_beams > 1 and num_returned > num_beams:
        must = f"must be <= `num_beams` ({num_beams}){_source_note('num_return_sequences', known_sources)}"
        do = f"lower it or set num_beams={num_returned}"
        raise ConfigError(("num_return_sequences", "num_beams"), must, num_returned, do)
    groups = values.get("num_beam_groups", 1)
    if "num_beams" in values and num_beams % groups:
        must = f"must divide `num_beams` ({num_beams}){_source_note('num_beam_groups', known_sources)}"
        raise ConfigError(("num_beam_groups", "num_beams"), must, groups, "choose a divisor of `num_beams`")


def validate_merged(values: Values, sources: Sources, *, has_strategy: bool = False) -> None:
    """Raise for a merged config that is impossible with the defaults of its other fields.

    With `has_strategy` a recipe chooses the tokens, which may have several sequences without sampling.
    """
    num_returned = _effective_value(values, "num_return_sequences")
    do_sample = _effective_value(values, "do_sample")
    is_greedy = _effective_value(values, "num_beams") == 1 and not (do_sample or has_strategy)
    if num_returned > 1 and is_greedy:
        method = "contrastive" if _is_active(values, "penalty_alpha") else "greedy"
        must = f"must be 1 in {method} search{_source_note('num_return_sequences', sources)}"
        do = f"set do_sample=True, num_beams={num_returned}, or num_return_sequences=1"
        raise ConfigError("num_return_sequences", must, num_returned, do)
    if _effective_value(values, "num_beam_groups") > 1 and not _effective_value(values, "diversity_penalty"):
        must = f"must be > 0 while `num_beam_groups` is {values['num_beam_groups']}, or all groups are equal"
        got = _effective_value(values, "diversity_penalty")
        raise ConfigError(
            ("diversity_penalty", "num_beam_groups"), must, got, "set it, or leave num_beam_groups out"
        )
    if _is_active(values, "penalty_alpha") and _effective_value(values, "top_k") < 2:
        must = f"needs `top_k` > 1, the number of candidates{_source_note('penalty_alpha', sources)}"
        do = "set top_k=4, or leave penalty_alpha out"
        raise ConfigError(("penalty_alpha", "top_k"), must, values["penalty_alpha"], do)
    if do_sample and _effective_value(values, "temperature") == 0.0:
        must = f"must be > 0 while `do_sample` is True{_source_note('temperature', sources)}"
        raise ConfigError("temperature", must, 0.0, "set do_sample=False for greedy search")
    if values.get("thinking_start") is not None and values.get("thinking_end") is None:
        must = f"needs `thinking_end`, the tokens that end a thought{_source_note('thinking_start', sources)}"
        do = "set it, for instance to tokenizer.encode('</think>', add_special_tokens=False)"
        raise ConfigError(("thinking_start", "thinking_end"), must, values["thinking_start"], do)
    end, start = values.get("thinking_end") or (), values.get("thinking_start") or ()
    if start and any(end[index : index + len(start)] == start for index in range(len(end))):
        must = f"must not contain `thinking_start` {list(start)}, or closing a thought would open the next"
        raise ConfigError(("thinking_end", "thinking_start"), must, list(end))
    if _effective_value(values, "return_timestamps") and values.get("no_timestamps_token_id") is None:
        must = f"needs `no_timestamps_token_id`{_source_note('return_timestamps', sources)}"
        do = "set it, or use a speech model whose generation config has it"
        raise ConfigError(("return_timestamps", "no_timestamps_token_id"), must, True, do)
    minimum = values.get("min_new_tokens")
    if (
        minimum is not None
        and minimum > DEFAULT_NEW_TOKENS
        and not values.keys() & {"max_new_tokens", "max_length"}
    ):
        must = f"must be <= {DEFAULT_NEW_TOKENS}, the default length{_source_note('min_new_tokens', sources)}"
        raise ConfigError("min_new_tokens", must, minimum, f"set max_new_tokens >= {minimum} too")
