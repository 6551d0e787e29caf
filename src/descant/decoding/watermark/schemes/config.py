"""The settings of the watermarks: what marks a text, and what must be known to find the mark again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from descant.config.fields import LARGEST_INT, RedactedMap, thaw
from descant.errors import ConfigError

__all__ = [
    "PUBLIC_KEYS",
    "BaseWatermarkingConfig",
    "GumbelWatermarkingConfig",
    "SynthIDTextWatermarkingConfig",
    "WatermarkingConfig",
    "as_watermarking_config",
]

_FIELD: Final = "watermarking_config"
SEEDING_SCHEMES: Final = ("lefthash", "selfhash")
_MAX_TABLE_SIZE: Final = 2**24


@dataclass(frozen=True)
class BaseWatermarkingConfig:
    """What all watermarks' settings can do: be checked, be a dict, be a file."""

    scheme: ClassVar[str]

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], **kwargs: Any) -> Self:
        """The settings in a dict, some of them replaced."""
        given = {**config_dict, **kwargs}
        known = [one.name for one in fields(cls)]
        if strange := sorted(set(given) - set(known)):
            raise ConfigError(_FIELD, f"must have only {', '.join(known)}", strange)
        try:
            return cls(**given)
        except TypeError:
            lacks = [name for name in known if name not in given]
            raise ConfigError(_FIELD, f"lacks some of {', '.join(lacks)}", sorted(given)) from None

    def to_dict(self) -> dict[str, Any]:
        """All settings by name, as JSON knows them."""
        return {one.name: thaw(getattr(self, one.name)) for one in fields(self)}

    def to_json_string(self) -> str:
        """The settings as JSON."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def to_json_file(self, json_file_path: str | os.PathLike[str]) -> None:
        """Write them to a file, keys and all: it is as secret as they are."""
        Path(json_file_path).write_text(self.to_json_string(), encoding="utf-8")

    def validate(self) -> None:
        """Nothing: settings that cannot be are refused when they are made."""

    @property
    def is_public(self) -> bool:
        """Whether the key stands in a documentation, so that anybody can mark, find and remove it."""
        return self._secret in PUBLIC_KEYS

    @property
    def _secret(self) -> tuple[Any, ...]:
        """What must be secret."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self.to_dict().items())

    def __repr__(self) -> str:
        # Settings are logged with the config that holds them, and the key must not be.
        told = {name: value for name, value in self.to_dict().items() if name not in RedactedMap.SECRET_KEYS}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in told.items())})"


@dataclass(frozen=True, repr=False)
class WatermarkingConfig(BaseWatermarkingConfig):
    """The green list: a keyed share of tokens is favoured (Kirchenbauer et al. 2023, arXiv 2306.04634).

    `lefthash` makes the list of the last token, `selfhash` of the last `context_width` ones with the token
    itself among them.
    """

    scheme: ClassVar[str] = "green list"

    greenlist_ratio: float = 0.25
    bias: float = 2.0
    hashing_key: int = 15485863
    seeding_scheme: str = "lefthash"
    context_width: int = 1

    def __post_init__(self) -> None:
        _check_number(self, "greenlist_ratio", 0.0, 1.0)
        if not 0.0 < self.greenlist_ratio < 1.0:
            must = "must have a `greenlist_ratio` between 0 and 1, neither of them"
            raise ConfigError(_FIELD, must, self.greenlist_ratio)
        _check_number(self, "bias", -1e4, 1e4)
        _check_integer(self, "hashing_key", 1)
        if self.seeding_scheme not in SEEDING_SCHEMES:
            must = "must have 'lefthash' or 'selfhash' as `seeding_scheme`"
            raise ConfigError(_FIELD, must, self.seeding_scheme)
        _check_integer(self, "context_width", 1, 2**16)

    @property
    def _secret(self) -> tuple[Any, ...]:
        return (self.hashing_key,)


@dataclass(frozen=True, repr=False)
class SynthIDTextWatermarkingConfig(BaseWatermarkingConfig):
    """Tournament sampling, one keyed round a key (SynthID-Text, Dathathri et al. 2024, Nature 634)."""

    scheme: ClassVar[str] = "synthid"

    ngram_len: int
    keys: tuple[int, ...]
    context_history_size: int = 1024
    sampling_table_seed: int = 0
    sampling_table_size: int = 2**16
    skip_first_ngram_calls: bool = False
    debug_mode: bool = False

    def __post_init__(self) -> None:
        _check_integer(self, "ngram_len", 2, 2**16)
        keys: Any = self.keys
        keys = keys.tolist() if hasattr(keys, "tolist") else keys
        sound = isinstance(keys, list | tuple) and len(keys) > 0 and all(type(one) is int for one in keys)
        if not sound or not all(abs(one) <= LARGEST_INT for one in keys):
            raise ConfigError(_FIELD, "must have a non-empty list of integers as `keys`", type(keys))
        object.__setattr__(self, "keys", tuple(keys))
        _check_integer(self, "context_history_size", 1, 2**31)
        _check_integer(self, "sampling_table_seed", 0)
        _check_integer(self, "sampling_table_size", 2, _MAX_TABLE_SIZE)
        for name in ("skip_first_ngram_calls", "debug_mode"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(_FIELD, f"must have a bool as `{name}`", getattr(self, name))

    @property
    def _secret(self) -> tuple[Any, ...]:
        return self.keys


@dataclass(frozen=True, repr=False)
class GumbelWatermarkingConfig(BaseWatermarkingConfig):
    """The race run by a keyed chance, which leaves every token's law as it is (Aaronson 2022).

    The chance hangs on the key, the sequence's nonce and its last `context_width` new tokens. A `nonce` not
    given is drawn for each sequence, one of `nonces`, all of which a detector then tries.
    """

    scheme: ClassVar[str] = "gumbel"

    key: int
    context_width: int = 4
    nonce: int | None = None
    nonces: int = 16

    def __post_init__(self) -> None:
        _check_integer(self, "key", 0)
        _check_integer(self, "context_width", 1, 2**16)
        if self.nonce is not None:
            _check_integer(self, "nonce", 0)
        _check_integer(self, "nonces", 1, 2**20)

    @property
    def _secret(self) -> tuple[Any, ...]:
        return (self.key,)


# The keys that documentations show: transformers' default and its example, and those of SynthID's own code.
_DOCUMENTED_KEYS: Final = (
    654, 400, 836, 123, 340, 443, 597, 160, 57, 29, 590, 639, 13, 715, 468,
    990, 966, 226, 324, 585, 118, 504, 421, 521, 129, 669, 732, 225, 90, 960,
)  # fmt: skip
PUBLIC_KEYS: Final = frozenset(
    {(15485863,), *(_DOCUMENTED_KEYS[: count + 1] for count in range(len(_DOCUMENTED_KEYS)))}
)


def as_watermarking_config(given: BaseWatermarkingConfig | Mapping[str, Any]) -> BaseWatermarkingConfig:
    """The settings that were given as an object or a dict, whose names tell of which watermark they are."""
    if isinstance(given, BaseWatermarkingConfig):
        return given
    if {"keys", "ngram_len"} & set(given):
        return SynthIDTextWatermarkingConfig.from_dict(given)
    if "key" in given:
        return GumbelWatermarkingConfig.from_dict(given)
    return WatermarkingConfig.from_dict(given)


def _check_number(settings: BaseWatermarkingConfig, name: str, low: float, high: float) -> None:
    value = getattr(settings, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ConfigError(_FIELD, f"must have a number between {low} and {high} as `{name}`", value)


def _check_integer(settings: BaseWatermarkingConfig, name: str, low: int, high: int = LARGEST_INT) -> None:
    value = getattr(settings, name)
    if type(value) is not int or not low <= value <= high:
        must = f"must have an integer between {low} and {high} as `{name}`"
        raise ConfigError(_FIELD, must, type(value) if name in RedactedMap.SECRET_KEYS else value)
