"""A model's weights: safetensors files and nothing else, and a config that is in proportion to them."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch.nn.modules import module as registration
from transformers.utils.hub import cached_file

from descant.errors import InputError, UnsupportedModel, format_value

__all__ = ["WeightFiles", "first_line"]

_SINGLE_FILE: Final = "model.safetensors"
_INDEX_FILE: Final = "model.safetensors.index.json"
_ADAPTER_CONFIG: Final = "adapter_config.json"
_UNSAFE_SUFFIXES: Final = (".bin", ".ckpt", ".h5", ".msgpack", ".pkl", ".pt", ".pth")
_MAX_ERROR_CHARS: Final = 300  # characters of what another library says
_MAX_INDEX_BYTES: Final = 64 * 2**20  # bytes; the longest in use have about ten million

# A checkpoint may hold two, four or more numbers in one (quantized), and may leave out what is tied or made
# anew; a config that asks for more than this many times what the files hold is a mistake, or a trap.
_MAX_BYTES_RATIO: Final = 64
_EXTRA_BYTES: Final = 32 * 2**20
_MAX_TENSORS_RATIO: Final = 8  # they are counted once more when the weights are put in
_EXTRA_TENSORS: Final = 200


@dataclass(frozen=True)
class WeightFiles:
    """The safetensors files of a model, with how many tensors they hold and how long they are."""

    name: str
    files: tuple[Path, ...]
    num_tensors: int
    num_bytes: int

    @classmethod
    def locate(cls, name: str, named: object = None) -> WeightFiles:
        """The weights in a folder or a repository of the Hub; `named` is the file that its config names.

        Other files can hold weights too, and some of them run code when they are read: they are never opened.
        """
        first = _weights_file(name, named)
        _check_no_adapter(name)
        sharded = first.name.endswith(".json")
        files = (
            tuple(_local_path(name, shard) for shard in _shard_names(name, first)) if sharded else (first,)
        )
        tensors = 0
        for file in files:
            try:
                with safe_open(os.fspath(file), "pt") as opened:
                    tensors += len(opened.keys())
            except (SafetensorError, OSError, ValueError, RuntimeError) as error:
                must = f"must have weights in safetensors ({file.name}: {first_line(error)})"
                raise InputError("model", must, name) from error
        return cls(name, files, tensors, sum(file.stat().st_size for file in files))

    @contextlib.contextmanager
    def limit_model_size(self) -> Iterator[None]:
        """Refuse to make a model that is out of all proportion to these weights.

        Its tensors are counted while it is made, on the meta device: a config of a few bytes can ask for a
        million layers, or for more memory than there is.
        """
        here, tensors, size = threading.get_ident(), 0, 0
        most = _MAX_TENSORS_RATIO * self.num_tensors + _EXTRA_TENSORS
        room = _MAX_BYTES_RATIO * self.num_bytes + _EXTRA_BYTES

        def count(module: Any, name: str, tensor: torch.Tensor | None) -> None:  # noqa: ARG001
            nonlocal tensors, size
            if tensor is None or threading.get_ident() != here:
                return
            tensors, size = tensors + 1, size + tensor.nbytes
            if tensors > most or size > room:
                raise UnsupportedModel(
                    f"{self.name} has a config that asks for far more than its weights hold ({self.num_tensors} "
                    f"tensors, {self.num_bytes} bytes): compare the sizes in its config.json with the files"
                )

        handles = [
            registration.register_module_parameter_registration_hook(count),
            registration.register_module_buffer_registration_hook(count),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def first_line(error: BaseException) -> str:
    """What an error of another library says, as much as fits into one of ours."""
    lines = str(error).strip().splitlines()
    line = lines[0].rstrip(".: ") if lines else format_value(error)
    return line if len(line) <= _MAX_ERROR_CHARS else line[: _MAX_ERROR_CHARS - 3] + "..."


def _weights_file(name: str, named: object) -> Path:
    """The file that holds the weights, or says which files do."""
    if named is not None:
        if not isinstance(named, str) or not _is_safe_path(named):
            raise _no_safetensors_error(name, "a file that its `transformers_weights` names")
        candidates: tuple[str, ...] = (named,)
    else:
        candidates = (_SINGLE_FILE, _INDEX_FILE)
    for candidate in candidates:
        with contextlib.suppress(OSError):
            return _local_path(name, candidate)
    raise _no_safetensors_error(name, f"a file {candidates[0]}")


def _local_path(name: str, file: str) -> Path:
    """A file of a folder, or of a repository of the Hub, here."""
    return Path(str(cached_file(name, file)))


def _no_safetensors_error(name: str, what: str) -> InputError:
    beside = ""
    if Path(name).is_dir():
        there = sorted(one.name for one in Path(name).iterdir() if one.suffix in _UNSAFE_SUFFIXES)
        beside = f" and not in {format_value(there[0])}" if there else ""
    do = "save the model once more with save_pretrained, which writes safetensors"
    return InputError("model", f"must have its weights in {what}, in safetensors{beside}", name, do)


def _check_no_adapter(name: str) -> None:
    # With peft an adapter beside a model is loaded, pickled if need be; without, it is left out silently.
    with contextlib.suppress(OSError):
        _local_path(name, _ADAPTER_CONFIG)
        do = "merge it into the weights, or load both with peft and pass the model"
        raise InputError("model", f"must have no adapter beside it ({_ADAPTER_CONFIG})", name, do)


def _shard_names(name: str, index: Path) -> list[str]:
    """The names of the files that an index names, all of them safetensors inside the model's folder."""
    if index.stat().st_size > _MAX_INDEX_BYTES:
        raise InputError("model", f"must have an index of at most {_MAX_INDEX_BYTES} bytes", name)
    try:
        shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        must = f"must have an index that maps weights to files ({index.name})"
        raise InputError("model", must, name) from error
    if not shards or not all(
        isinstance(shard, str) and _is_safe_path(shard, ".safetensors") for shard in shards
    ):
        raise _no_safetensors_error(name, "the files that its index names")
    return shards


def _is_safe_path(file: str, *endings: str) -> bool:
    """Whether this is the name of a safetensors file inside the folder."""
    posix, windows = PurePosixPath(file), PureWindowsPath(file)
    if posix.is_absolute() or windows.anchor or ".." in windows.parts or "\0" in file:
        return False
    return file.endswith(endings or (".safetensors", ".safetensors.index.json"))
