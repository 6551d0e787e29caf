"""Folders that `Dataset.save_to_disk` of the library `datasets` writes."""

from __future__ import annotations

import json
import os
from typing import Any, Final

from descant.errors import InputError

__all__ = ["dataset_files"]

_STATE: Final = "state.json"
_SPLITS: Final = "dataset_dict.json"
_MUST: Final = "must be a file, or a folder that `Dataset.save_to_disk` wrote"


def dataset_files(folder: str) -> list[str]:
    """The files of a dataset in their order; raises InputError for a folder of anything else."""
    if os.path.exists(os.path.join(folder, _SPLITS)):
        splits = _read(folder, _SPLITS).get("splits")
        folders = [os.path.join(folder, str(one)) for one in splits] if isinstance(splits, list) else []
        advice = f"give {' or '.join(folders)}" if folders else "give the folder of one"
        raise InputError("source", "must be one split of a dataset", folder, advice)
    files = _read(folder, _STATE).get("_data_files")
    listed = files if isinstance(files, list) else [None]  # a dataset without rows has no files
    names = [one.get("filename") if isinstance(one, dict) else None for one in listed]
    # Only names: a state from elsewhere must not lead out of its folder.
    if not all(isinstance(one, str) and _is_name(one) for one in names):
        raise InputError("source", f"must have the names of its files in {_STATE}", folder)
    return [os.path.join(folder, str(one)) for one in names]


def _is_name(text: str) -> bool:
    return text.endswith(".arrow") and text == os.path.basename(text)


def _read(folder: str, name: str) -> dict[str, Any]:
    try:
        with open(os.path.join(folder, name), "rb") as file:
            found = json.load(file)
    except FileNotFoundError:
        raise InputError("source", f"{_MUST} (without {name})", folder) from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError("source", f"{_MUST} ({name}: {error})", folder) from None
    if not isinstance(found, dict):
        raise InputError("source", f"{_MUST} ({name} is no object)", folder)
    return found
