"""The tested texts: human-written, and generated with and without a watermark."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import descant
from bench.detection import prompts
from bench.detection.corpus import LENGTH, pieces
from bench.detection.marks import MARKS, marking_config
from bench.detection.store import Store
from descant.config.generation_config import GenerationConfig

__all__ = ["NONE", "Batch", "Library", "Reader", "Text", "batches"]

NONE = "none"  # the scheme of unmarked texts
HUMAN, SAMPLED = "human", "sampled"
_PROMPT = {"smollm2": prompts.chat, "minimind2-small": prompts.chat, "stories15m": prompts.story}
_SAMPLING = {"do_sample": True, "temperature": 1.0, "top_k": 50}
_METHODS: Mapping[str, Mapping[str, Any]] = {
    SAMPLED: _SAMPLING,
    "beams": {"num_beams": 4, "do_sample": False},
    "sampled beams": {"num_beams": 4, **_SAMPLING},
    "lookup": {"prompt_lookup_num_tokens": 5, **_SAMPLING},
}


@dataclass(frozen=True)
class Text:
    """One text: its tokens, the decoded text, and its key if it is marked."""

    model: str  # of the tokens
    mark: str
    method: str  # HUMAN or the decoding method
    index: int  # index among those of its model, scheme and method
    ids: list[int]
    text: str

    @property
    def tag(self) -> tuple[str, str, int]:
        """The seed of its keys."""
        return self.model, self.method, self.index


@dataclass(frozen=True)
class Batch:
    """Texts that are generated together."""

    model: str
    mark: str
    method: str
    number: int
    size: int
    length: int = LENGTH  # new tokens of each

    @property
    def name(self) -> str:
        """The name of its unit in the store."""
        return f"texts/{self.mark}/{self.label}"

    @property
    def label(self) -> str:
        """Its name among those of its scheme."""
        return f"{self.method.replace(' ', '-')}-{self.model}-{self.number}"


def batches(scale: float) -> Iterator[Batch]:
    """All batches in order; with a scale below 1, none of the larger model."""
    for model, count in (("smollm2", 2), ("stories15m", 3), ("minimind2-small", 10)):
        yield from _several(model, NONE, HUMAN, max(1, round(count * scale)), 112)
    for model, count in (("stories15m", 6), ("minimind2-small", 3)):
        yield from _several(model, NONE, SAMPLED, max(1, round(count * scale)), 44)
    yield from _several("smollm2", NONE, SAMPLED, int(scale), 32)
    for mark in MARKS:
        for model, count in (("stories15m", 6), ("minimind2-small", 2)):
            yield from _several(model, mark, SAMPLED, max(1, round(count * scale)), 44)
    for mark in MARKS:
        yield from _several("smollm2", mark, SAMPLED, int(3 * scale), 50)
    for mark in MARKS:
        yield from _several("stories15m", mark, "lookup", max(1, round(2 * scale)), 32)
    for mark, method in (("lefthash", "beams"), ("lefthash", "sampled beams"), ("selfhash", "beams")):
        yield from _several("stories15m", mark, method, max(1, round(4 * scale)), 16)


def _several(model: str, mark: str, method: str, count: int, size: int) -> Iterator[Batch]:
    return (Batch(model, mark, method, number, size) for number in range(count))


@dataclass(frozen=True)
class Reader:
    """A model's tokenizer and the size of its logits."""

    tokenizer: Any
    vocabulary: int

    def text(self, ids: list[int]) -> str:
        """The decoded text."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


class Library:
    """All texts, generated on demand and kept in a store."""

    def __init__(self, store: Store, models: Path) -> None:
        self.store, self._models = store, models
        self._cached_model: Callable[[str], Any] = functools.lru_cache(maxsize=1)(self._model)
        self.reader: Callable[[str], Reader] = functools.cache(self._reader)
        self._human: Callable[[str, int], list[list[int]]] = functools.cache(self._pieces)

    def texts(self, batch: Batch) -> list[Text]:
        """The texts of a batch."""
        rows = self.store.get(batch.name, lambda: self.generate(batch))
        reader, first = self.reader(batch.model), batch.number * batch.size
        return [
            Text(batch.model, batch.mark, batch.method, first + at, ids, reader.text(ids))
            for at, ids in enumerate(rows)
        ]

    def generate(self, batch: Batch) -> list[list[int]]:
        """Generate the tokens of its texts."""
        first = batch.number * batch.size
        if batch.method == HUMAN:
            return self._human(batch.model, first + batch.size)[first:]
        tokenizer = self.reader(batch.model).tokenizer
        indices = range(first, first + batch.size)
        prompt_ids = [_PROMPT[batch.model](tokenizer, index) for index in indices]
        count = {"max_new_tokens": batch.length, "min_new_tokens": batch.length}
        fields: dict[str, Any] = {**_METHODS[batch.method], **count}
        configs = [
            GenerationConfig(**fields, watermarking_config=self._settings(batch, index)) for index in indices
        ]
        width = max(map(len, prompt_ids))
        ids = torch.tensor([[0] * (width - len(one)) + one for one in prompt_ids])
        mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in prompt_ids])
        model = self._cached_model(batch.model)
        seeds = [1000 * batch.number + index for index in indices]
        out = descant.generate(model, ids, attention_mask=mask, generation_config=configs, seed=seeds)
        assert isinstance(out, torch.Tensor)
        new = out[:, width:]
        if new.shape != (batch.size, batch.length):
            expected = f"{batch.size} texts of {batch.length} tokens"
            raise RuntimeError(f"{batch.name} must be {expected}, got {list(new.shape)}")
        return [list(map(int, row)) for row in new]

    def _settings(self, batch: Batch, index: int) -> Any:
        return None if batch.mark == NONE else marking_config(batch.mark, batch.model, batch.method, index)

    def _pieces(self, model: str, count: int) -> list[list[int]]:
        # A different seed for each model.
        return pieces(self.reader(model).tokenizer, count, seed=sum(model.encode()))

    def _model(self, name: str) -> Any:
        # The larger model runs in bf16, which halves the time.
        kind = torch.bfloat16 if name == "smollm2" else torch.float32
        return transformers.AutoModelForCausalLM.from_pretrained(self._models / name, dtype=kind).eval()

    def _reader(self, name: str) -> Reader:
        folder = self._models / name
        if not (folder / "config.json").exists():
            raise FileNotFoundError(f"no model in {folder}: build it with `python tools/models.py {name}`")
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        return Reader(tokenizer, int(transformers.AutoConfig.from_pretrained(folder).vocab_size))
