"""The safetensors files of a model, and a check that its config matches their size."""

from __future__ import annotations

import contextlib
import hashlib
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

from descant.errors import InputError, UnsupportedModel, first_line, format_value

__all__ = ["WeightFiles", "check_no_adapter"]

_SINGLE_FILE: Final = "model.safetensors"
_INDEX_FILE: Final = "model.safetensors.index.json"
_ADAPTER_CONFIG: Final = "adapter_config.json"
_UNSAFE_SUFFIXES: Final = (".bin", ".ckpt", ".h5", ".msgpack", ".pkl", ".pt", ".pth")
_MAX_INDEX_BYTES: Final = 64 * 2**20  # the largest in use have about 10 MB

# A checkpoint may pack several values into one (quantized) and omit tied or computed weights. A config that
# asks for more than these ratios is a mistake or an attack.
_MAX_BYTES_RATIO: Final = 64
_EXTRA_BYTES: Final = 32 * 2**20
_MAX_TENSORS_RATIO: Final = 8  # tensors are registered twice: at creation and at loading
_EXTRA_TENSORS: Final = 200


@dataclass(frozen=True)
class WeightFiles:
    """The safetensors files of a model, their number of tensors and their total size."""

    name: str
    files: tuple[Path, ...]
    num_tensors: int
    num_bytes: int

    @classmethod
    def locate(cls, name: str, named: object = None) -> WeightFiles:
        """Find the weights in a folder or Hub repository; `named` is the file that the config names, if any.

        Weights in other formats are never opened: some run code when they are read.
        """
        first = _weights_file(name, named)
        check_no_adapter(name)
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

    def digest(self) -> dict[str, str]:
        """The digests of the files, by their names."""
        return {file.name: _file_digest(file) for file in self.files}

    @contextlib.contextmanager
    def limit_model_size(self) -> Iterator[None]:
        """Raise if a model created inside the block is far larger than these weights.

        Tensors are counted as they are registered, on the meta device: a config of a few bytes can ask for a
        million layers, or for more memory than there is.
        """
        thread, num_tensors, num_bytes = threading.get_ident(), 0, 0
        max_tensors = _MAX_TENSORS_RATIO * self.num_tensors + _EXTRA_TENSORS
        max_bytes = _MAX_BYTES_RATIO * self.num_bytes + _EXTRA_BYTES

        def count(module: Any, name: str, tensor: torch.Tensor | None) -> None:  # noqa: ARG001
            nonlocal num_tensors, num_bytes
            if tensor is None or threading.get_ident() != thread:
                return
            num_tensors, num_bytes = num_tensors + 1, num_bytes + tensor.nbytes
            if num_tensors > max_tensors or num_bytes > max_bytes:
                raise UnsupportedModel(
                    f"{self.name} has a config that asks for far more than its weights hold "
                    f"({self.num_tensors} tensors, {self.num_bytes} bytes): compare the sizes in its "
                    "config.json with the files"
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


def _file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _weights_file(name: str, named: object) -> Path:
    """The weights file, or the index of a sharded checkpoint."""
    if named is not None:
        if not isinstance(named, str) or not _is_safe_path(named):
            raise _no_safetensors_error(name, "the file that its `transformers_weights` names")
        candidates: tuple[str, ...] = (named,)
    else:
        candidates = (_SINGLE_FILE, _INDEX_FILE)
    for candidate in candidates:
        with contextlib.suppress(OSError):
            return _local_path(name, candidate)
    raise _no_safetensors_error(name, f"a file {candidates[0]}")


def _local_path(name: str, file: str) -> Path:
    """Local path of a file in a folder or Hub repository."""
    return Path(str(cached_file(name, file)))


def _no_safetensors_error(name: str, what: str) -> InputError:
    other = ""
    if Path(name).is_dir():
        unsafe = sorted(file.name for file in Path(name).iterdir() if file.suffix in _UNSAFE_SUFFIXES)
        other = f" and not in {format_value(unsafe[0])}" if unsafe else ""
    do = "save the model again with save_pretrained, which writes safetensors"
    return InputError("model", f"must have its weights in {what}, in safetensors{other}", name, do)


def check_no_adapter(name: str) -> None:
    """Raise for a folder or repository with an adapter."""
    # With peft installed an adapter would be loaded, possibly pickled; without, it is silently ignored.
    with contextlib.suppress(OSError):
        _local_path(name, _ADAPTER_CONFIG)
        do = "merge the adapter into the weights, or load both with peft and pass the model"
        raise InputError("model", f"must have no adapter in its folder ({_ADAPTER_CONFIG})", name, do)


def _shard_names(name: str, index: Path) -> list[str]:
    """The file names in an index; raises unless all are safetensors files inside the folder of the model."""
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


def _is_safe_path(file: str, *suffixes: str) -> bool:
    """Whether a name is that of a safetensors file inside the folder."""
    posix, windows = PurePosixPath(file), PureWindowsPath(file)
    if posix.is_absolute() or windows.anchor or ".." in windows.parts or "\0" in file:
        return False
    return file.endswith(suffixes or (".safetensors", ".safetensors.index.json"))
