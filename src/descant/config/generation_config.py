"""GenerationConfig: the decoding parameters of a call, validated whenever they are set.

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
- Sequences read as tuples, dicts as read-only mappings, and the settings of watermarks, caches and
  compilation as their documented classes, so that a config is hashable.
- `replace` returns a changed copy. Setting an attribute and `update` change a config in place; its hash
  changes with its values. Calls and requests work on merged copies, so a change does not affect what runs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Set
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Self, overload

from descant.config import hub
from descant.config.cache_config import CacheConfig
from descant.config.explainer import EXPLAINER
from descant.config.fields import EMPTY_MAP, Field, FrozenMap, RedactedMap, thaw
from descant.config.parameters import DEFAULT_NEW_TOKENS, GROUPS, STEP_OUTPUT_FIELDS, Parameters
from descant.config.registry import (
    FIELDS,
    LEGACY_FIELDS,
    SPECIAL_TOKEN_FIELDS,
    GenerationMode,
    as_mapping,
    expand_kwargs,
    freeze_extra,
    parse_entries,
    parse_fields,
    select_mode,
    unknown_field_error,
)
from descant.config.validation import (
    drop_unused,
    validate_compatibility,
    validate_consistency,
    validate_merged,
)
from descant.core.atomic_file import write_text
from descant.errors import ConfigError, InputError, format_value

__all__ = ["DEFAULT_NEW_TOKENS", "FIELDS", "GROUPS", "STEP_OUTPUT_FIELDS", "Field", "GenerationConfig"]

FILE_NAME: Final = "generation_config.json"
LEGACY_FILE_NAME: Final = "config.json"  # used where a model has no generation_config.json
_MAX_FILE_BYTES: Final = 1 << 20  # a config.json may have thousands of labels
_SETTINGS_FIELDS: Final = frozenset({"watermarking_config", "cache_config", "compile_config"})


class GenerationConfig(Parameters):
    """The settings of decoding: one attribute for each generation parameter, see `FIELDS`."""

    __slots__ = ()

    explainer: ClassVar[Callable[[Any, object], str]] = EXPLAINER

    def _parse_given(self, given: dict[str, Any]) -> dict[str, Any]:
        return parse_fields(_rename_pad_token(given))

    def __post_init__(self) -> None:
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

    # -- validation and mode

    def validate(self, strict: bool = False) -> None:
        """Raise for values that contradict each other; if `strict`, also for what a call would refuse."""
        self.__post_init__()
        if strict:
            self.merge(None, self)

    def get_generation_mode(self, assistant_model: object = None) -> GenerationMode:
        """The decoding method that this config selects, with a draft model or without."""
        return select_mode(self, assistant_model)

    # -- derived configs

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed; the changed fields count as given."""
        return self._make(*self._changed(changes), self._extra)

    def _changed(self, changes: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        """The values, and their sources, after some changes."""
        new = parse_fields(changes)
        values = {**{name: value for name, value in self._values.items() if name not in changes}, **new}
        validate_consistency(values)
        return values, {name: level for name, level in self._sources.items() if name not in changes}

    def update(self, **kwargs: Any) -> dict[str, Any]:
        """Change fields, and entries of `extra`, in place; returns the arguments that are neither.

        All changes are made or, after an error, none.
        """
        changed = self._changed({name: value for name, value in kwargs.items() if name in FIELDS})
        entries = {name: freeze_extra(name, value) for name, value in kwargs.items() if name in self._extra}
        self._set_state(*changed, FrozenMap({**self._extra, **entries}))
        return {name: value for name, value in kwargs.items() if name not in FIELDS and name not in entries}

    def __setattr__(self, name: str, value: Any) -> None:
        if self.update(**{name: value}):
            raise unknown_field_error(name, value)

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"`{name}` must not be deleted: set it to None to switch it off")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """An entry of `extra`."""
            if name.startswith("_") or name not in self._extra:
                raise AttributeError(f"a {type(self).__name__} has no attribute {name!r}")
            return self._extra[name]

    def only_special_tokens(self) -> Self:
        """A copy with the special tokens alone: all that a model fills in with `use_model_defaults=False`."""
        values = {name: value for name, value in self._values.items() if name in SPECIAL_TOKEN_FIELDS}
        return self._make(values, {}, FrozenMap())

    @classmethod
    def merge(
        cls,
        call: Mapping[str, Any] | None = None,
        argument: GenerationConfig | None = None,
        model: GenerationConfig | None = None,
        *,
        lenient: bool = False,
        has_strategy: bool = False,
    ) -> Self:
        """The effective config (call > argument > model > default), validated as a whole.

        The result has at most one of each pair of length fields, no unused values, and the `source` of
        every field. Merging it again, alone, gives an equal config. If `lenient`, values without effect that
        transformers 4.52.4 ignores are in `unused`; otherwise they raise ConfigError. With `has_strategy` a
        recipe chooses the tokens, and the config's own method is not checked for several sequences.
        """
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        extra: dict[str, Any] = {}
        for level, config in (("model", model), ("argument", argument), ("call", cls(**(call or {})))):
            if config is None:
                continue
            _validate_config_type(config, "generation_config" if level == "argument" else level)
            given = expand_kwargs(config._values)
            values.update(given)
            sources.update(dict.fromkeys(given, level))
            extra.update(config._extra)
        unused = drop_unused(values, sources, lenient=lenient)
        validate_consistency(values, sources)
        validate_compatibility(values, sources)
        validate_merged(values, sources, has_strategy=has_strategy)
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
        for name in _SETTINGS_FIELDS & values.keys():  # their objects can be changed in place
            values[name] = copy(values[name])
        kept = extra if type(extra) is FrozenMap else FrozenMap(extra)
        config._set_state(values, sources, kept, EMPTY_MAP if unused is None else unused)
        return config

    # -- dicts and files

    @overload
    @classmethod
    def from_dict(
        cls, data: Mapping[str, Any], *, return_unused_kwargs: Literal[True], **overrides: Any
    ) -> tuple[Self, dict[str, Any]]: ...

    @overload
    @classmethod
    def from_dict(
        cls, data: Mapping[str, Any], *, return_unused_kwargs: Literal[False] = False, **overrides: Any
    ) -> Self: ...

    @classmethod
    def from_dict(
        cls, data: Mapping[str, Any], *, return_unused_kwargs: bool = False, **overrides: Any
    ) -> Self | tuple[Self, dict[str, Any]]:
        """A config from the content of a file: null means absent, unknown names go to `extra`.

        `overrides` are validated like arguments in code; the entries they replace are not parsed. With
        `return_unused_kwargs` those that are not fields are returned beside the config.
        """
        unused: dict[str, Any] = {}
        if return_unused_kwargs:
            unused = {name: value for name, value in overrides.items() if name not in FIELDS}
            overrides = {name: value for name, value in overrides.items() if name in FIELDS}
        changes = parse_fields(overrides)
        values, extra = parse_entries(as_mapping(data, "data"), skip=overrides.keys())
        config = cls._make({**values, **changes}, {}, extra)
        return (config, unused) if return_unused_kwargs else config

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        config_file_name: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        **overrides: Any,
    ) -> Self:
        """The config in a local folder, or in the repository "owner/name" on the Hub.

        Without a generation_config.json, the generation parameters of the config.json are used. For a
        repository, `revision` is a branch, a tag or a commit, `token` the Hub token for a private or gated
        one, and `cache_dir` the folder of downloads; a local folder needs none of them. With
        `return_unused_kwargs=True` it returns a pair, as `from_dict` does.
        """
        name = validate_file_name(config_file_name)
        is_legacy_requested = name == LEGACY_FILE_NAME
        if isinstance(path, str) and hub.is_repo_id(path) and not Path(path).is_dir():
            name, data = load_from_hub(path, name, revision, token, cache_dir)
        elif revision not in (None, "main"):  # "main" is the documented default
            raise InputError("revision", "must be None for a local folder", revision)
        else:
            name, data = load_from_folder(Path(path), name)
        read: Any = cls.from_dict
        if name == LEGACY_FILE_NAME and not is_legacy_requested:
            read = cls.from_model_config
        config: Self = read(data, **overrides)
        return config

    @classmethod
    def from_model_config(cls, config: object, **overrides: Any) -> Self:
        """The generation parameters in an older model's config.json or config object."""
        data = as_mapping(config, "config")
        parts = [data, *(data.get(name) for name in ("decoder", "generator", "text_config"))]
        values: dict[str, Any] = {}
        for part in parts:
            if isinstance(part, Mapping) or hasattr(part, "to_dict"):
                nested = as_mapping(part, "config")
                values = {
                    **{name: nested[name] for name in LEGACY_FIELDS if nested.get(name) is not None},
                    **values,
                }
        # With a version below 5, `from_dict` reads a default value as "not given".
        read: Self = cls.from_dict({**values, "transformers_version": "4"}, **overrides)
        return read

    @classmethod
    def from_transformers(cls, config: object, **overrides: Any) -> Self:
        """A config from transformers' own, where None (5.x) or a default (4.x) means "not given"."""
        read: Self = cls.from_dict(as_mapping(config, "config"), **overrides)
        return read

    def to_dict(self) -> dict[str, Any]:
        """Every field in JSON types, None where not given, and `extra`; `from_dict` is the inverse."""
        return {**thaw(self._extra), **dict.fromkeys(FIELDS), **self._given_as_json()}

    def to_diff_dict(self) -> dict[str, Any]:
        """Only the fields that differ from their default, to be shown: a watermark key is hidden."""
        shown = {name: one for name, one in self._given_as_json().items() if self._differs_from_default(name)}
        if "watermarking_config" in shown:
            shown["watermarking_config"] = RedactedMap(shown["watermarking_config"]).without_secrets()
        return shown

    def to_json_string(self) -> str:
        """The content of a file: `extra` and all given values, sorted by name."""
        data = {**thaw(self._extra), **self._given_as_json()}
        written: dict[str, Any] = {}
        for name, value in sorted(data.items()):
            try:  # the order of a schema's properties decides the text
                text = json.dumps(value, sort_keys=name != "grammar")
            except (TypeError, ValueError):
                raise ConfigError(
                    name, "must be representable as JSON", value, "leave it out of a saved config"
                ) from None
            if value is not None:
                written[name] = json.loads(text)
        return json.dumps(written, indent=2) + "\n"

    def to_json_file(self, path: str | os.PathLike[str]) -> None:
        """Write `to_json_string` to a file, atomically; one with a watermark key is only its owner's."""
        write_text(path, self.to_json_string(), private=self.watermarking_config is not None)

    def save_pretrained(  # noqa: PLR0913 - as documented
        self,
        save_directory: str | os.PathLike[str],
        config_file_name: str | None = None,
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
            self._upload(name, repo_id or folder.resolve().name, token, private, commit_message)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        config_file_name: str | None = None,
        token: str | bool | None = None,
        private: bool | None = None,
        commit_message: str | None = None,
    ) -> str:
        """Upload the config to a repository, which is created if it does not exist; the new commit's hash."""
        name = validate_file_name(config_file_name)
        return self._upload(name, repo_id, token, private, commit_message)

    def _upload(
        self, name: str, repo_id: str, token: str | bool | None, private: bool | None, message: str | None
    ) -> str:
        """Upload the config as the file `name`; the new commit's hash."""
        content = self.to_json_string().encode()
        repo = hub.full_repo_id(repo_id, token)
        base_commit = hub.create_repo(repo, token=token, private=private)
        return hub.upload_files(
            base_commit, {name: content}, token=token, message=message or f"Upload {name}"
        )

    def _given_as_json(self) -> dict[str, Any]:
        plain = {name: thaw(self._values[name]) for name in FIELDS if name in self._values}
        if self.sequence_bias is not None:  # JSON has no tuple keys
            plain["sequence_bias"] = [[list(ids), bias] for ids, bias in sorted(self.sequence_bias.items())]
        if self.logit_bias is not None:  # JSON keys are strings
            plain["logit_bias"] = {str(token): bias for token, bias in sorted(self.logit_bias.items())}
        if isinstance(self.cache_config, CacheConfig):  # nor dtypes and devices
            plain["cache_config"] = json.loads(self.cache_config.to_json_string())
        return plain

    def _differs_from_default(self, name: str) -> bool:
        return bool(self._values.get(name, FIELDS[name].default) != FIELDS[name].default)

    # -- text and value semantics

    def explain(self, model: object = None) -> str:
        """The strategy, the processors in order, the stop conditions, and every value with its source."""
        return type(self).explainer(self, model)

    def __repr__(self) -> str:
        """The values that differ from their default, in the documented form."""
        names = [name for name in FIELDS if self._differs_from_default(name)]
        return f"{type(self).__name__} {format_config({name: self._values[name] for name in names})}"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GenerationConfig):
            return NotImplemented
        return self._values == other._values and self._extra == other._extra

    def __hash__(self) -> int:
        return hash((FrozenMap(self._values), self._extra))

    def __copy__(self) -> Self:
        return self._make(dict(self._values), dict(self._sources), self._extra, self._unused)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.__copy__()  # all values are frozen

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (type(self), self._values, self._sources, self._extra, self._unused)


def _unpickle(config_type: type[GenerationConfig], *slots: Any) -> GenerationConfig:
    return config_type._make(*slots)


def _rename_pad_token(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments with `pad_token`, the name in an example of the documentation, as `pad_token_id`."""
    if "pad_token" not in given:
        return given
    rest = {name: value for name, value in given.items() if name != "pad_token"}
    token = given["pad_token"]
    if isinstance(token, str):
        do = "pass pad_token_id=tokenizer.pad_token_id"
        raise ConfigError("pad_token", "must be a token id, as `pad_token_id`", token, do)
    if rest.setdefault("pad_token_id", token) != token:
        must = f"must equal `pad_token_id` ({rest['pad_token_id']}), which is the same parameter"
        raise ConfigError(("pad_token", "pad_token_id"), must, token, "leave it out")
    return rest


def _validate_push_arguments(push_to_hub: bool, **given: object) -> None:
    """Raise for arguments of a push when `push_to_hub` is False."""
    for name, value in given.items():
        if value is not None and not push_to_hub:
            raise InputError(name, "must be None without `push_to_hub`", value, "set push_to_hub=True")


def _validate_config_type(config: object, argument: str) -> None:
    if not isinstance(config, GenerationConfig):
        do = "convert it with GenerationConfig.from_transformers"
        raise InputError(argument, "must be a descant.GenerationConfig", config, do)


# ------------------------------------------------------------------------ files
def validate_file_name(name: object) -> str:
    """The name, that of generation configs for None; raises if it is not a plain file name."""
    if name is None:
        return FILE_NAME
    if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name:
        raise InputError("config_file_name", "must be a file name without a folder", name)
    return name


def load_from_folder(folder: Path, name: str) -> tuple[str, Mapping[str, Any]]:
    """The name and content of the config file in a folder, or of its legacy file."""
    if not folder.is_dir():
        raise InputError("path", "must be a local folder, or owner/name on the Hub", str(folder))
    available = {candidate for candidate in (name, LEGACY_FILE_NAME) if (folder / candidate).is_file()}
    selected = _select_file(name, available, str(folder))
    return selected, _parse_json(_read_limited(folder / selected), selected, str(folder))


def load_from_hub(
    repo: str,
    name: str,
    revision: str | None,
    token: str | bool | None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> tuple[str, Mapping[str, Any]]:
    """The name and content of the config file in a repository, or of its legacy file."""
    with hub.use_cache_dir(cache_dir):
        commit = hub.resolve_commit(repo, revision, token=token)
        selected = _select_file(name, commit.files.keys(), repo)
        data = hub.fetch_files(repo, commit.sha, [selected], limit=_MAX_FILE_BYTES, token=token)[selected]
    return selected, _parse_json(data, selected, repo)


def _select_file(name: str, available: Set[str], source: str) -> str:
    if name not in available and name == FILE_NAME and LEGACY_FILE_NAME in available:
        return LEGACY_FILE_NAME
    if name not in available:
        raise InputError("config_file_name", f"must name a file in {source!r}", name)
    return name


def _read_limited(file: Path) -> bytes:
    """The bytes of a file of at most `_MAX_FILE_BYTES`."""
    try:
        with file.open("rb") as opened:
            data = opened.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        must = f"must name a readable file in {str(file.parent)!r} ({error.strerror})"
        raise InputError("config_file_name", must, file.name) from None
    if len(data) > _MAX_FILE_BYTES:
        must = f"must name a file of at most {_MAX_FILE_BYTES} bytes in {str(file.parent)!r}"
        raise InputError("config_file_name", must, file.name)
    return data


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(mapping := dict(pairs)) < len(pairs):
        raise ValueError("duplicate key")
    return mapping


def _reject_constant(text: str) -> Any:
    raise ValueError(f"{text} is not valid JSON")


def _parse_json(data: bytes, name: str, source: str) -> Mapping[str, Any]:
    def error_for(expected: str) -> InputError:
        return InputError("config_file_name", f"must name {expected} in {source!r}", name)

    try:
        text = data.decode("utf-8")
        content = json.loads(text, object_pairs_hook=_reject_duplicate_keys, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise error_for(f"a JSON file ({format_value(error)})") from None
    if not isinstance(content, dict):
        raise error_for("a JSON file with an object at the top level")
    return content


def format_config(values: Mapping[str, Any]) -> str:
    """Values as indented JSON, sorted by name; keys of watermarks are hidden, objects are shown by repr."""
    # The order of a schema's properties decides the text.
    shown = {name: _to_json(values[name], keep_order=name == "grammar") for name in sorted(values)}
    return json.dumps(shown, indent=2, default=repr) + "\n"


def _to_json(value: Any, keep_order: bool) -> Any:
    if hasattr(value, "to_dict"):  # a documented class of settings
        value = RedactedMap(value.to_dict()).without_secrets()
    if isinstance(value, Mapping):
        items = {
            key if isinstance(key, str) else str(key): _to_json(item, keep_order)
            for key, item in value.items()
        }
        return items if keep_order else dict(sorted(items.items()))
    if isinstance(value, list | tuple):
        return [_to_json(item, keep_order) for item in value]
    return value
