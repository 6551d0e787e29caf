"""Files that run code when they are unpickled or imported, wherever Descant reads: the code never runs."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import json
import lzma
import marshal
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from descant.errors import DescantError
from descant.models.loading import loading
from tests.security.clock import spent
from tests.security.subjects import SUBJECTS
from tests.security.test_corrupt import BYTES, SECONDS, begin, highest

NAME = "canary"


class Bomb:
    """When it is unpickled, it makes a folder."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.canary),)


class Source:
    """The same by way of a source text."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return exec, (code(self.canary),)


def code(canary: Path) -> str:
    """Python that makes the folder when it is imported."""
    return f"import os\nos.mkdir({str(canary)!r})\n"


def _torch(bomb: Bomb, zipped: bool) -> bytes:
    file = io.BytesIO()
    torch.save({"a": torch.ones(2), "b": bomb}, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


def _numpy(bomb: Bomb, several: bool) -> bytes:
    file = io.BytesIO()
    array = np.array([bomb], dtype=object)
    if several:
        np.savez(file, a=array, allow_pickle=True)
    else:
        np.save(file, array, allow_pickle=True)
    return file.getvalue()


def _zip(bomb: Bomb) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(bomb))
        archive.writestr("archive/version", "3\n")
    return file.getvalue()


def _two(bomb: Bomb) -> bytes:
    """A safetensors file whose one tensor is an archive with a pickle: a file of both kinds."""
    data = torch.frombuffer(bytearray(_zip(bomb)), dtype=torch.uint8)
    return safetensors.torch.save({"lm_head.weight": data})


def _text(canary: Path) -> bytes:
    """A pickle of printable characters alone, which is text in any encoding."""
    return f"cos\nmkdir\n(S{str(canary)!r}\ntR.".encode()


PAYLOADS: dict[str, Callable[[Path], bytes]] = {
    **{f"pickle {number}": partial(lambda number, to: pickle.dumps(Bomb(to), protocol=number), number)
       for number in range(pickle.HIGHEST_PROTOCOL + 1)},
    "pickle of source": lambda to: pickle.dumps(Source(to)),
    "pickle as text": _text,
    "pickle in a header": lambda to: struct.pack("<Q", len(_text(to))) + _text(to),
    "pickle after JSON": lambda to: b"{}\n" + pickle.dumps(Bomb(to)),
    "torch": lambda to: _torch(Bomb(to), True),
    "torch, before zip": lambda to: _torch(Bomb(to), False),
    "numpy": lambda to: _numpy(Bomb(to), False),
    "numpy, several": lambda to: _numpy(Bomb(to), True),
    "joblib": lambda to: pickle.dumps({"wrapper": Bomb(to)}, protocol=4) + b"\0" * 16 + bytes(64),
    "zlib": lambda to: zlib.compress(pickle.dumps(Bomb(to))),
    "gzip": lambda to: gzip.compress(pickle.dumps(Bomb(to))),
    "bz2": lambda to: bz2.compress(pickle.dumps(Bomb(to))),
    "xz": lambda to: lzma.compress(pickle.dumps(Bomb(to))),
    "zip": lambda to: _zip(Bomb(to)),
    "zip in safetensors": lambda to: _two(Bomb(to)),
    "marshal": lambda to: marshal.dumps(compile(code(to), "a", "exec")),
    "source": lambda to: code(to).encode(),
}  # fmt: skip
UNPICKLED = [name for name in PAYLOADS if name not in ("marshal", "source", "pickle after JSON")]


def _opened(data: bytes) -> Any:
    """What careless readers do, one after the other."""
    for unpack in (zlib.decompress, gzip.decompress, bz2.decompress, lzma.decompress):
        try:
            return pickle.loads(unpack(data))
        except (zlib.error, OSError, EOFError, lzma.LZMAError):
            continue
    file = io.BytesIO(data)
    if data[:6] == b"\x93NUMPY":
        return np.load(file, allow_pickle=True)
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            inner = next(name for name in archive.namelist() if name.endswith((".pkl", ".npy")))
            if inner.endswith(".npy"):
                return np.load(io.BytesIO(archive.read(inner)), allow_pickle=True)
            if len(archive.namelist()) == 2:
                return pickle.loads(archive.read(inner))
    try:
        return torch.load(io.BytesIO(data), weights_only=False)
    except Exception:
        skip = 8 if data[4:8] == b"\0" * 4 and data[:1] != b"\x80" else 0
        return pickle.loads(data[skip:])


@pytest.mark.parametrize("payload", UNPICKLED)
def test_a_careless_reader_would_set_it_off(payload: str, tmp_path: Path) -> None:
    data = PAYLOADS[payload](tmp_path / NAME)
    with contextlib.suppress(Exception):  # what comes after the code has run does not matter
        _opened(data)
    assert (tmp_path / NAME).is_dir()


def refusal_of(read: Callable[[Path], Any], folder: Path, canary: Path) -> str:
    """Read a file that must be refused by name; the error text."""
    with pytest.raises(DescantError) as caught:
        read(folder)
    assert not canary.exists()
    return str(caught.value)


def try_read(read: Callable[[Path], Any], folder: Path, canary: Path) -> None:
    """Read what may be refused, and may be left alone."""
    with contextlib.suppress(DescantError):
        read(folder)
    assert not canary.exists()


def changed(file: Path, changes: Mapping[str, Any]) -> None:
    """Put something into a JSON file."""
    known = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**known, **changes}), encoding="utf-8")


def index(folder: Path, name: str, names: Iterable[str], file: str) -> None:
    """Write an index with all weights in one file."""
    told = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, file)}
    (folder / name).write_text(json.dumps(told), encoding="utf-8")


# ------------------------------------------------------------------------ every file that is read
@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("subject", [name for name in SUBJECTS if not name.startswith(("model", "cache, "))])
def test_in_the_place_of_a_file(subject: str, payload: str, tmp_path: Path) -> None:
    folder, canary = tmp_path / "it", tmp_path / NAME
    folder.mkdir()
    chosen = SUBJECTS[subject]
    chosen.make(folder)
    (folder / chosen.file).write_bytes(PAYLOADS[payload](canary))
    if chosen.file == "README.md":  # which is only shown, if it is text
        try_read(chosen.read, folder, canary)
    else:
        refusal_of(chosen.read, folder, canary)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    SUBJECTS["model"].make(folder)
    return folder


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    """A copy of it to be spoilt."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in whole.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


WEIGHTS = (
    "pytorch_model.bin", "model.bin", "model.pt", "model.pth", "model.ckpt", "consolidated.00.pth",
    "model.pkl", "tf_model.h5", "flax_model.msgpack", "adapter_model.bin",
    "pytorch_model-00001-of-00001.bin", "rust_model.ot",
)  # fmt: skip


@pytest.mark.parametrize("payload", ["pickle 2", "torch", "torch, before zip", "zip"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_as_a_models_weights(name: str, payload: str, model: Path, tmp_path: Path) -> None:
    canary = tmp_path / NAME
    (model / "model.safetensors").unlink()
    (model / name).write_bytes(PAYLOADS[payload](canary))
    assert "safetensors" in refusal_of(_load, model, canary)
    index(model, "pytorch_model.bin.index.json", ["lm_head.weight"], name)
    assert "safetensors" in refusal_of(_load, model, canary)


def _load(folder: Path) -> None:
    loading.load(str(folder))


def _tokenizing(folder: Path) -> None:
    loading.load_tokenizer(str(folder))


def _outline(folder: Path) -> None:
    loading.load_meta_model(str(folder))


@pytest.mark.parametrize("payload", ["pickle 2", "torch", "torch, before zip", "numpy", "zip in safetensors"])
def test_as_the_file_that_an_index_names(payload: str, model: Path, tmp_path: Path) -> None:
    """An index of safetensors may name any file, and transformers would unpickle it."""
    canary = tmp_path / NAME
    names = list(safetensors.torch.load_file(model / "model.safetensors"))
    (model / "model.safetensors").unlink()
    data = PAYLOADS[payload](canary)
    for place in ("pytorch_model.bin", "a.pt", "../outside.bin", "sub/a.bin", str(tmp_path / "absolute.bin")):
        (model / "sub").mkdir(exist_ok=True)
        (model / place).write_bytes(data)
        index(model, "model.safetensors.index.json", names, place)
        assert "safetensors" in refusal_of(_load, model, canary)
    for place in ("../outside.safetensors", str(tmp_path / "absolute.safetensors"), "a\0.safetensors"):
        index(model, "model.safetensors.index.json", names, place)
        refusal_of(_load, model, canary)


@pytest.mark.parametrize("payload", ["pickle 4", "torch", "torch, before zip", "zip in safetensors"])
def test_as_the_file_that_a_config_names(payload: str, model: Path, tmp_path: Path) -> None:
    canary = tmp_path / NAME
    for name in ("adapter_model.bin", "a.bin", "../a.bin", "../a.safetensors"):
        (model / name).write_bytes(PAYLOADS[payload](canary))
        changed(model / "config.json", {"transformers_weights": name})
        assert "safetensors" in refusal_of(_load, model, canary)


@pytest.mark.parametrize("payload", ["pickle 4", "torch", "torch, before zip"])
def test_as_an_adapter(payload: str, model: Path, tmp_path: Path) -> None:
    canary = tmp_path / NAME
    (model / "adapter_model.bin").write_bytes(PAYLOADS[payload](canary))
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(model), "target_modules": ["q_proj"]}
    (model / "adapter_config.json").write_text(json.dumps(adapter), encoding="utf-8")
    assert "adapter" in refusal_of(_load, model, canary)


FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
BESIDE = (
    "pytorch_model.bin", "training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "vocab.pkl",
    "x.npy", "tokenizer.model", "vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "spiece.model", "generation_config.json", "preprocessor_config.json", "chat_template.jinja",
    "distributed_checkpoint/.metadata", ".metadata", "conftest.py", "sitecustomize.py", "__init__.py",
    "custom_generate/generate.py", "generate.py",
)  # fmt: skip


@pytest.mark.parametrize(
    "payload", ["pickle 0", "pickle 4", "torch", "torch, before zip", "numpy", "pickle as text"]
)
@pytest.mark.parametrize("name", FILES)
def test_as_a_file_of_a_model(name: str, payload: str, model: Path, tmp_path: Path) -> None:
    canary = tmp_path / NAME
    (model / name).write_bytes(PAYLOADS[payload](canary))
    refusal_of(_load, model, canary)


@pytest.mark.parametrize("payload", ["pickle 4", "torch", "source"])
@pytest.mark.parametrize("name", BESIDE)
def test_beside_a_good_model(name: str, payload: str, model: Path, tmp_path: Path) -> None:
    """What is not needed is left alone, or refused where it is read."""
    canary = tmp_path / NAME
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).write_bytes(PAYLOADS[payload](canary))
    for read in (_load, _tokenizing, _outline):
        try_read(read, model, canary)


@pytest.mark.parametrize("payload", ["pickle 2", "torch", "torch, before zip", "zip"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_as_a_detectors_weights(name: str, payload: str, tmp_path: Path) -> None:
    folder, canary = tmp_path / "it", tmp_path / NAME
    folder.mkdir()
    subject = SUBJECTS["detector"]
    subject.make(folder)
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(PAYLOADS[payload](canary))
    assert "safetensors" in refusal_of(subject.read, folder, canary)


# ------------------------------------------------------------------------ a model's own code
MAPS: dict[str, tuple[str, dict[str, Any]]] = {
    "a config": ("config.json", {"auto_map": {"AutoConfig": "evil.Config"}, "model_type": "evil"}),
    "a known config": ("config.json", {"auto_map": {"AutoConfig": "evil.Config"}}),
    "a model": ("config.json", {"auto_map": {"AutoModelForCausalLM": "evil.Model"}}),
    "another repository": ("config.json", {"auto_map": {"AutoModelForCausalLM": "a/b--evil.Model"}}),
    "a tokenizer": ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.A", "evil.B"]}}),
    "another tokenizer": (
        "tokenizer_config.json",
        {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}},
    ),
    "a kernel": ("config.json", {"attn_implementation": "a/evil"}),
    "a named kernel": ("config.json", {"attn_implementation": "a/evil@main:run"}),
    "experts": ("config.json", {"experts_implementation": "a/evil"}),
    "a way to generate": ("generation_config.json", {"custom_generate": "evil"}),
}


@pytest.mark.parametrize("case", MAPS)
def test_a_models_own_code_never_runs(case: str, model: Path, tmp_path: Path) -> None:
    canary = tmp_path / NAME
    file, more = MAPS[case]
    (model / "evil.py").write_text(code(canary), encoding="utf-8")
    changed(model / file, more)
    for read in (_load, _tokenizing, _outline):
        try_read(read, model, canary)


@pytest.mark.parametrize("case", ["a kernel", "a named kernel", "experts"])
def test_code_from_the_hub_is_refused(case: str, model: Path) -> None:
    file, more = MAPS[case]
    changed(model / file, more)
    with pytest.raises(DescantError, match="asks for code from the Hub"):
        _load(model)


# ------------------------------------------------------------------------ what a model must be
def test_a_model_that_lacks_weights_is_refused(model: Path) -> None:
    tensors = safetensors.torch.load_file(model / "model.safetensors")
    del tensors["lm_head.weight"]
    safetensors.torch.save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(DescantError, match=r"lacks 1 of its weights: lm_head\.weight"):
        _load(model)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 100_000}, {"vocab_size": 10**8}, {"intermediate_size": 10**9},
        {"hidden_size": 2**30}, {"vocab_size": 10**12, "hidden_size": 10**6},
    ],
    ids=str,
)  # fmt: skip
def test_a_config_out_of_proportion_is_refused(changes: dict[str, int], model: Path) -> None:
    changed(model / "config.json", changes)
    memory = begin()
    with (
        spent() as seconds,
        pytest.raises(DescantError, match=r"far more than its weights hold|cannot be loaded"),
    ):
        _load(model)
    assert seconds[0] < SECONDS
    assert highest() - memory < BYTES
    assert not torch.nn.modules.module._global_parameter_registration_hooks
    assert not torch.nn.modules.module._global_buffer_registration_hooks


def test_a_sharded_model_is_loaded(tmp_path: Path) -> None:
    SUBJECTS["model's index"].make(tmp_path)
    _load(tmp_path)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_a_config_of_endless_lists_is_refused(file: str, model: Path) -> None:
    """Each value of which transformers would copy and check dozens of times, for seconds."""
    path = model / file
    if not path.exists():
        path.write_text("{}", encoding="utf-8")
    changed(path, {"note": list(range(50_000))})
    _load(model)
    changed(path, {"note": list(range(100_000))})
    with (
        spent() as seconds,
        pytest.raises(DescantError, match=rf"must have a {file} of at most 65536 values"),
    ):
        _load(model)
    assert seconds[0] < 0.5
