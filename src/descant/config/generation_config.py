"""GenerationConfig: every way to say how to decode, frozen, validated, and able to explain itself.

The rules, in one place:

- Only what was given is kept; every other field reads as its documented default.
- Precedence is call > `generation_config` argument > the model's > default (`merge`), field by field.
- `max_new_tokens` beats a `max_length` of the same or a lower level, and a `max_length` beats a
  `max_new_tokens` of a lower level; `min_new_tokens` and `min_length` likewise.
- A knob without use in the chosen mode is an error when the caller gave it (a value that changes
  nothing is not counted). When it came with the model it is set aside, and `unused` shows it.
- In code, None switches a field off: `top_k=None` keeps all tokens, `eos_token_id=None` ends on none.
  In a file, null is the same as absent.
- An unknown name is an error in code; in a file it is kept in `extra` and written back.
- A file may lie in a folder or in a repository on the Hub, under any name, and several side by side.
- Sequences read as tuples and dicts as read-only mappings, so that a config can be hashed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any, Final, Self

from descant.config import hub
from descant.config.fields import Field, FrozenMap, freeze, thaw
from descant.config.parameters import (
    FIELDS,
    GROUPS,
    UNSUPPORTED,
    Parameters,
    UnsupportedField,
    parse_fields,
    unknown_field_error,
)
from descant.config.validation import (
    drop_unused,
    validate_compatibility,
    validate_consistency,
    validate_merged,
    validate_supported,
)
from descant.errors import ConfigError, DescantError, InputError, format_value

__all__ = [
    "FIELDS",
    "GROUPS",
    "UNSUPPORTED",
    "Field",
    "GenerationConfig",
    "UnsupportedField",
    "register_explainer",
]

FILE_NAME: Final = "generation_config.json"
_LEGACY_FILE_NAME: Final = "config.json"
_MAX_FILE_BYTES: Final = 1 << 20  # bytes of a file; a config.json may carry thousands of labels

_IGNORED_KEYS: Final = frozenset({"transformers_version"})
_SPECIAL_TOKEN_FIELDS: Final = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")

# What a model's own config.json may still carry of generation (before generation_config.json existed).
_LEGACY_FIELDS: Final = (
    *_SPECIAL_TOKEN_FIELDS, "max_length", "min_length", "do_sample", "early_stopping", "num_beams",
    "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p",
    "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "bad_words_ids", "num_return_sequences", "output_scores", "return_dict_in_generate",
    "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
)  # fmt: skip

Explainer = Callable[["GenerationConfig", object], str]
_explainer: Explainer | None = None


def register_explainer(explainer: Explainer) -> None:
    """Set what `GenerationConfig.explain` calls; the resolver does so, as it alone knows the answer."""
    global _explainer  # noqa: PLW0603 - one slot, filled once at import
    _explainer = explainer


class GenerationConfig(Parameters):
    """How to decode: one read-only attribute for each generation parameter, see `FIELDS`."""

    __slots__ = ()

    def __post_init__(self) -> None:
        validate_supported(self._values)
        validate_consistency(self._values)

    # -- what was given, and from where

    @property
    def given(self) -> frozenset[str]:
        """The names of the fields that were given explicitly."""
        return frozenset(self._values)

    @property
    def extra(self) -> Mapping[str, Any]:
        """Entries of a file that are not generation parameters of ours, written back as they came."""
        return self._extra

    @property
    def unused(self) -> Mapping[str, Any]:
        """What `merge` set aside: values of a lower level that the chosen mode has no use for."""
        return self._unused

    def source(self, name: str) -> str:
        """Where a field's value comes from: "call", "argument", "model" or "default"."""
        if name not in FIELDS:
            raise unknown_field_error(name, name)
        return self._sources.get(name, "argument") if name in self._values else "default"

    # -- new configs from old

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed; the changed ones count as given."""
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
        """The config that counts: call > argument > model > default, checked as a whole.

        The result holds at most one of each pair of lengths, no value without use, and knows the
        `source` of every field. Merged again alone, it stays as it is.
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
        if argument is not None and model is None and not call:  # a check of one config: it knows its past
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
        """A config from what a file holds: null is absent, unknown names go to `extra`.

        `overrides` are checked as strictly as code; they replace entries before these are read.
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

        Where neither has one under the usual name, what a config.json says of generation. `revision` is a
        branch, a tag or a commit, and `token` lets in where not everybody may read.
        """
        name = _validate_file_name(config_file_name)
        if isinstance(path, str) and hub.is_repo_id(path) and not Path(path).is_dir():
            name, data = _load_from_hub(path, name, revision, token)
        elif revision is not None:
            raise InputError("revision", "is for a repository on the Hub, not for a folder", revision)
        else:
            name, data = _load_from_folder(Path(path), name)
        if name == _LEGACY_FILE_NAME != config_file_name:
            return cls.from_model_config(data, **overrides)
        return cls.from_dict(data, **overrides)

    @classmethod
    def from_model_config(cls, config: object, **overrides: Any) -> Self:
        """The generation parameters that an older model's config.json (or config object) carries."""
        data = _as_mapping(config, "config")
        parts = [data, *(data.get(name) for name in ("decoder", "generator", "text_config"))]
        found: dict[str, Any] = {}
        for part in parts:
            if isinstance(part, Mapping) or hasattr(part, "to_dict"):
                inner = _as_mapping(part, "config")
                found = {
                    **{name: inner[name] for name in _LEGACY_FIELDS if inner.get(name) is not None},
                    **found,
                }
        # A version below 5 in the data makes `from_dict` read a default as "not given".
        return cls.from_dict({**found, "transformers_version": "4"}, **overrides)

    @classmethod
    def from_transformers(cls, config: object, **overrides: Any) -> Self:
        """A config from transformers' own object, whose None (5.x) or default (4.x) is "not given"."""
        return cls.from_dict(_as_mapping(config, "config"), **overrides)

    def to_dict(self) -> dict[str, Any]:
        """Every field in JSON's types, None where not given, and `extra`; `from_dict` inverts it."""
        return {**thaw(self._extra), **dict.fromkeys(FIELDS), **self._given_as_json()}

    def to_diff_dict(self) -> dict[str, Any]:
        """Only the fields that differ from their default."""
        return {
            name: value for name, value in self._given_as_json().items() if self._differs_from_default(name)
        }

    def to_json_string(self) -> str:
        """What a file holds: `extra` and the given values (also where equal to a default), sorted."""
        data = {**thaw(self._extra), **self._given_as_json()}
        for name, value in data.items():
            try:
                json.dumps(value, sort_keys=True)
            except (TypeError, ValueError):
                raise ConfigError(
                    name, "cannot be written as JSON", value, "leave it out of a saved config"
                ) from None
        return json.dumps({n: v for n, v in data.items() if v is not None}, indent=2, sort_keys=True) + "\n"

    def to_json_file(self, path: str | os.PathLike[str]) -> None:
        """Write `to_json_string` to a file, all of it or nothing."""
        text = self.to_json_string()
        target = Path(path)
        draft = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            draft.write_text(text, encoding="utf-8", newline="\n")
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)

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
        """Write the config into a folder; a folder may hold several, under different names.

        With `push_to_hub` this one file then goes to the Hub too, into `repo_id` (by default the folder's
        last name, of the token's user), which is made, `private` or not, when it is not there.
        """
        _validate_push_arguments(push_to_hub, repo_id=repo_id, private=private, commit_message=commit_message)
        folder = Path(save_directory)
        if folder.exists() and not folder.is_dir():
            raise InputError("save_directory", "must be a folder", str(folder))
        name = _validate_file_name(config_file_name)
        folder.mkdir(parents=True, exist_ok=True)
        self.to_json_file(folder / name)
        if push_to_hub:
            there = hub.create_repo(
                hub.full_repo_id(repo_id or folder.resolve().name, token), token=token, private=private
            )
            said = commit_message or f"Upload {name}"
            hub.upload_files(there, {name: self.to_json_string().encode()}, token=token, message=said)

    def _given_as_json(self) -> dict[str, Any]:
        plain = {name: thaw(self._values[name]) for name in FIELDS if name in self._values}
        if self.sequence_bias is not None:  # JSON has no tuple keys
            plain["sequence_bias"] = [[list(ids), bias] for ids, bias in sorted(self.sequence_bias.items())]
        if self.logit_bias is not None:  # nor numbers for keys
            plain["logit_bias"] = {str(token): bias for token, bias in sorted(self.logit_bias.items())}
        return plain

    def _differs_from_default(self, name: str) -> bool:
        return bool(self._values.get(name, FIELDS[name].default) != FIELDS[name].default)

    # -- as a value

    def explain(self, model: object = None) -> str:
        """Strategy, processors in order, stops, and where every value comes from, as text."""
        if _explainer is None:
            raise DescantError("`explain` needs the resolver, which is not loaded: import descant")
        return _explainer(self, model)

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


def _unpickle(kind: type[GenerationConfig], *slots: Any) -> GenerationConfig:
    return kind._make(*slots)


def _parse_entries(data: Mapping[str, Any], skip: Set[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields and the unknown entries of a file's content."""
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
        if (
            name in _SPECIAL_TOKEN_FIELDS and isinstance(value, int) and value == -1
        ):  # an old way to write "there is none"
            continue
        kept = field.parse(value)
        if not (before_5 and kept == field.default):  # 4.x cannot tell a default from one that was given
            values[name] = kept
    return values, extra


def _freeze_extra(name: str, value: Any) -> Any:
    try:
        kept = freeze(value)
        hash(kept)
    except TypeError:
        raise ConfigError(name, "must be plain data", value, "leave it out") from None
    return kept


def _load_from_folder(folder: Path, name: str) -> tuple[str, Mapping[str, Any]]:
    """The name and the content of a folder's config, or of what stands in for it."""
    if not folder.is_dir():
        raise InputError("path", "must be a local folder, or owner/name on the Hub", str(folder))
    chosen = _select_file(
        name, {one for one in (name, _LEGACY_FILE_NAME) if (folder / one).is_file()}, str(folder)
    )
    return chosen, _parse_json(_read_limited(folder / chosen), chosen, str(folder))


def _load_from_hub(
    repo: str, name: str, revision: str | None, token: str | bool | None
) -> tuple[str, Mapping[str, Any]]:
    """The same of a repository."""
    commit = hub.resolve_commit(repo, revision, token=token)
    chosen = _select_file(name, commit.files.keys(), repo)
    data = hub.fetch_files(repo, commit.sha, [chosen], limit=_MAX_FILE_BYTES, token=token)[chosen]
    return chosen, _parse_json(data, chosen, repo)


def _select_file(name: str, there: Set[str], where: str) -> str:
    if name not in there and name == FILE_NAME and _LEGACY_FILE_NAME in there:
        return _LEGACY_FILE_NAME
    if name not in there:
        raise InputError("config_file_name", f"must name a file in {where!r}", name)
    return name


def _read_limited(file: Path) -> bytes:
    """What a file holds, if it is of a size that somebody might have written."""
    try:
        with file.open("rb") as opened:
            data = opened.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        must = f"must name a file that can be read in {str(file.parent)!r} ({error.strerror})"
        raise InputError("config_file_name", must, file.name) from None
    if len(data) > _MAX_FILE_BYTES:
        must = f"must name a file of at most {_MAX_FILE_BYTES} bytes in {str(file.parent)!r}"
        raise InputError("config_file_name", must, file.name)
    return data


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a name stands there twice")
    return found


def _reject_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def _parse_json(data: bytes, name: str, where: str) -> Mapping[str, Any]:
    def refused(what: str) -> InputError:
        return InputError("config_file_name", f"must name {what} in {where!r}", name)

    try:
        text = data.decode("utf-8")
        content = json.loads(text, object_pairs_hook=_reject_duplicate_keys, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise refused(f"a JSON file ({format_value(error)})") from None
    if not isinstance(content, dict):
        raise refused("a JSON file that holds an object")
    return content


def _validate_push_arguments(push_to_hub: bool, **given: object) -> None:
    """Nothing that only a push has a use for, when nothing is pushed."""
    for name, value in given.items():
        if value is not None and not push_to_hub:
            raise InputError(name, "has no use without `push_to_hub`", value, "set push_to_hub=True")


def _validate_file_name(name: object) -> str:
    if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name:
        raise InputError("config_file_name", "must be a file name without a folder", name)
    return name


def _as_mapping(config: object, argument: str) -> Mapping[str, Any]:
    """A mapping with string keys, or an object's own account of itself as one."""
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
