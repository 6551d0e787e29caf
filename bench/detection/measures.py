"""The units of work: texts are generated, then tested; the scores are stored."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from bench.detection.bayes import compare_detectors
from bench.detection.edits import KINDS, SHARES, edit_text
from bench.detection.marks import MARKS, marking_config, unrelated_config
from bench.detection.texts import NONE, SAMPLED, Batch, Library, Text
from bench.detection.trial import score_ids, score_text
from descant.config.watermarking_config import BaseWatermarkingConfig, GumbelWatermarkingConfig

__all__ = ["LENGTHS", "STAGES", "Measures", "Unit"]

LENGTHS = (50, 100, 200)  # tested tokens of a text
STAGES = ("texts", "false", "alone", "true", "edits", "bayes")
_TEXT_KEYS = 10  # keys per unmarked text when testing text without token ids


class Unit(NamedTuple):
    """One file of the store, and the function that computes it."""

    stage: str
    mark: str
    name: str
    make: Callable[[], Any]


@dataclass(frozen=True)
class Measures:
    """All units of the benchmark."""

    library: Library
    batches: Sequence[Batch]
    keys: int  # random keys per unmarked text

    def units(self) -> Iterator[Unit]:
        """All units, texts first."""
        for batch in self.batches:
            yield Unit("texts", batch.mark, batch.name, lambda b=batch: self.library.generate(b))
        for mark in MARKS:
            for batch in self.of(NONE):
                make = lambda m=mark, b=batch: self._false(m, b)  # noqa: E731
                yield Unit("false", mark, self.name("false", mark, batch), make)
                make = lambda m=mark, b=batch: self._text_only(m, b)  # noqa: E731
                yield Unit("alone", mark, self.name("alone", mark, batch), make)
        for mark in MARKS:
            for batch in self.of(mark):
                yield Unit("true", mark, self.name("true", mark, batch), lambda b=batch: self._true(b))
        for mark in MARKS:
            for batch in self.of(mark, SAMPLED):
                yield Unit("edits", mark, self.name("edits", mark, batch), lambda b=batch: self._edits(b))

        yield Unit("bayes", "synthid", self.name("bayes", "synthid"), self._bayes)

    def of(self, mark: str, method: str | None = None) -> list[Batch]:
        """The batches of a scheme, optionally of one decoding method."""
        return [one for one in self.batches if one.mark == mark and method in (None, one.method)]

    def name(self, stage: str, mark: str, batch: Batch | None = None) -> str:
        """The name of a unit in the store."""
        label = "all" if batch is None else batch.label
        suffix = {"false": f"-x{self.keys}", "alone": f"-x{min(self.keys, _TEXT_KEYS)}"}.get(stage, "")
        return f"{stage}/{mark}/{label}{suffix}"

    def _false(self, mark: str, batch: Batch) -> Any:
        """Unmarked texts with a random key per test."""
        reader = self.library.reader(batch.model)
        texts = self.library.texts(batch)
        tests: list[Any] = []
        for key in range(self.keys):  # the outer loop, since consecutive texts may share a key
            for text in texts:
                settings = unrelated_config(mark, *text.tag, key)
                one = _one_nonce(settings, key)
                tests.append(score_ids(one, reader.vocabulary, text.ids, LENGTHS))
        return {"ids": tests}

    def _text_only(self, mark: str, batch: Batch) -> Any:
        """The same texts with the first of these keys, tested without token ids."""
        reader = self.library.reader(batch.model)
        texts = self.library.texts(batch)
        keys = range(min(self.keys, _TEXT_KEYS))
        return {
            "text": [
                score_text(unrelated_config(mark, *text.tag, key), reader, text.text)
                for key in keys
                for text in texts
            ]
        }

    def _true(self, batch: Batch) -> Any:
        """Marked texts with their own keys."""
        reader = self.library.reader(batch.model)
        texts = [(marking_config(batch.mark, *text.tag), text) for text in self.library.texts(batch)]
        return {
            "ids": [score_ids(settings, reader.vocabulary, text.ids, LENGTHS) for settings, text in texts],
            "text": [score_text(settings, reader, text.text) for settings, text in texts],
        }

    def _edits(self, batch: Batch) -> Any:
        """Marked texts with their own keys after edits."""
        reader = self.library.reader(batch.model)
        texts = self.library.texts(batch)
        replacements = [word for text in texts for word in text.text.split()]
        return {
            f"{kind} {share}": [
                score_text(
                    marking_config(batch.mark, *text.tag), reader, _edit(text, kind, share, replacements)
                )
                for text in texts
            ]
            for kind in KINDS
            for share in SHARES
        }

    def _bayes(self) -> Any:
        """SynthID's trained detector."""
        marked = [text for batch in self.of("synthid", SAMPLED) for text in self.library.texts(batch)]
        unmarked = [text for batch in self.of(NONE) for text in self.library.texts(batch)]
        return compare_detectors(marked, unmarked, LENGTHS)


def _one_nonce(settings: BaseWatermarkingConfig, nonce: int) -> BaseWatermarkingConfig:
    """The same key with one nonce: testing all of them takes that many times as long."""
    return replace(settings, nonce=nonce) if isinstance(settings, GumbelWatermarkingConfig) else settings


def _edit(text: Text, kind: str, share: float, replacements: Sequence[str]) -> str:
    rng = random.Random(f"{text.tag}/{kind}/{share}")
    return edit_text(text.text, kind, share, replacements, rng)
