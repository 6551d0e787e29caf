"""The content of a config file as fields and further entries."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, Final

from descant.config.fields import freeze
from descant.config.registry import FIELDS
from descant.errors import ConfigError, InputError

__all__ = ["LEGACY_FIELDS", "SPECIAL_TOKEN_FIELDS", "as_mapping", "freeze_extra", "parse_entries"]

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
