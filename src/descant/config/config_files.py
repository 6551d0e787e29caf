"""Reading a config file from a folder or from a repository on the Hub."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any, Final

from descant.config import hub
from descant.config.fields import RedactedMap
from descant.errors import InputError, format_value

__all__ = [
    "FILE_NAME",
    "LEGACY_FILE_NAME",
    "format_config",
    "load_from_folder",
    "load_from_hub",
    "validate_file_name",
]

FILE_NAME: Final = "generation_config.json"
LEGACY_FILE_NAME: Final = "config.json"  # used where a model has no generation_config.json
_MAX_FILE_BYTES: Final = 1 << 20  # a config.json may have thousands of labels


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
