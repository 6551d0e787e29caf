"""GenerationConfig: the decoding parameters of a call, frozen and validated.

Rules:

- Only given values are stored; every other field reads as its documented default.
- Precedence is call > `generation_config` argument > model > default, field by field (`merge`).
- `max_new_tokens` overrides a `max_length` of the same or a lower level, and a `max_length` overrides a
  `max_new_tokens` of a lower level. The same holds for `min_new_tokens` and `min_length`.
- A parameter that has no effect in the selected mode is an error when the caller gave it, unless its value
  is a no-op. When it comes from the model it is set aside and listed in `unused`.
- In code, None switches a field off: `top_k=None` keeps all tokens, `eos_token_id=None` means no end token.
  In a file, null means absent.
- An unknown name is an error in code. In a file it is stored in `extra` and written back.
- A file may be in a local folder or in a repository on the Hub, under any name.
- Sequences read as tuples and dicts as read-only mappings, so that a config is hashable.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol, Self

from descant.config import hub
from descant.config.config_files import (
    FILE_NAME,
    LEGACY_FILE_NAME,
    load_from_folder,
    load_from_hub,
    validate_file_name,
)
from descant.config.fields import Field, FrozenMap, RedactedMap, freeze, thaw
from descant.config.parameters import DEFAULT_NEW_TOKENS, GROUPS, STEP_OUTPUT_FIELDS, Parameters
from descant.config.registry import FIELDS, UNSUPPORTED, UnsupportedField, parse_fields, unknown_field_error
from descant.config.validation import (
    drop_unused,
    validate_compatibility,
    validate_consistency,
    validate_merged,
    validate_supported,
)
from descant.core.atomic_file import write_text
from descant.errors import ConfigError, DescantError, InputError

__all__ = [
    "DEFAULT_NEW_TOKENS",
    "FIELDS",
    "GROUPS",
    "STEP_OUTPUT_FIELDS",
    "UNSUPPORTED",
    "ConfigExplainer",
    "Field",
    "GenerationConfig",
    "UnsupportedField",
]

_IGNORED_KEYS: Final = frozenset({"transformers_version"})
_SPECIAL_TOKEN_FIELDS: Final = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")

# Generation parameters that a config.json from before generation_config.json may hold.
_LEGACY_FIELDS: Final = (
    *_SPECIAL_TOKEN_FIELDS, "max_length", "min_length", "do_sample", "early_stopping", "num_beams",
    "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p",
    "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "bad_words_ids", "num_return_sequences", "output_scores", "return_dict_in_generate",
    "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
)  # fmt: skip


class ConfigExplainer(Protocol):
    """Describes in text what a config runs on a model. Implemented by the engine, which plans requests."""

    def __call__(self, config: GenerationConfig, model: object = None, /) -> str:
        """The text of `GenerationConfig.explain`."""
        ...


class GenerationConfig(Parameters):
    """How to decode: one read-only attribute for each generation parameter, see `FIELDS`."""

    __slots__ = ()

    # The config package cannot import the engine. The package root, which imports both, sets this.
    explainer: ClassVar[ConfigExplainer | None] = None

    def _parse_given(self, given: dict[str, Any]) -> dict[str, Any]:
        return parse_fields(given)

    def __post_init__(self) -> None:
        validate_supported(self._values)
        validate_consistency(self._values)

    # -- given values and their sources

    @property
    def given(self) -> frozenset[str]:
        """The names of the fields that were given explicitly."""
        return frozenset(self._values)

    @property
    def extra(self) -> Mapping[str, Any]:
        """Entries of a file that are not generation parameters; written back unchanged."""
        return self._extra

    @property
    def unused(self) -> Mapping[str, Any]:
        """Values of a lower level that `merge` set aside, as they have no effect in the selected mode."""
        return self._unused

    def source(self, name: str) -> str:
        """The source of a field's value: "call", "argument", "model" or "default"."""
        if name not in FIELDS:
            raise unknown_field_error(name, name)
        return self._sources.get(name, "argument") if name in self._values else "default"

    # -- derived configs

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed; the changed fields count as given."""
        new = parse_fields(changes)
        validate_supported(new)
        values = {**{name: value for name, value in self._values.items() if name not in changes}, **new}
        validate_consistency(values)
        sources = {name: level for name, level in self._sources.items() if name not in changes}
        return self._make(values, sources, self._extra)

    @classmethod
    def merge(
        cls,
        call: Mapping[str, Any] | None = None,
        argument: GenerationConfig | None = None,
        model: GenerationConfig | None = None,
    ) -> Self:
        """The effective config (call > argument > model > default), validated as a whole.

        The result has at most one of each pair of length fields, no unused values, and the `source` of
        every field. Merging it again, alone, gives an equal config.
        """
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        extra: dict[str, Any] = {}
        for level, config in (("model", model), ("argument", argument), ("call", cls(**(call or {})))):
            if config is None:
                continue
            _validate_config_type(config, "generation_config" if level == "argument" else level)
            values.update(config._values)
            sources.update(dict.fromkeys(config._values, level))
            extra.update(config._extra)
        unused = drop_unused(values, sources)
        validate_supported(values, sources)
        validate_consistency(values, sources)
        validate_compatibility(values, sources)
        validate_merged(values, sources)
        if argument is not None and model is None and not call:  # validates one config: keep its sources
            sources = {name: argument.source(name) for name in values}
            unused = {**argument._unused, **unused}
        return cls._make(values, sources, FrozenMap(extra), FrozenMap(unused))

    @classmethod
    def _make(
        cls,
        values: dict[str, Any],
        sources: dict[str, str],
        extra: Mapping[str, Any],
        unused: FrozenMap | None = None,
    ) -> Self:
        config = cls.__new__(cls)
        config._set_state(values, sources, FrozenMap(extra), unused or FrozenMap())
        return config

    # -- dicts and files

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], **overrides: Any) -> Self:
        """A config from the content of a file: null means absent, unknown names go to `extra`.

        `overrides` are validated like arguments in code; the entries they replace are not parsed.
        """
        changes = parse_fields(overrides)
        validate_supported(changes)
        values, extra = _parse_entries(_as_mapping(data, "data"), skip=overrides.keys())
        return cls._make({**values, **changes}, {}, extra)

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        config_file_name: str = FILE_NAME,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        **overrides: Any,
    ) -> Self:
        """The config in a local folder, or in the repository "owner/name" on the Hub.

        Without a generation_config.json, the generation parameters of the config.json are used. `revision`
        is a branch, a tag or a commit; `token` is the Hub token for a private or gated repository.
        """
        name = validate_file_name(config_file_name)
        if isinstance(path, str) and hub.is_repo_id(path) and not Path(path).is_dir():
            name, data = load_from_hub(path, name, revision, token)
        elif revision is not None:
            raise InputError("revision", "must be None for a local folder", revision)
        else:
            name, data = load_from_folder(Path(path), name)
        if name == LEGACY_FILE_NAME != config_file_name:
            return cls.from_model_config(data, **overrides)
        return cls.from_dict(data, **overrides)

    @classmethod
    def from_model_config(cls, config: object, **overrides: Any) -> Self:
        """The generation parameters in an older model's config.json or config object."""
        data = _as_mapping(config, "config")
        parts = [data, *(data.get(name) for name in ("decoder", "generator", "text_config"))]
        values: dict[str, Any] = {}
        for part in parts:
            if isinstance(part, Mapping) or hasattr(part, "to_dict"):
                nested = _as_mapping(part, "config")
                values = {
                    **{name: nested[name] for name in _LEGACY_FIELDS if nested.get(name) is not None},
                    **values,
                }
        # With a version below 5, `from_dict` reads a default value as "not given".
        return cls.from_dict({**values, "transformers_version": "4"}, **overrides)

    @classmethod
    def from_transformers(cls, config: object, **overrides: Any) -> Self:
        """A config from transformers' own, where None (5.x) or a default (4.x) means "not given"."""
        return cls.from_dict(_as_mapping(config, "config"), **overrides)

    def to_dict(self) -> dict[str, Any]:
        """Every field in JSON types, None where not given, and `extra`; `from_dict` is the inverse."""
        return {**thaw(self._extra), **dict.fromkeys(FIELDS), **self._given_as_json()}

    def to_diff_dict(self) -> dict[str, Any]:
        """Only the fields that differ from their default, to be shown: a watermark key is hidden."""
        shown = {name: one for name, one in self._given_as_json().items() if self._differs_from_default(name)}
        settings = self.watermarking_config
        if isinstance(settings, RedactedMap):
            shown["watermarking_config"] = thaw(settings.without_secrets())
        return shown

    def to_json_string(self) -> str:
        """The content of a file: `extra` and all given values, sorted by name."""
        data = {**thaw(self._extra), **self._given_as_json()}
        for name, value in data.items():
            try:
                json.dumps(value, sort_keys=True)
            except (TypeError, ValueError):
                raise ConfigError(
                    name, "must be representable as JSON", value, "leave it out of a saved config"
                ) from None
        return json.dumps({n: v for n, v in data.items() if v is not None}, indent=2, sort_keys=True) + "\n"

    def to_json_file(self, path: str | os.PathLike[str]) -> None:
        """Write `to_json_string` to a file, atomically; one with a watermark key is only its owner's."""
        write_text(path, self.to_json_string(), private=self.watermarking_config is not None)

    def save_pretrained(  # noqa: PLR0913 - as documented
        self,
        save_directory: str | os.PathLike[str],
        config_file_name: str = FILE_NAME,
        push_to_hub: bool = False,
        *,
        repo_id: str | None = None,
        token: str | bool | None = None,
        private: bool | None = None,
        commit_message: str | None = None,
    ) -> None:
        """Write the config into a folder, which may hold several under different names.

        With `push_to_hub` the file is also uploaded to `repo_id` (by default the folder's name, in the
        namespace of the token's user). The repository is created, `private` or not, if it does not exist.
        """
        _validate_push_arguments(push_to_hub, repo_id=repo_id, private=private, commit_message=commit_message)
        folder = Path(save_directory)
        if folder.exists() and not folder.is_dir():
            raise InputError("save_directory", "must be a folder", str(folder))
        name = validate_file_name(config_file_name)
        folder.mkdir(parents=True, exist_ok=True)
        self.to_json_file(folder / name)
        if push_to_hub:
            repo = hub.full_repo_id(repo_id or folder.resolve().name, token)
            base_commit = hub.create_repo(repo, token=token, private=private)
            message = commit_message or f"Upload {name}"
            hub.upload_files(
                base_commit, {name: self.to_json_string().encode()}, token=token, message=message
            )

    def _given_as_json(self) -> dict[str, Any]:
        plain = {name: thaw(self._values[name]) for name in FIELDS if name in self._values}
        if self.sequence_bias is not None:  # JSON has no tuple keys
            plain["sequence_bias"] = [[list(ids), bias] for ids, bias in sorted(self.sequence_bias.items())]
        if self.logit_bias is not None:  # JSON keys are strings
            plain["logit_bias"] = {str(token): bias for token, bias in sorted(self.logit_bias.items())}
        return plain

    def _differs_from_default(self, name: str) -> bool:
        return bool(self._values.get(name, FIELDS[name].default) != FIELDS[name].default)

    # -- text and value semantics

    def explain(self, model: object = None) -> str:
        """The strategy, the processors in order, the stop conditions, and every value with its source."""
        explainer = type(self).explainer
        if explainer is None:
            raise DescantError("`GenerationConfig.explainer` must be set for `explain`: import descant")
        return explainer(self, model)

    def __repr__(self) -> str:
        parts = (f"{name}={self._values[name]!r}" for name in FIELDS if self._differs_from_default(name))
        return f"{type(self).__name__}({', '.join(parts)})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GenerationConfig):
            return NotImplemented
        return self._values == other._values and self._extra == other._extra

    def __hash__(self) -> int:
        return hash((FrozenMap(self._values), self._extra))

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (type(self), self._values, self._sources, self._extra, self._unused)


def _unpickle(config_type: type[GenerationConfig], *slots: Any) -> GenerationConfig:
    return config_type._make(*slots)


def _parse_entries(data: Mapping[str, Any], skip: Set[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields and the unknown entries in the content of a file."""
    values: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    before_5 = str(data.get("transformers_version", "5")).split(".")[0] in ("1", "2", "3", "4")
    for name, value in data.items():
        if value is None or name in skip or name in _IGNORED_KEYS or name.startswith("_"):
            continue
        field = FIELDS.get(name)
        if field is None:
            extra[name] = _freeze_extra(name, value)
            continue
        if name in _SPECIAL_TOKEN_FIELDS and isinstance(value, int) and value == -1:
            continue  # old files write -1 for "no such token"
        parsed = field.parse(value)
        if not (before_5 and parsed == field.default):  # 4.x files do not tell a default from a given value
            values[name] = parsed
    return values, extra


def _freeze_extra(name: str, value: Any) -> Any:
    try:
        frozen = freeze(value)
        hash(frozen)
    except TypeError:
        raise ConfigError(name, "must be plain data", value, "leave it out") from None
    return frozen


def _validate_push_arguments(push_to_hub: bool, **given: object) -> None:
    """Raise for arguments of a push when `push_to_hub` is False."""
    for name, value in given.items():
        if value is not None and not push_to_hub:
            raise InputError(name, "must be None without `push_to_hub`", value, "set push_to_hub=True")


def _as_mapping(config: object, argument: str) -> Mapping[str, Any]:
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


def _validate_config_type(config: object, argument: str) -> None:
    if not isinstance(config, GenerationConfig):
        do = "convert it with GenerationConfig.from_transformers"
        raise InputError(argument, "must be a descant.GenerationConfig", config, do)
