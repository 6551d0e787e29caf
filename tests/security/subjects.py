"""Files from untrusted sources that Descant reads: for each kind a valid one, and its reader."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

import descant
from descant import GenerationConfig
from descant.api.prefill import _digest
from descant.decoding.processors.allowed_sequences import AllowedSequences, AllowedSequencesLogitsProcessor
from descant.decoding.watermark.keys import new_settings, read_settings, write_settings
from descant.models.bayesian_detector import (
    BayesianDetectorConfig,
    BayesianDetectorModel,
    load_detector,
    save_detector,
)
from descant.models.loading import loading
from descant.recipes import recipe_files as requirements
from descant.recipes.loading import inspect_recipe, load_recipe
from descant.recipes.lock import Lock, Pin
from tests.security import mutation
from tests.security.mutation import Mutation
from tests.support import byte_tokenizer, tiny_models

CONFIG = {
    "do_sample": True, "temperature": 0.7, "top_k": 40, "top_p": 0.9, "max_new_tokens": 20,
    "eos_token_id": [2, 3], "bad_words_ids": [[4, 5], [6]], "sequence_bias": [[[7], 1.5]],
    "logit_bias": {"8": -2.0}, "stop_strings": ["a", "b"], "stop_regex": "x+y", "suppress_tokens": [9],
    "forced_decoder_ids": [[1, 5]], "compile_config": {"mode": "default"},
    "watermarking_config": {"bias": 2.0, "greenlist_ratio": 0.25, "hashing_key": 7}, "dola_layers": [0, 1],
    "exponential_decay_length_penalty": [5, 1.1], "house_name": {"x": [1, {"y": None}]},
    "transformers_version": "5.1",
}  # fmt: skip
LEGACY = {
    "model_type": "bart", "num_beams": 4, "max_length": 50, "bad_words_ids": [[1, 2]],
    "decoder": {"top_k": 3}, "text_config": {"eos_token_id": 2}, "architectures": ["X"],
}  # fmt: skip
GENERATE = """from .words import END


def generate(model, input_ids=None, left_padding=None, **arguments):
    \"\"\"The prompt, as it came.\"\"\"
    return input_ids if left_padding is None else END
"""
README = """---
library_name: transformers
tags:
  - custom_generate
---

# A recipe

It gives back the prompt.
"""


@dataclass(frozen=True)
class Subject:
    """A kind of file: what writes good ones into a folder, which of them is mutated, and what reads them."""

    make: Callable[[Path], None]
    file: str
    read: Callable[[Path], Any]
    mutations: tuple[Mutation, ...]
    count: int  # of the five thousand


# ------------------------------------------------------------------------ settings
def _config(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps(CONFIG, indent=2), encoding="utf-8")


def _legacy(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(LEGACY), encoding="utf-8")


def _read_config(folder: Path) -> None:
    config = GenerationConfig.from_pretrained(folder)
    assert GenerationConfig.from_dict(config.to_dict()) == config
    assert repr(config)
    assert hash(config) is not None
    config.to_json_string()


def _keys(folder: Path) -> None:
    write_settings(folder / "one.json", new_settings("green"), "mine")
    write_settings(folder / "two.json", new_settings("synthid"), "yours")
    both = [json.loads((folder / name).read_text(encoding="utf-8")) for name in ("one.json", "two.json")]
    (folder / "keys.json").write_text(json.dumps(both), encoding="utf-8")


# ------------------------------------------------------------------------ recipes
def _recipe(folder: Path) -> None:
    (folder / "generate.py").write_text(GENERATE, encoding="utf-8")
    (folder / "words.py").write_text("END = 1\n", encoding="utf-8")
    (folder / "README.md").write_text(README, encoding="utf-8")
    (folder / "requirements.txt").write_text("torch>=2\nnumpy ; python_version > '3'\n", encoding="utf-8")
    _config(folder)


def _lock_of(folder: Path) -> Lock:
    return Lock(folder.with_name(f"{folder.name}.lock"))


def _look(folder: Path) -> None:
    """All that can be seen of a recipe that is not run."""
    found = inspect_recipe(folder, lock=_lock_of(folder))
    assert found.contents is not None
    assert (found.kind, found.trust_state, found.contents.digest, found.contents.readme) is not None
    requirements.check_requirements(found.contents.requirements, found.name)


def _run(folder: Path) -> None:
    recipe = load_recipe(folder, trust_remote_code=True, lock=_lock_of(folder))
    for name in recipe.configs:
        recipe.config(name)


def _lock(folder: Path) -> None:
    lock = Lock(folder / "recipes.lock")
    digest = "sha256:" + "0" * 64
    lock.trust("hub:owner/name", Pin("a" * 40, digest, {"generate.py": digest}))
    lock.trust("folder:/a/b", Pin(None, digest, {"generate.py": digest, "README.md": digest}))


# ------------------------------------------------------------------------ tensors
def _sequences(folder: Path) -> None:
    AllowedSequences([[3, 4], [3, 5, 6], [7]], eos_token_id=2).save(folder / "sequences.safetensors")


def _read_sequences(folder: Path) -> None:
    trie = AllowedSequences.load(folder / "sequences.safetensors")
    process = AllowedSequencesLogitsProcessor(trie, prompt_length=1)
    for new in ([], [3], [3, 5], [7, 7]):
        process(torch.tensor([[1, *new]]), torch.zeros(1, 97))


def _cache(folder: Path) -> None:
    made = tiny_models.build("llama", folder / "model")
    model = tiny_models.load("llama", made).model
    descant.prefill(model, torch.tensor([[5, 6, 7, 8]]), cache="paged").save(folder / "cache.safetensors")
    shutil.rmtree(made)


def signed(chance: random.Random, data: bytes) -> bytes:
    """A tampered cache with a valid checksum, which anyone can compute."""
    changed = chance.choice(mutation.SAFETENSORS)(chance, data)
    try:
        tensors = safetensors.torch.load(changed)
        header, _ = mutation._split(changed)
        metadata = json.loads(header).get("__metadata__", {})
    except (SafetensorError, ValueError, KeyError, RecursionError, RuntimeError):
        return changed
    if not isinstance(metadata, dict):
        return changed
    metadata = {name: value for name, value in metadata.items() if isinstance(value, str)}
    try:
        return safetensors.torch.save(tensors, {**metadata, "digest": _digest(tensors, metadata)})
    except (RuntimeError, TypeError, ValueError):
        return changed


_SETTINGS = (
    '{"block_size": 0}', '{"block_size": -1}', '{"block_size": 1000000000000}',
    '{"block_size": 4096}', '{"block_size": 1e9}',
    '{"block_size": "9999999999"}', '{"block_size": [1]}', '{"self": 1}',
    '{"pool": 1}', '{"block_size": 3, "pool": 1}',
    "paged", "dynamic", "quantized",
)  # fmt: skip


def resigned(chance: random.Random, data: bytes) -> bytes:
    """A cache whose words and tensors are changed one by one, and summed up again."""
    tensors = safetensors.torch.load(data)
    metadata = dict(json.loads(mutation._split(data)[0])["__metadata__"])
    for _ in range(chance.choice((1, 1, 2))):
        name = chance.choice(sorted(tensors))
        part, word = tensors[name], chance.choice(("model", "settings", "kind", "format"))
        wrong = (
            lambda part=part: part.reshape(-1),
            lambda part=part: part[..., :0],
            lambda part=part: part.new_zeros(()),
            lambda part=part: part.to(torch.float16),
            lambda part=part: part.to(torch.int64),
            lambda part=part: part.to(torch.complex64),
            lambda part=part: part.to(torch.float8_e4m3fn),
            lambda part=part: part.bool(),
            lambda part=part: torch.cat([part, part]),
            lambda part=part: part[:0],
            lambda part=part: part * 10**12,
            lambda part=part: -part,
            lambda part=part: part[None],
            lambda part=part: torch.full_like(part, 2**40 if part.dtype == torch.long else torch.nan),
        )
        if chance.random() < 0.6:
            tensors[name] = chance.choice(wrong)().contiguous()
        else:
            metadata[word] = chance.choice((*mutation.VALUES, *_SETTINGS))
    return safetensors.torch.save(tensors, {**metadata, "digest": _digest(tensors, metadata)})


def _detector(folder: Path) -> None:
    save_detector(BayesianDetectorModel(BayesianDetectorConfig(watermarking_depth=5)), folder)


def _model(folder: Path) -> None:
    tiny_models.build("llama", folder)
    byte_tokenizer.tokenizer().save_pretrained(folder)


def _sharded(folder: Path) -> None:
    _model(folder)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    names = safetensors.torch.load_file(folder / "model-00001-of-00001.safetensors")
    index = {
        "metadata": {"total_size": 1},
        "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors"),
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _load(folder: Path) -> None:
    loading.load(str(folder))


def _read_keys(folder: Path) -> None:
    read_settings(folder / "keys.json")


def _read_lock(folder: Path) -> None:
    Lock(folder / "recipes.lock").pins()


def _load_cache(folder: Path) -> None:
    descant.load_cache(folder / "cache.safetensors")


SUBJECTS = {
    "generation config": Subject(_config, "generation_config.json", _read_config, mutation.JSON, 1500),
    "old config": Subject(_legacy, "config.json", _read_config, mutation.JSON, 200),
    "watermark keys": Subject(_keys, "keys.json", _read_keys, mutation.JSON, 300),
    "recipe's config": Subject(_recipe, "generation_config.json", _run, mutation.JSON, 300),
    "recipe's requirements": Subject(_recipe, "requirements.txt", _look, mutation.REQUIREMENT_LINES, 300),
    "recipe's README": Subject(_recipe, "README.md", _look, mutation.TEXT, 150),
    "recipe's code": Subject(_recipe, "generate.py", _look, mutation.PYTHON_LINES, 300),
    "lock": Subject(_lock, "recipes.lock", _read_lock, mutation.JSON, 400),
    "sequences": Subject(_sequences, "sequences.safetensors", _read_sequences, mutation.SAFETENSORS, 500),
    "cache": Subject(_cache, "cache.safetensors", _load_cache, (*mutation.SAFETENSORS, signed), 250),
    "cache, signed": Subject(_cache, "cache.safetensors", _load_cache, (signed, resigned, resigned), 250),
    "detector": Subject(_detector, "model.safetensors", load_detector, mutation.SAFETENSORS, 200),
    "detector's config": Subject(_detector, "config.json", load_detector, mutation.JSON, 150),
    "model": Subject(_model, "model.safetensors", _load, mutation.SAFETENSORS, 80),
    "model's config": Subject(_model, "config.json", _load, mutation.JSON, 60),
    "model's generation config": Subject(_model, "generation_config.json", _load, mutation.JSON, 20),
    "model's tokenizer": Subject(_model, "tokenizer.json", _load, mutation.JSON, 40),
    "model's tokenizer's config": Subject(_model, "tokenizer_config.json", _load, mutation.JSON, 20),
    "model's index": Subject(_sharded, "model.safetensors.index.json", _load, mutation.JSON, 30),
}  # fmt: skip
