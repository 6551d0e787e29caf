"""The documented settings of a watermark, one class for each scheme."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final, Self

from descant.config.field_types import LARGEST_INT
from descant.config.fields import RedactedMap, thaw
from descant.core.atomic_file import write_text
from descant.errors import ConfigError, DescantError

_FIELD: Final = "watermarking_config"
SEEDING_SCHEMES: Final = ("lefthash", "selfhash")
_MAX_TABLE_SIZE: Final = 2**24


@dataclass(unsafe_hash=True)
class BaseWatermarkingConfig:
    """Base class of watermark settings: validation, dicts and JSON files."""

    scheme: ClassVar[str]

    # This package cannot import the processors. Their package, which imports both, sets this.
    processor_factory: ClassVar[Callable[[Any, int, Any], Any] | None] = None

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], **kwargs: Any) -> Self:
        """Create settings from a dict; keyword arguments replace its entries."""
        values = {**config_dict, **kwargs}
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(values) - set(known)):
            raise ConfigError(_FIELD, f"must have only {', '.join(known)}", unknown)
        try:
            return cls(**values)
        except TypeError:
            missing = [name for name in known if name not in values]
            raise ConfigError(_FIELD, f"must have all of {', '.join(missing)}", sorted(values)) from None

    def to_dict(self) -> dict[str, Any]:
        """Return all settings as JSON types."""
        return {field.name: thaw(getattr(self, field.name)) for field in fields(self)}

    def to_json_string(self) -> str:
        """Return the settings as JSON."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def to_json_file(self, json_file_path: str | os.PathLike[str]) -> None:
        """Write the settings, including the secret key, to a file that only its owner can read."""
        write_text(json_file_path, self.to_json_string(), private=True)

    def validate(self) -> None:
        """Do nothing: settings are validated whenever they are set."""

    def update(self, **kwargs: Any) -> None:
        """Change settings in place, as documented; detectors and processors made before keep theirs."""
        vars(self).update(vars(self.from_dict(self.to_dict(), **kwargs)))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self) or name not in type(self).__dataclass_fields__:
            self.update(**{name: value})  # raises for an unknown name
        else:
            object.__setattr__(self, name, value)  # the first time, by the constructor

    def construct_processor(self, vocab_size: int, device: Any = "cpu") -> Any:
        """The logits processor that marks text with these settings, for direct calls."""
        factory = type(self).processor_factory
        if factory is None:
            raise DescantError("`processor_factory` must be set for `construct_processor`: import descant")
        return factory(self, vocab_size, device)

    @property
    def is_public(self) -> bool:
        """Whether the key is published in documentation, so that anyone can detect or remove the mark."""
        return self._secret in PUBLIC_KEYS

    @property
    def _secret(self) -> tuple[Any, ...]:
        """The secret part of the settings."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self.to_dict().items())

    def __repr__(self) -> str:
        # Settings are logged with their config; the key must not be.
        public = {
            name: value for name, value in self.to_dict().items() if name not in RedactedMap.SECRET_KEYS
        }
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in public.items())})"


@dataclass(unsafe_hash=True, repr=False)
class WatermarkingConfig(BaseWatermarkingConfig):
    """The green list: a keyed share of the tokens gets a bias (Kirchenbauer et al. 2023, arXiv 2306.04634).

    `lefthash` seeds the list with the last token, `selfhash` with the last `context_width` tokens, including
    the candidate itself.
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
            raise ConfigError(_FIELD, "must have a `greenlist_ratio` > 0 and < 1", self.greenlist_ratio)
        _check_number(self, "bias", -1e4, 1e4)
        _check_integer(self, "hashing_key", 1)
        if self.seeding_scheme not in SEEDING_SCHEMES:
            must = "must have 'lefthash' or 'selfhash' as `seeding_scheme`"
            raise ConfigError(_FIELD, must, self.seeding_scheme)
        _check_integer(self, "context_width", 1, 2**16)

    @property
    def _secret(self) -> tuple[Any, ...]:
        return (self.hashing_key,)


@dataclass(unsafe_hash=True, repr=False)
class SynthIDTextWatermarkingConfig(BaseWatermarkingConfig):
    """Tournament sampling with one round per key (SynthID-Text, Dathathri et al. 2024, Nature 634)."""

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
        is_valid = isinstance(keys, list | tuple) and len(keys) > 0 and all(type(key) is int for key in keys)
        if not is_valid or not all(abs(key) <= LARGEST_INT for key in keys):
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


@dataclass(unsafe_hash=True, repr=False)
class GumbelWatermarkingConfig(BaseWatermarkingConfig):
    """Gumbel-max sampling with keyed noise, which preserves the token distribution (Aaronson 2022).

    The noise depends on the key, the sequence's nonce and its last `context_width` generated tokens. Without
    a `nonce`, one of `nonces` is drawn per sequence, and a detector tries all of them.
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


# Published keys: transformers' default and its example, and those of SynthID's own code.
_DOCUMENTED_KEYS: Final = (
    654, 400, 836, 123, 340, 443, 597, 160, 57, 29, 590, 639, 13, 715, 468,
    990, 966, 226, 324, 585, 118, 504, 421, 521, 129, 669, 732, 225, 90, 960,
)  # fmt: skip
PUBLIC_KEYS: Final = frozenset(
    {(15485863,), *(_DOCUMENTED_KEYS[: count + 1] for count in range(len(_DOCUMENTED_KEYS)))}
)


def as_watermarking_config(settings: BaseWatermarkingConfig | Mapping[str, Any]) -> BaseWatermarkingConfig:
    """Return settings given as an object or a dict; the dict's keys select the scheme."""
    if isinstance(settings, BaseWatermarkingConfig):
        return settings
    if {"keys", "ngram_len"} & set(settings):
        return SynthIDTextWatermarkingConfig.from_dict(settings)
    if "key" in settings:
        return GumbelWatermarkingConfig.from_dict(settings)
    return WatermarkingConfig.from_dict(settings)


def _check_number(settings: BaseWatermarkingConfig, name: str, low: float, high: float) -> None:
    value = getattr(settings, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ConfigError(_FIELD, f"must have a number between {low} and {high} as `{name}`", value)


def _check_integer(settings: BaseWatermarkingConfig, name: str, low: int, high: int = LARGEST_INT) -> None:
    value = getattr(settings, name)
    if type(value) is not int or not low <= value <= high:
        must = f"must have an integer between {low} and {high} as `{name}`"
        raise ConfigError(_FIELD, must, type(value) if name in RedactedMap.SECRET_KEYS else value)


SCHEMES: Final = ("green", "selfhash", "synthid", "gumbel")
