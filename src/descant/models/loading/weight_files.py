"""The safetensors files of a model, and a check that its config matches their size."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, BinaryIO, Final

import torch
from safetensors import SafetensorError, safe_open
from tokenizers.processors import TemplateProcessing
from torch.nn.modules import module as registration
from transformers.utils.hub import cached_file

from descant.errors import InputError, MissingExtra, UnsupportedModel, first_line, format_value

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


_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_BOOL, _STRING, _ARRAY = 7, 8, 9
_ADD_BOS, _TOKENIZER, _SENTENCEPIECE = b"tokenizer.ggml.add_bos_token", b"tokenizer.ggml.model", b"llama"
_MAX_KEY_BYTES: Final = 64
# The bytes of a value by its type: uint8, int8, uint16, int16, uint32, int32, float32, bool, ..., 64 bits.
_SCALAR_BYTES: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_MAX_HEADER_BYTES: Final = 256 * 2**20  # the largest in use have some 30 MB
_MAX_ENTRIES: Final = 2**16
_MAX_VALUES: Final = 2**23  # of all arrays: a vocabulary has three values for each token
_MAX_TENSORS: Final = 2**17
_MAX_DIMENSIONS: Final = 4


class MalformedGguf(ValueError):
    """A file that is not GGUF, or whose header contradicts its size."""


@dataclass(frozen=True)
class GgufHeader:
    """The number of tensors of a GGUF file, its size in bytes, and whether prompts begin with a BOS token."""

    num_tensors: int
    num_bytes: int
    adds_bos: bool = False

    @classmethod
    def read(cls, path: Path) -> GgufHeader:
        """Read and check the header of a file."""
        with open(path, "rb") as file:
            return _HeaderReader(file, path.stat().st_size).read()


class _HeaderReader:
    """Walks over the entries of a header without keeping their values."""

    def __init__(self, file: BinaryIO, num_bytes: int) -> None:
        self.file, self.num_bytes = file, num_bytes
        self.left = min(num_bytes, _MAX_HEADER_BYTES)
        self.values_left = _MAX_VALUES

    def read(self) -> GgufHeader:
        if self._take(4) != _MAGIC:
            raise MalformedGguf("it does not begin with GGUF")
        version = self._integer(4)
        if version not in _VERSIONS:
            raise MalformedGguf(f"its version is {version}, and {_VERSIONS} can be read")
        num_tensors, num_entries = self._integer(8), self._integer(8)
        if num_tensors > _MAX_TENSORS or num_entries > _MAX_ENTRIES:
            raise MalformedGguf(f"it announces {num_tensors} tensors and {num_entries} entries")
        adds_bos: bool | None = None
        is_sentencepiece = False
        for _ in range(num_entries):
            key, kind = self._string(keep=True), self._integer(4)
            if key == _ADD_BOS and kind == _BOOL:
                adds_bos = self._take(1) != b"\0"
            elif key == _TOKENIZER and kind == _STRING:
                is_sentencepiece = self._string(keep=True) == _SENTENCEPIECE
            else:
                self._skip_value(kind)
        end = max((self._tensor_end() for _ in range(num_tensors)), default=0)
        if end > self.num_bytes:
            raise MalformedGguf(f"its tensors end at byte {end} or later, and it has {self.num_bytes}")
        # Files of sentencepiece models may leave it out.
        return GgufHeader(num_tensors, self.num_bytes, is_sentencepiece if adds_bos is None else adds_bos)

    def _take(self, count: int) -> bytes:
        """The next bytes."""
        self._count(count)
        data = self.file.read(count)
        if len(data) < count:
            raise MalformedGguf("it ends inside its header")
        return data

    def _skip(self, count: int) -> None:
        self._count(count)
        self.file.seek(count, 1)

    def _count(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise MalformedGguf("its header is longer than the file, or than a header can be")

    def _integer(self, num_bytes: int) -> int:
        return int.from_bytes(self._take(num_bytes), "little")

    def _string(self, *, keep: bool = False) -> bytes:
        """The next string; skipped unless it is to be kept and short."""
        length = self._integer(8)
        if keep and length <= _MAX_KEY_BYTES:
            return self._take(length)
        self._skip(length)
        return b""

    def _skip_value(self, kind: int) -> None:
        name, count = "a value of the unknown type", 1
        if kind == _ARRAY:
            kind, count, name = self._integer(4), self._integer(8), "an array of the type"
            self.values_left -= count
            if self.values_left < 0:
                raise MalformedGguf(f"it has an array of {count} values")
        if kind in _SCALAR_BYTES:
            self._skip(count * _SCALAR_BYTES[kind])
        elif kind == _STRING:
            for _ in range(count):
                self._string()
        else:
            raise MalformedGguf(f"it has {name} {kind}")

    def _tensor_end(self) -> int:
        """A byte that the file must have for a tensor to be in it."""
        self._string()
        num_dimensions = self._integer(4)
        if num_dimensions > _MAX_DIMENSIONS:
            raise MalformedGguf(f"it has a tensor of {num_dimensions} dimensions")
        size = 1
        for _ in range(num_dimensions):
            size *= self._integer(8)
        self._integer(4)
        # The least that any type takes is an eighth of a byte for each number.
        return self._integer(8) + size // 8


_SUFFIX: Final = ".gguf"
_CONFIG: Final = "config.json"


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file as transformers takes it: its folder, and its name in the folder."""

    folder: str
    file: str

    @classmethod
    def find(cls, name: str) -> GgufFile | None:
        """The GGUF file that a model's name means; None for models of other formats.

        It is a file, the only one of a folder without a config, or OWNER/NAME/FILE.gguf on the Hub.
        """
        path = Path(name).expanduser()
        if name.endswith(_SUFFIX):
            return cls._checked(path if path.is_file() else _hub_file(name))
        if not path.is_dir() or (path / _CONFIG).exists():
            return None
        files = sorted(file for file in path.iterdir() if file.suffix == _SUFFIX)
        if len(files) > 1:
            do = f"give one of them: {files[0]}"
            must = "must have one GGUF file, or a config.json"
            raise InputError("model", must, [file.name for file in files], do)
        return cls._checked(files[0]) if files else None

    @classmethod
    def _checked(cls, path: Path) -> GgufFile:
        if importlib.util.find_spec("gguf") is None:
            raise MissingExtra("gguf", f"loading {path.name}")
        return cls(str(path.parent), path.name)

    @property
    def path(self) -> Path:
        """The path of the file."""
        return Path(self.folder) / self.file

    @cached_property
    def header(self) -> GgufHeader:
        """The checked header of the file."""
        check_no_adapter(self.folder)
        try:
            return GgufHeader.read(self.path)
        except (MalformedGguf, OSError) as error:
            raise InputError("model", f"must be a GGUF file ({error})", str(self.path)) from error

    def weights(self) -> WeightFiles:
        """The file with the number and the size of its tensors."""
        return WeightFiles(str(self.path), (self.path,), self.header.num_tensors, self.header.num_bytes)

    def complete_tokenizer(self, tokenizer: Any) -> Any:
        """A tokenizer as the file describes it: transformers leaves out the token that prompts begin with."""
        bos, bos_id = tokenizer.bos_token, tokenizer.bos_token_id
        if not self.header.adds_bos or bos is None or tokenizer("")["input_ids"][:1] == [bos_id]:
            return tokenizer
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
        )
        return tokenizer


def _hub_file(name: str) -> Path:
    """The local copy of OWNER/NAME/FILE.gguf on the Hub."""
    owner, _, rest = name.partition("/")
    repository, _, file = rest.partition("/")
    if name.startswith((".", "/", "~")) or not (owner and repository and file):
        raise InputError("model", "must be a GGUF file that exists, or OWNER/NAME/FILE.gguf on the Hub", name)
    return Path(str(cached_file(f"{owner}/{repository}", file)))
