"""Lookup of generation parameters by name: `FIELDS` maps every name to its declaration."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Set
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

from descant.config.fields import Field, FrozenMap, NoOffValue, freeze, thaw
from descant.config.parameters import Parameters
from descant.errors import ConfigError, InputError

# Words of OpenAI's API, vLLM, llama.cpp, Ollama, TGI, CTranslate2 and lm-eval.
OTHER_NAMES: Final[Mapping[str, str]] = {
    "bad_words": "banned_phrases",
    "beam_size": "num_beams",
    "beam_width": "num_beams",
    "best_of": "num_return_sequences",
    "cfg_scale": "guidance_scale",
    "draft_model": "assistant_model",
    "gbnf": "grammar",
    "grammar_str": "grammar",
    "guided_choice": "grammar",
    "guided_json": "grammar",
    "guided_regex": "grammar",
    "json_schema": "grammar",
    "length": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "max_gen_len": "max_new_tokens",
    "max_gen_toks": "max_new_tokens",
    "max_output_tokens": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "max_tokens_to_sample": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "mirostat": "mirostat_tau",
    "n": "num_return_sequences",
    "n_predict": "max_new_tokens",
    "negative_prompt": "negative_prompt_ids",
    "num_predict": "max_new_tokens",
    "num_samples": "num_return_sequences",
    "random_seed": "seed",
    "regex": "grammar",
    "repeat_penalty": "repetition_penalty",
    "response_format": "grammar",
    "stop": "stop_strings",
    "stop_sequences": "stop_strings",
    "stop_words": "stop_strings",
    "structured_outputs": "grammar",
    "temp": "temperature",
    "typical": "typical_p",
    "until": "stop_strings",
}


def suggest_name(name: str, known: Iterable[str]) -> str | None:
    """Advice for an unknown name; None: no known name is close."""
    known = set(known)
    other = OTHER_NAMES.get(name)
    if other in known:
        return f"the name here is `{other}`"
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f"did you mean `{close[0]}`?" if close else None


FIELDS: Final[Mapping[str, Field]] = MappingProxyType(
    {name: field for name, field in vars(Parameters).items() if isinstance(field, Field)}
)
DRAFTER_FIELDS: Final = tuple(name for name, field in FIELDS.items() if field.is_drafter)


def parse_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """The stored values of arguments given in code, where None switches a field off."""
    values = {}
    for name, value in given.items():
        if name not in FIELDS:
            raise unknown_field_error(name, value)
        field = FIELDS[name]
        parsed = field.off if value is None else field.parse(value)
        if parsed is not NoOffValue:
            values[name] = parsed
    return values


def expand_kwargs(values: dict[str, Any]) -> dict[str, Any]:
    """Given values with the fields inside `generation_kwargs` in place of the config's own.

    What remains in `generation_kwargs` are inputs of the model.
    """
    kwargs: Mapping[str, Any] = values.get("generation_kwargs") or {}
    if not kwargs:
        return values
    if "generation_kwargs" in kwargs:
        raise ConfigError("generation_kwargs", "must not hold itself", dict(kwargs))
    fields = parse_fields({name: thaw(value) for name, value in kwargs.items() if name in FIELDS})
    inputs = FrozenMap({name: value for name, value in kwargs.items() if name not in FIELDS})
    return {**values, **fields, "generation_kwargs": inputs}


def unknown_field_error(name: str, value: Any) -> ConfigError:
    """The error for an unknown parameter name, with the name that may be meant."""
    do = suggest_name(name, FIELDS) or "leave it out"
    return ConfigError(name, "is not a generation parameter", value, do)


_IGNORED_KEYS: Final = frozenset({"transformers_version"})
SPECIAL_TOKEN_FIELDS: Final = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")

# Generation parameters that a config.json from before generation_config.json may hold.
LEGACY_FIELDS: Final = (
    *SPECIAL_TOKEN_FIELDS, "max_length", "min_length", "do_sample", "early_stopping", "num_beams",
    "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p",
    "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "bad_words_ids", "num_return_sequences", "output_scores", "return_dict_in_generate",
    "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
)  # fmt: skip


def parse_entries(data: Mapping[str, Any], skip: Set[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields and the unknown entries in the content of a file."""
    values: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    before_5 = str(data.get("transformers_version", "5")).split(".")[0] in ("1", "2", "3", "4")
    for name, value in data.items():
        if value is None or name in skip or name in _IGNORED_KEYS or name.startswith("_"):
            continue
        field = FIELDS.get(name)
        if field is None:
            extra[name] = freeze_extra(name, value)
            continue
        if name in SPECIAL_TOKEN_FIELDS and isinstance(value, int) and value == -1:
            continue  # old files write -1 for "no such token"
        parsed = field.parse(value)
        if not (before_5 and parsed == field.default):  # 4.x files do not tell a default from a given value
            values[name] = parsed
    return values, extra


def freeze_extra(name: str, value: Any) -> Any:
    """The stored form of an entry that is no field."""
    try:
        frozen = freeze(value)
        hash(frozen)
    except TypeError:
        raise ConfigError(name, "must be plain data", value, "leave it out") from None
    return frozen


def as_mapping(config: object, argument: str) -> Mapping[str, Any]:
    """A mapping with string keys, or an object converted to one."""
    to_dict = getattr(config, "to_dict", None)
    data: object = config
    if not isinstance(config, Mapping) and not isinstance(config, type):
        if callable(to_dict):
            data = to_dict()
        elif hasattr(config, "__dict__") and not callable(config):
            data = vars(config)
    if not isinstance(data, Mapping) or not all(isinstance(name, str) for name in data):
        raise InputError(argument, "must be a mapping with string keys, or have `to_dict`", config)
    return data


class GenerationMode(StrEnum):
    """The decoding method of a config; equal to the member of transformers' class with the same value."""

    CONTRASTIVE_SEARCH = "contrastive_search"
    GREEDY_SEARCH = "greedy_search"
    SAMPLE = "sample"
    ASSISTED_GENERATION = "assisted_generation"
    DOLA_GENERATION = "dola_generation"
    BEAM_SEARCH = "beam_search"
    BEAM_SAMPLE = "beam_sample"
    CONSTRAINED_BEAM_SEARCH = "constrained_beam_search"
    GROUP_BEAM_SEARCH = "group_beam_search"


def select_mode(config: Parameters, assistant_model: object = None) -> GenerationMode:
    """The method that a config selects, with a draft model or without.

    Drafts and DoLa extend greedy search and sampling; in a config with both, DoLa names the method.
    """
    mode = _base_mode(config)
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        return mode
    if config.dola_layers is not None:
        return GenerationMode.DOLA_GENERATION
    has_drafter = any(getattr(config, name) is not None for name in DRAFTER_FIELDS)
    if assistant_model is not None or has_drafter:
        return GenerationMode.ASSISTED_GENERATION
    return mode


def _base_mode(config: Parameters) -> GenerationMode:
    """The method without drafts and DoLa."""
    if config.constraints is not None or config.force_words_ids is not None:
        return GenerationMode.CONSTRAINED_BEAM_SEARCH
    if config.num_beams > 1:
        if config.num_beam_groups > 1:
            return GenerationMode.GROUP_BEAM_SEARCH
        return GenerationMode.BEAM_SAMPLE if config.do_sample else GenerationMode.BEAM_SEARCH
    if config.do_sample:
        return GenerationMode.SAMPLE
    is_contrastive = bool(config.penalty_alpha) and (config.top_k or 0) > 1
    return GenerationMode.CONTRASTIVE_SEARCH if is_contrastive else GenerationMode.GREEDY_SEARCH
