"""The work: texts made, then tested; what each test said is kept."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from bench.detection.bayes import compared
from bench.detection.edits import KINDS, SHARES, edited
from bench.detection.marks import MARKS, other, own
from bench.detection.texts import NONE, SAMPLED, Batch, Library, Text
from bench.detection.trial import of_ids, of_text
from descant.decoding.watermark.schemes import BaseWatermarkingConfig, GumbelWatermarkingConfig

__all__ = ["LENGTHS", "STAGES", "Measures", "Unit"]

LENGTHS = (50, 100, 200)  # tokens of a text that are tested
STAGES = ("texts", "false", "alone", "true", "edits", "bayes")
_READ = 10  # keys under which each unmarked text is tested from its text alone


class Unit(NamedTuple):
    """One file of the store, and how it is made."""

    stage: str
    mark: str
    name: str
    make: Callable[[], Any]


@dataclass(frozen=True)
class Measures:
    """All that is tested, and how."""

    library: Library
    batches: Sequence[Batch]
    keys: int  # random ones under which each unmarked text is tested

    def units(self) -> Iterator[Unit]:
        """All work, texts first."""
        for batch in self.batches:
            yield Unit("texts", batch.mark, batch.name, lambda b=batch: self.library.made(b))
        for mark in MARKS:
            for batch in self.of(NONE):
                make = lambda m=mark, b=batch: self._false(m, b)  # noqa: E731
                yield Unit("false", mark, self.name("false", mark, batch), make)
                make = lambda m=mark, b=batch: self._alone(m, b)  # noqa: E731
                yield Unit("alone", mark, self.name("alone", mark, batch), make)
        for mark in MARKS:
            for batch in self.of(mark):
                yield Unit("true", mark, self.name("true", mark, batch), lambda b=batch: self._true(b))
        for mark in MARKS:
            for batch in self.of(mark, SAMPLED):
                yield Unit("edits", mark, self.name("edits", mark, batch), lambda b=batch: self._edits(b))

        yield Unit("bayes", "synthid", self.name("bayes", "synthid"), self._bayes)

    def of(self, mark: str, way: str | None = None) -> list[Batch]:
        """The batches of a mark, or those of them that were written in one way."""
        return [one for one in self.batches if one.mark == mark and way in (None, one.way)]

    def name(self, stage: str, mark: str, batch: Batch | None = None) -> str:
        """The unit of the store."""
        label = "all" if batch is None else batch.label
        more = {"false": f"-x{self.keys}", "alone": f"-x{min(self.keys, _READ)}"}.get(stage, "")
        return f"{stage}/{mark}/{label}{more}"

    def _false(self, mark: str, batch: Batch) -> Any:
        """Unmarked texts under random keys, each test with its own."""
        reader = self.library.reader(batch.model)
        texts = self.library.texts(batch)
        tests: list[Any] = []
        for key in range(self.keys):  # the outer loop, since neighbours may share a key
            for text in texts:
                settings = other(mark, *text.tag, key)
                one = _one_nonce(settings, key)
                tests.append(of_ids(one, reader.vocabulary, text.ids, LENGTHS))
        return {"ids": tests}

    def _alone(self, mark: str, batch: Batch) -> Any:
        """The same texts, read by somebody who has nothing else, under the first of those keys."""
        reader = self.library.reader(batch.model)
        texts = self.library.texts(batch)
        turns = range(min(self.keys, _READ))
        return {
            "text": [
                of_text(other(mark, *text.tag, key), reader, text.text) for key in turns for text in texts
            ]
        }

    def _true(self, batch: Batch) -> Any:
        """Marked texts under their own keys."""
        reader = self.library.reader(batch.model)
        texts = [(own(batch.mark, *text.tag), text) for text in self.library.texts(batch)]
        return {
            "ids": [of_ids(settings, reader.vocabulary, text.ids, LENGTHS) for settings, text in texts],
            "text": [of_text(settings, reader, text.text) for settings, text in texts],
        }

    def _edits(self, batch: Batch) -> Any:
        """Marked texts under their own keys after somebody changed them."""
        reader = self.library.reader(batch.model)
        texts = self.library.texts(batch)
        others = [word for text in texts for word in text.text.split()]
        return {
            f"{kind} {share}": [
                of_text(own(batch.mark, *text.tag), reader, _changed(text, kind, share, others))
                for text in texts
            ]
            for kind in KINDS
            for share in SHARES
        }

    def _bayes(self) -> Any:
        """SynthID's trained detector."""
        marked = [text for batch in self.of("synthid", SAMPLED) for text in self.library.texts(batch)]
        unmarked = [text for batch in self.of(NONE) for text in self.library.texts(batch)]
        return compared(marked, unmarked, LENGTHS)


def _one_nonce(settings: BaseWatermarkingConfig, nonce: int) -> BaseWatermarkingConfig:
    """The same key with one nonce: a test of all of them takes as many times as long."""
    return replace(settings, nonce=nonce) if isinstance(settings, GumbelWatermarkingConfig) else settings


def _changed(text: Text, kind: str, share: float, others: Sequence[str]) -> str:
    chance = random.Random(f"{text.tag}/{kind}/{share}")
    return edited(text.text, kind, share, others, chance)
