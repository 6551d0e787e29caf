"""The rules between generation parameters: which value wins, which has no use, which cannot be.

They work on plain dicts of given values and of their sources ("call", "argument", "model"), so
that a config can check itself both alone (what was given together must agree) and merged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from descant.config.fields import NoOffValue
from descant.config.parameters import FIELDS, UNSUPPORTED
from descant.errors import ConfigError, NotInThisVersion

__all__ = [
    "INCOMPATIBLE",
    "drop_unused",
    "validate_compatibility",
    "validate_consistency",
    "validate_merged",
    "validate_supported",
]

Values = dict[str, Any]
Sources = Mapping[str, str]

DEFAULT_NEW_TOKENS: Final = 20  # when no length is given at any level
LENGTH_PAIRS: Final = (("max_new_tokens", "max_length"), ("min_new_tokens", "min_length"))
SOURCE_PRIORITY: Final = {"call": 0, "argument": 1, "model": 2}

# Knobs that only one mode reads: (the knobs, the field that chooses the mode, its value without, the fix).
DEPENDS_ON: Final = (
    (
        (
            "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff",
            "top_n_sigma", "p_less", "xtc_probability", "dynamic_temperature_range", "mirostat_tau",
            "adaptive_p_target",
        ),
        "do_sample", False, "set do_sample=True or leave it out",
    ),
    (("xtc_threshold",), "xtc_probability", 0.0, "set xtc_probability or leave it out"),
    (
        ("dynamic_temperature_exponent",), "dynamic_temperature_range", 0.0,
        "set dynamic_temperature_range or leave it out",
    ),
    (("mirostat_eta",), "mirostat_tau", None, "set mirostat_tau or leave it out"),
    (("adaptive_p_decay",), "adaptive_p_target", None, "set adaptive_p_target or leave it out"),
    (
        ("max_matching_ngram_size",), "prompt_lookup_num_tokens", None,
        "set prompt_lookup_num_tokens or leave it out",
    ),
    (
        ("suffix_lookup_shared",), "suffix_lookup_num_tokens", None,
        "set suffix_lookup_num_tokens or leave it out",
    ),
    (("no_repeat_ngram_window",), "no_repeat_ngram_size", 0, "set no_repeat_ngram_size or leave it out"),
    (
        ("dry_base", "dry_allowed_length", "dry_range", "dry_sequence_breakers"), "dry_multiplier", 0.0,
        "set dry_multiplier or leave it out",
    ),
    (
        ("thinking_start", "thinking_end"), "thinking_budget", None,
        "set thinking_budget or leave it out",
    ),
    (
        (
            "early_stopping", "length_penalty", "num_beam_groups", "diversity_penalty", "constraints",
            "force_words_ids", "ordered_constraints", "constraint_gap",
        ),
        "num_beams", 1, "set num_beams > 1 or leave it out",
    ),
    (("diversity_penalty",), "num_beam_groups", 1, "set num_beam_groups > 1 or leave it out"),
    (("cache_config",), "cache_implementation", None, "set cache_implementation or leave it out"),
    (("compile_config",), "cache_implementation", None, 'set cache_implementation="static" or leave it out'),
    (
        ("output_scores", "output_logits", "output_attentions", "output_hidden_states"),
        "return_dict_in_generate", False, "set return_dict_in_generate=True or leave it out",
    ),
)  # fmt: skip

# What has no meaning together: (a field, another, why). Where only one comes with the model, it gives way.
INCOMPATIBLE: Final = (
    ("penalty_alpha", "do_sample", "contrastive search ranks its candidates, nothing is drawn"),
    ("penalty_alpha", "num_beams", "contrastive search keeps candidates of one text, not several texts"),
    ("num_beam_groups", "do_sample", "groups differ by what they have chosen, not by chance"),
    ("constraints", "do_sample", "beams are dealt out by what they have met, not by chance"),
    ("force_words_ids", "do_sample", "beams are dealt out by what they have met, not by chance"),
    ("banned_phrases", "num_beams", "a beam that says one could simply die, which is another method"),
    ("banned_phrases", "penalty_alpha", "its candidates cannot take tokens back"),
    ("banned_phrases", "mirostat_tau", "its state cannot be taken back with the tokens"),
    ("banned_phrases", "adaptive_p_target", "its state cannot be taken back with the tokens"),
    (
        "token_healing", "prefix_allowed_tokens_fn",
        "what may follow is counted from the prompt's end, which healing moves",
    ),
    *(
        (name, other, why)
        for name in ("prompt_lookup_num_tokens", "suffix_lookup_num_tokens", "assistant_early_exit")
        for other, why in (
            ("num_beams", "what is guessed for one beam may go with another"),
            ("penalty_alpha", "its candidates are tried one at a time"),
            ("banned_phrases", "what is guessed ahead may be taken back"),
        )
    ),
    ("suffix_lookup_num_tokens", "prompt_lookup_num_tokens", "both look up what came before"),
    ("assistant_early_exit", "prompt_lookup_num_tokens", "a row has one who guesses"),
    ("assistant_early_exit", "suffix_lookup_num_tokens", "a row has one who guesses"),
    ("assistant_early_exit", "guidance_scale", "its memory holds two texts a row, of which layers see one"),
    ("dola_layers", "guidance_scale", "DoLa rules tokens out, which leaves nothing to be guided away from"),
)  # fmt: skip

# Values that ask for nothing, besides a field's default and its off value. Temperature 0 is how other
# interfaces say greedy, which is what it gets.
NO_OP_VALUES: Final[Mapping[str, tuple[Any, ...]]] = {
    "temperature": (0.0,), "min_p": (0.0,), "output_logits": (False,), "penalty_alpha": (0.0,),
    "guidance_scale": (1.0,), "low_memory": (False,),
}  # fmt: skip


def _effective_value(values: Values, name: str) -> Any:
    return values.get(name, FIELDS[name].default)


def _source_note(name: str, sources: Sources) -> str:
    return " (from the model's generation config)" if sources.get(name) == "model" else ""


def drop_unused(values: Values, sources: dict[str, str]) -> Values:
    """Take out what loses or has no use; return it. Raise for a useless knob that the caller gave."""
    aside: Values = {}

    def drop(name: str) -> None:
        aside[name] = values.pop(name)
        sources.pop(name)

    for new, total in LENGTH_PAIRS:
        if values.get(new) is not None and total in values:
            drop(total if SOURCE_PRIORITY[sources[new]] <= SOURCE_PRIORITY[sources[total]] else new)
    for first, second, _ in INCOMPATIBLE:
        if not (_is_active(values, first) and _is_active(values, second)):
            continue
        loser = next((name for name in (first, second) if sources.get(name) == "model"), None)
        if loser is not None and {sources.get(first), sources.get(second)} != {"model"}:
            drop(loser)
    for knobs, chooser, value, fix in DEPENDS_ON:
        if _effective_value(values, chooser) != value:
            continue
        for knob in knobs:
            if knob not in values or _is_no_op(knob, values[knob]):
                continue
            if knob == "top_k" and _is_active(values, "penalty_alpha"):  # contrastive search reads it too
                continue
            if sources[knob] != "model":
                raise ConfigError(knob, f"has no use while `{chooser}` is {value}", values[knob], fix)
            drop(knob)
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
        if values["low_memory"] and sources["low_memory"] != "model":
            do = "leave it out"
            raise ConfigError("low_memory", "has no use without beams or contrastive search", True, do)
        drop("low_memory")
    return aside


def _is_no_op(name: str, value: Any) -> bool:
    field = FIELDS[name]
    return value in (field.default, field.off) or value in NO_OP_VALUES.get(name, ())


def _is_active(values: Values, name: str) -> bool:
    return name in values and not _is_no_op(name, values[name])


def validate_compatibility(values: Values, sources: Sources) -> None:
    """Raise for methods that have no meaning together."""
    for first, second, why in INCOMPATIBLE:
        if _is_active(values, first) and _is_active(values, second):
            must = f"has no meaning with `{second}`{_source_note(first, sources)}, since {why}"
            raise ConfigError((first, second), must, values[first], "choose one of them")


def validate_supported(values: Values, sources: Sources | None = None) -> None:
    """Raise for a value that asks for a method this version does not have."""
    for name, later in UNSUPPORTED.items():
        if name not in values or values[name] in later.no_op_values:
            continue
        do = "leave it unset"
        if sources:
            off = FIELDS[name].off
            do = f"pass {name}={FIELDS[name].default if off is NoOffValue else off!r} to go without"
        must = f"is not in this version of Descant ({later.reason}){_source_note(name, sources or {})}"
        raise NotInThisVersion(name, must, values[name], do)


def validate_consistency(values: Values, sources: Sources | None = None) -> None:
    """Raise for given values that cannot hold together, whatever the other levels say."""
    whence = sources or {}
    pairs = [("min_new_tokens", "max_new_tokens")]
    if values.get("max_new_tokens") is None:
        pairs.append(("min_length", "max_length"))
    for low, high in pairs:
        if low == "min_length" and values.get("min_new_tokens") is not None:
            continue
        least, most = values.get(low), values.get(high)
        if least is not None and most is not None and least > most:
            must = f"must be <= `{high}` ({most}){_source_note(low, whence)}"
            raise ConfigError((low, high), must, least, f"lower `{low}` or raise `{high}`")
    beams = values.get("num_beams", 1)
    wanted = values.get("num_return_sequences", 1)
    if beams > 1 and wanted > beams:
        must = f"must be <= `num_beams` ({beams}){_source_note('num_return_sequences', whence)}"
        do = f"lower it or set num_beams={wanted}"
        raise ConfigError(("num_return_sequences", "num_beams"), must, wanted, do)
    groups = values.get("num_beam_groups", 1)
    if "num_beams" in values and beams % groups:
        must = f"must divide `num_beams` ({beams}){_source_note('num_beam_groups', whence)}"
        raise ConfigError(("num_beam_groups", "num_beams"), must, groups, "choose a divisor of `num_beams`")


def validate_merged(values: Values, sources: Sources) -> None:
    """Raise for what the defaults, too, make impossible: the last check of a merged config."""
    wanted, beams = _effective_value(values, "num_return_sequences"), _effective_value(values, "num_beams")
    sampled = _effective_value(values, "do_sample")
    if wanted > 1 and beams == 1 and not sampled:
        method = "contrastive" if _is_active(values, "penalty_alpha") else "greedy"
        must = f"must be 1 in {method} search{_source_note('num_return_sequences', sources)}"
        do = f"set do_sample=True, num_beams={wanted}, or num_return_sequences=1"
        raise ConfigError("num_return_sequences", must, wanted, do)
    if _effective_value(values, "num_beam_groups") > 1 and not _effective_value(values, "diversity_penalty"):
        must = f"must be > 0 while `num_beam_groups` is {values['num_beam_groups']}, or all groups are alike"
        got = _effective_value(values, "diversity_penalty")
        raise ConfigError(("diversity_penalty", "num_beam_groups"), must, got, "set it, or leave groups out")
    if _is_active(values, "penalty_alpha") and _effective_value(values, "top_k") < 2:
        must = f"needs `top_k` > 1, the number of candidates{_source_note('penalty_alpha', sources)}"
        do = "set top_k=4, or leave penalty_alpha out"
        raise ConfigError(("penalty_alpha", "top_k"), must, values["penalty_alpha"], do)
    if sampled and _effective_value(values, "temperature") == 0.0:
        must = f"must be > 0 while `do_sample` is True{_source_note('temperature', sources)}"
        raise ConfigError("temperature", must, 0.0, "set do_sample=False for greedy search")
    if values.get("thinking_budget") is not None and values.get("thinking_end") is None:
        must = (
            f"needs `thinking_end`, the tokens that close a thought{_source_note('thinking_budget', sources)}"
        )
        do = "set thinking_end, for instance to tokenizer.encode('</think>', add_special_tokens=False)"
        raise ConfigError(("thinking_budget", "thinking_end"), must, values["thinking_budget"], do)
    end, start = values.get("thinking_end") or (), values.get("thinking_start") or ()
    if start and any(end[at : at + len(start)] == start for at in range(len(end))):
        must = f"must not contain `thinking_start` {list(start)}, or its end would begin the next thought"
        raise ConfigError(("thinking_end", "thinking_start"), must, list(end))
    if _effective_value(values, "return_timestamps") and values.get("no_timestamps_token_id") is None:
        must = f"needs `no_timestamps_token_id`{_source_note('return_timestamps', sources)}"
        do = "set it, or use a speech model whose generation config has it"
        raise ConfigError(("return_timestamps", "no_timestamps_token_id"), must, True, do)
    least = values.get("min_new_tokens")
    if (
        least is not None
        and least > DEFAULT_NEW_TOKENS
        and not values.keys() & {"max_new_tokens", "max_length"}
    ):
        must = f"must be <= {DEFAULT_NEW_TOKENS}, the default length{_source_note('min_new_tokens', sources)}"
        raise ConfigError("min_new_tokens", must, least, f"set max_new_tokens >= {least} too")
