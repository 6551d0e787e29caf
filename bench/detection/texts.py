"""The texts that are tested: written by people, by models without a mark, and by models with one."""

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
from bench.detection.marks import MARKS, own
from bench.detection.store import Store
from descant.config.generation_config import GenerationConfig

__all__ = ["NONE", "Batch", "Library", "Reader", "Text", "batches"]

NONE = "none"  # the mark of unmarked texts
HUMAN, SAMPLED = "human", "sampled"
_PROMPT = {"smollm2": prompts.chat, "minimind2-small": prompts.chat, "stories15m": prompts.story}
_DRAWN = {"do_sample": True, "temperature": 1.0, "top_k": 50}
_WAYS: Mapping[str, Mapping[str, Any]] = {
    SAMPLED: _DRAWN,
    "beams": {"num_beams": 4, "do_sample": False},
    "sampled beams": {"num_beams": 4, **_DRAWN},
    "lookup": {"prompt_lookup_num_tokens": 5, **_DRAWN},
}


@dataclass(frozen=True)
class Text:
    """One text: its tokens, their text, and which key marks it if any."""

    model: str  # whose tokens they are
    mark: str
    way: str  # HUMAN or how it was decoded
    place: int  # among those of its model, mark and way
    ids: list[int]
    text: str

    @property
    def tag(self) -> tuple[str, str, int]:
        """What draws its keys."""
        return self.model, self.way, self.place


@dataclass(frozen=True)
class Batch:
    """Texts that are made together."""

    model: str
    mark: str
    way: str
    number: int
    size: int
    length: int = LENGTH  # new tokens of each

    @property
    def name(self) -> str:
        """The unit of the store."""
        return f"texts/{self.mark}/{self.label}"

    @property
    def label(self) -> str:
        """What tells it apart from the others of its mark."""
        return f"{self.way.replace(' ', '-')}-{self.model}-{self.number}"


def batches(scale: float) -> Iterator[Batch]:
    """All batches, in the order in which they are made; a slice has none of the larger model."""
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
    for mark, way in (("lefthash", "beams"), ("lefthash", "sampled beams"), ("selfhash", "beams")):
        yield from _several("stories15m", mark, way, max(1, round(4 * scale)), 16)


def _several(model: str, mark: str, way: str, count: int, size: int) -> Iterator[Batch]:
    return (Batch(model, mark, way, number, size) for number in range(count))


@dataclass(frozen=True)
class Reader:
    """A model's tokenizer, and how many tokens its logits have."""

    tokenizer: Any
    vocabulary: int

    def text(self, ids: list[int]) -> str:
        """What a reader of the tokens sees."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


class Library:
    """All texts, made when they are asked for and kept in a store."""

    def __init__(self, store: Store, models: Path) -> None:
        self.store, self._models = store, models
        self._loaded: Callable[[str], Any] = functools.lru_cache(maxsize=1)(self._model)
        self.reader: Callable[[str], Reader] = functools.cache(self._reader)
        self._human: Callable[[str, int], list[list[int]]] = functools.cache(self._pieces)

    def texts(self, batch: Batch) -> list[Text]:
        """The texts of a batch."""
        rows = self.store.get(batch.name, lambda: self.made(batch))
        reader, first = self.reader(batch.model), batch.number * batch.size
        return [
            Text(batch.model, batch.mark, batch.way, first + at, ids, reader.text(ids))
            for at, ids in enumerate(rows)
        ]

    def made(self, batch: Batch) -> list[list[int]]:
        """The tokens of its texts, decoded now."""
        first = batch.number * batch.size
        if batch.way == HUMAN:
            return self._human(batch.model, first + batch.size)[first:]
        tokenizer = self.reader(batch.model).tokenizer
        places = range(first, first + batch.size)
        begun = [_PROMPT[batch.model](tokenizer, place) for place in places]
        count = {"max_new_tokens": batch.length, "min_new_tokens": batch.length}
        fields: dict[str, Any] = {**_WAYS[batch.way], **count}
        configs = [
            GenerationConfig(**fields, watermarking_config=self._settings(batch, place)) for place in places
        ]
        wide = max(map(len, begun))
        ids = torch.tensor([[0] * (wide - len(one)) + one for one in begun])
        mask = torch.tensor([[0] * (wide - len(one)) + [1] * len(one) for one in begun])
        model = self._loaded(batch.model)
        seeds = [1000 * batch.number + place for place in places]
        out = descant.generate(model, ids, attention_mask=mask, generation_config=configs, seed=seeds)
        assert isinstance(out, torch.Tensor)
        new = out[:, wide:]
        if new.shape != (batch.size, batch.length):
            asked = f"{batch.size} texts of {batch.length} tokens"
            raise RuntimeError(f"{batch.name} must be {asked}, got {list(new.shape)}")
        return [list(map(int, row)) for row in new]

    def _settings(self, batch: Batch, place: int) -> Any:
        return None if batch.mark == NONE else own(batch.mark, batch.model, batch.way, place)

    def _pieces(self, model: str, count: int) -> list[list[int]]:
        # Each model's tokenizer cuts other files.
        return pieces(self.reader(model).tokenizer, count, seed=sum(model.encode()))

    def _model(self, name: str) -> Any:
        # The larger model in the precision in which such are served, which halves the time.
        kind = torch.bfloat16 if name == "smollm2" else torch.float32
        return transformers.AutoModelForCausalLM.from_pretrained(self._models / name, dtype=kind).eval()

    def _reader(self, name: str) -> Reader:
        folder = self._models / name
        if not (folder / "config.json").exists():
            raise FileNotFoundError(f"no model in {folder}: build it with `python tools/models.py {name}`")
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        return Reader(tokenizer, int(transformers.AutoConfig.from_pretrained(folder).vocab_size))
