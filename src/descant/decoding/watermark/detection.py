"""Detection: whether a text carries a mark, how sure that is, and when it cannot be told.

A wrong answer accuses somebody. So every p-value is exact or too large, and every choice that was made by
looking at the evidence (of a key, a nonce, a reading, a window) is paid for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from descant.decoding.watermark.retokenize import Offsets, Reading, reach_of, readings_of
from descant.decoding.watermark.scan import Window, edges, scan
from descant.decoding.watermark.scheme_factory import schemes_of, vocabulary_of
from descant.decoding.watermark.schemes import GumbelWatermarkingConfig, Settings, WatermarkingConfig
from descant.decoding.watermark.schemes.keys import fingerprint, warn_if_public
from descant.decoding.watermark.scores import Array, Evidence, Scheme
from descant.decoding.watermark.statistics import (
    CORRECTIONS,
    adjusted,
    gamma_interval,
    mean_interval,
    needed,
    proportion_interval,
)
from descant.errors import InputError

__all__ = ["MARKED", "NOT_MARKED", "TOO_SHORT", "Detection", "Detector"]

MARKED: Final = "marked"
NOT_MARKED: Final = "not marked"
TOO_SHORT: Final = "too short to tell"


@dataclass(frozen=True, eq=False)
class Detection:
    """What is said of one text and one key, and what it rests on.

    `scored`, `score`, `interval` and `z` are those of the marked passage, or of the whole text where none was
    found. "not marked" speaks of the whole text: a few marked words inside it are never excluded.
    """

    verdict: str  # "marked", "not marked" or "too short to tell"
    scheme: str
    key: str  # its name, never the key
    tokens: int  # of the text, its prompt left aside
    scored: int
    score: float  # mean value of the scored tokens; nan: there are none
    expected: float  # that of unmarked text
    interval: tuple[float, float]  # 95 % confidence interval of the score
    z: float
    p_value: float  # corrected for all tests made
    uncorrected: float  # of the best test
    tests: int  # what it was multiplied by
    alpha: float
    span: tuple[int, int] | None  # tokens of the marked passage, if windows were asked for
    characters: tuple[int, int] | None  # the same in the text
    ids: tuple[int, ...]  # of the text, in the reading that fits best
    evidence: Evidence  # of these tokens
    offsets: Offsets | None  # of these tokens in the text
    nonce: int | None = None  # of the sequence, for a mark that has one
    needed: int | None = None  # if too short: how many scored tokens show even a weak mark 9 times in 10

    @property
    def marked(self) -> bool:
        """Whether a mark was found."""
        return self.verdict == MARKED

    def to_dict(self, tokens: bool = False) -> dict[str, Any]:
        """All of it as JSON knows it (None for what is no finite number), each token's evidence if asked."""
        out: dict[str, Any] = {
            "verdict": self.verdict,
            "scheme": self.scheme,
            "key": self.key,
            "nonce": self.nonce,
            "tokens": self.tokens,
            "scored": self.scored,
            "score": _finite(self.score),
            "expected": self.expected,
            "interval": [_finite(self.interval[0]), _finite(self.interval[1])],
            "z": self.z,
            "p_value": self.p_value,
            "uncorrected": self.uncorrected,
            "tests": self.tests,
            "alpha": self.alpha,
            "span": None if self.span is None else list(self.span),
            "characters": None if self.characters is None else list(self.characters),
            "needed": self.needed,
        }
        if tokens:
            out["ids"] = list(self.ids)
            out["offsets"] = None if self.offsets is None else [list(pair) for pair in self.offsets]
            out["evidence"] = [
                float(value) if scored else None
                for scored, value in zip(self.evidence.scored, self.evidence.value, strict=True)
            ]
        return out

    def __str__(self) -> str:
        found = f"{self.verdict} ({self.scheme}, key {self.key}): "
        if not self.scored:
            return found + f"none of {self.tokens} tokens can be scored"
        found += f"{self.scored} of {self.tokens} tokens scored, mean {self.score:.3f} "
        found += f"where unmarked text has {self.expected:.3f}, p = {self.p_value:.2g}"
        if self.verdict == TOO_SHORT and self.needed is not None:
            found += f"; about {self.needed} would tell"
        return found


class _Test(NamedTuple):
    """One scheme's question to one reading."""

    scheme: Scheme
    reading: Reading
    evidence: Evidence
    windows: list[Window]  # the whole text first

    @property
    def best(self) -> Window:
        return min(self.windows, key=lambda one: one.corrected)


class _Tried(NamedTuple):
    """All that was tried for one key, and what comes of it."""

    name: str
    tests: list[_Test]
    p_value: float
    factor: int  # by which a text's own p-value was multiplied

    @property
    def test(self) -> _Test:
        return min(self.tests, key=lambda one: one.best.corrected)


class Detector:
    """Whoever has the keys asks it whether a text is marked with one of them.

    `keys` are one watermark's settings, several, or several by name; a key without a name goes by its
    fingerprint. `vocabulary` is how many tokens the marking model scores, or that model, or its config.
    `alpha` is how often unmarked text may be called marked, all keys and all else that is tried together.
    """

    def __init__(
        self,
        keys: Settings | Mapping[str, Settings] | Sequence[Settings],
        vocabulary: Any,
        tokenizer: Any = None,
        *,
        alpha: float = 0.01,
        correction: str = "holm",
    ) -> None:
        if not 0.0 < alpha < 1.0:
            raise InputError("alpha", "must lie between 0 and 1", alpha)
        if correction not in CORRECTIONS:
            raise InputError("correction", f"must be one of {', '.join(CORRECTIONS)}", correction)
        self.vocabulary = vocabulary_of(vocabulary)
        self.tokenizer = tokenizer
        self.alpha = float(alpha)
        self.correction = correction
        self.keys = _named(keys)
        for settings in self.keys.values():
            warn_if_public(settings)
        self._schemes = {name: schemes_of(one, self.vocabulary) for name, one in self.keys.items()}

    def ids(self, ids: Any, *, prompt: int = 0, windows: bool = False) -> Detection:
        """The answer about one text's token ids [L], the first `prompt` of which are only context."""
        return self._best(self._tried(_array(ids), prompt, windows))

    def text(self, text: str, *, prompt: str | None = None, windows: bool = False) -> Detection:
        """The answer about a text, read as tokens again; its `prompt` may be its beginning or be left out."""
        if not isinstance(text, str):
            raise InputError("text", "must be a string", text, "give token ids to `ids`")
        return self._best(self._tried(text, prompt, windows))

    def each(self, given: Any, *, prompt: Any = None, windows: bool = False) -> list[Detection]:
        """The answers about a text, or about its token ids, one for every key, corrected for their number."""
        tried = self._tried(given if isinstance(given, str) else _array(given), prompt, windows)
        return [self._answer(one) for one in tried]

    # ------------------------------------------------------------------------------- testing
    def _tried(self, given: str | Array, prompt: Any, windows: bool) -> list[_Tried]:
        """What was tried for each key; all have the same share of the error, however much they tried."""
        every = []
        read: dict[tuple[int, int], list[Reading]] = {}  # once for all keys that ask alike
        for schemes in self._schemes.values():
            shape = schemes[0].width, reach_of(schemes[0])
            if shape not in read:
                read[shape] = self._readings(given, prompt, schemes[0])
            every.append([_tested(scheme, one, windows) for one in read[shape] for scheme in schemes])
        raw = [len(tests) * min(one.best.corrected for one in tests) for tests in every]
        final = adjusted([min(1.0, p) for p in raw], self.correction)
        order = sorted(range(len(raw)), key=lambda at: raw[at])
        out = []
        for at, (name, tests) in enumerate(zip(self._schemes, every, strict=True)):
            rivals = len(every) - (order.index(at) if self.correction == "holm" else 0)
            out.append(_Tried(name, tests, final[at], len(tests) * rivals))
        return out

    def _readings(self, given: str | Array, prompt: Any, scheme: Scheme) -> list[Reading]:
        if isinstance(given, str):
            if self.tokenizer is None:
                do = "give one to Detector, or token ids to `ids`"
                raise InputError("tokenizer", "is needed to read a text", None, do)
            if prompt is not None and not isinstance(prompt, str):
                raise InputError("prompt", "must be a string, as the text is", prompt)
            readings = readings_of(self.tokenizer, given, prompt, scheme)
            for one in readings:
                self._checked(np.asarray(one.context + one.ids, np.int64))
            return readings
        ids = self._checked(given)
        count = 0 if prompt is None else prompt
        if type(count) is not int or not 0 <= count <= len(ids):
            raise InputError("prompt", f"must be a number of tokens between 0 and {len(ids)}", prompt)
        return [Reading(tuple(ids.tolist()), prompt=count)]

    def _checked(self, ids: Array) -> Array:
        strange = ids[(ids < 0) | (ids >= self.vocabulary)]
        if len(strange):
            must = f"must lie between 0 and {self.vocabulary - 1}"
            raise InputError("ids", must, int(strange[0]), "is the tokenizer another model's?")
        return ids

    # ----------------------------------------------------------------------------- answering
    def _best(self, tried: list[_Tried]) -> Detection:
        # Where all are 1 after the correction, what they were before it still tells them apart.
        return self._answer(min(tried, key=lambda one: (one.p_value, one.test.best.corrected * one.factor)))

    def _answer(self, tried: _Tried) -> Detection:
        test = tried.test
        best = told = test.best
        marked = tried.p_value <= self.alpha
        if not marked:
            test = min(tried.tests, key=lambda one: one.windows[0].p)
            told = test.windows[0]
        scheme, reading, evidence = test.scheme, test.reading, test.evidence
        values = evidence.value[evidence.scored][told.first : told.stop]
        count = len(values)
        interval = _interval(scheme, values)
        verdict = MARKED if marked else NOT_MARKED if interval[1] < scheme.weakest else TOO_SHORT
        span = edges(scheme, evidence, told, reading.prompt) if marked and len(test.windows) > 1 else None
        enough = None
        if verdict == TOO_SHORT:
            enough = needed(scheme, scheme.weakest, self.alpha / (told.tests * tried.factor))
            # One in ten falls short of it, and to such a text it says nothing.
            enough = enough if enough is not None and enough > count else None
        return Detection(
            verdict=verdict,
            scheme=scheme.name,
            key=tried.name,
            tokens=len(reading.ids) - reading.prompt,
            scored=count,
            score=told.total / count if count else math.nan,
            expected=scheme.mean,
            interval=interval,
            z=(told.total - count * scheme.mean) / (scheme.sd * math.sqrt(count)) if count else 0.0,
            p_value=tried.p_value,
            uncorrected=best.p,
            tests=best.tests * tried.factor,
            alpha=self.alpha,
            span=span,
            characters=_characters(span, reading.offsets),
            ids=reading.ids,
            evidence=evidence,
            offsets=reading.offsets,
            nonce=getattr(scheme, "nonce", None),
            needed=enough,
        )


def _named(keys: Settings | Mapping[str, Settings] | Sequence[Settings]) -> dict[str, Settings]:
    given: list[Any] = (
        [keys] if isinstance(keys, Settings) else list(keys) if isinstance(keys, Sequence) else []
    )
    named: dict[str, Any] = dict(keys) if isinstance(keys, Mapping) else {}
    if not (given or named) or not all(isinstance(one, Settings) for one in (*given, *named.values())):
        kind = type(keys).__name__  # what it holds may be a key, which no error may show
        raise InputError("keys", "must be one watermark's settings or several", kind)
    for one in given:  # the same twice would be one test made twice; the same key used otherwise is another
        name = fingerprint(one)
        again = (f"{name}-{count}" for count in itertools.count(2))
        while named.get(name, one) != one:
            name = next(again)
        named[name] = one
    return named


def _array(given: Any) -> Array:
    """One text's token ids from a list or a tensor."""
    listed = given.tolist() if hasattr(given, "tolist") else given
    plain = [one.item() if hasattr(one, "item") else one for one in listed] if _rowlike(listed) else [None]
    if not all(type(one) is int for one in plain):
        raise InputError("ids", "must be one text's token ids, whole numbers in a row", given)
    return np.asarray(plain, np.int64)


def _rowlike(given: Any) -> bool:
    return isinstance(given, list | tuple)


def _tested(scheme: Scheme, reading: Reading, windows: bool) -> _Test:
    evidence = _evidence(scheme, reading)
    return _Test(scheme, reading, evidence, scan(scheme, evidence.value[evidence.scored], windows))


def _evidence(scheme: Scheme, reading: Reading) -> Evidence:
    """What a reading's tokens say; those of its prompt, nothing."""
    # No more of the prompt than the mark reaches, or what occurs there too would not be scored afterwards.
    known = reading.before(reach_of(scheme))
    run = np.asarray(known + reading.ids[reading.prompt :], np.int64)
    scored, value = np.zeros(len(reading.ids), bool), np.zeros(len(reading.ids))
    if len(run) > scheme.width:
        found = scheme.evidence(run)
        scored[reading.prompt :] = found.scored[len(known) :]
        value[reading.prompt :] = np.where(found.scored, found.value, 0.0)[len(known) :]
    return Evidence(scored, value)


def _interval(scheme: Scheme, values: Array) -> tuple[float, float]:
    """The 95 % confidence interval of the mean value: exact for counts, safe for the others."""
    if isinstance(scheme.settings, WatermarkingConfig):
        return proportion_interval(len(values), round(float(values.sum())))
    if isinstance(scheme.settings, GumbelWatermarkingConfig):
        return gamma_interval(len(values), float(values.sum()))
    low, high = mean_interval(values, scheme.sd)
    return max(0.0, low), min(1.0, high)


def _characters(span: tuple[int, int] | None, offsets: Offsets | None) -> tuple[int, int] | None:
    if span is None or offsets is None:
        return None
    return offsets[span[0]][0], offsets[span[1] - 1][1]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
