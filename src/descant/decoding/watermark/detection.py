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

from descant.decoding.watermark.retokenize import Offsets, Retokenization, prompt_reach, retokenizations
from descant.decoding.watermark.scan import ScoreWindow, passage_edges, scan_windows
from descant.decoding.watermark.scheme_factory import build_schemes, resolve_vocab_size
from descant.decoding.watermark.schemes import (
    BaseWatermarkingConfig,
    GumbelWatermarkingConfig,
    WatermarkingConfig,
)
from descant.decoding.watermark.schemes.keys import fingerprint, warn_if_public
from descant.decoding.watermark.scores import Array, TokenScores, WatermarkScheme
from descant.decoding.watermark.statistics import (
    CORRECTIONS,
    adjust_p_values,
    gamma_interval,
    mean_interval,
    proportion_interval,
    required_tokens,
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
    evidence: TokenScores  # of these tokens
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
            "score": _finite_or_none(self.score),
            "expected": self.expected,
            "interval": [_finite_or_none(self.interval[0]), _finite_or_none(self.interval[1])],
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
                for scored, value in zip(self.evidence.mask, self.evidence.values, strict=True)
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


class _SchemeTest(NamedTuple):
    """One scheme's question to one reading."""

    scheme: WatermarkScheme
    retokenization: Retokenization
    scores: TokenScores
    windows: list[ScoreWindow]  # the whole text first

    @property
    def best_window(self) -> ScoreWindow:
        return min(self.windows, key=lambda one: one.corrected_p_value)


class _KeyTests(NamedTuple):
    """All that was tried for one key, and what comes of it."""

    name: str
    tests: list[_SchemeTest]
    p_value: float
    correction_factor: int  # by which a text's own p-value was multiplied

    @property
    def best_test(self) -> _SchemeTest:
        return min(self.tests, key=lambda one: one.best_window.corrected_p_value)


class Detector:
    """Whoever has the keys asks it whether a text is marked with one of them.

    `keys` are one watermark's settings, several, or several by name; a key without a name goes by its
    fingerprint. `vocabulary` is how many tokens the marking model scores, or that model, or its config.
    `alpha` is how often unmarked text may be called marked, all keys and all else that is tried together.
    """

    def __init__(
        self,
        keys: BaseWatermarkingConfig
        | Mapping[str, BaseWatermarkingConfig]
        | Sequence[BaseWatermarkingConfig],
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
        self.vocab_size = resolve_vocab_size(vocabulary)
        self.tokenizer = tokenizer
        self.alpha = float(alpha)
        self.correction = correction
        self.keys = _name_keys(keys)
        for settings in self.keys.values():
            warn_if_public(settings)
        self._schemes = {name: build_schemes(one, self.vocab_size) for name, one in self.keys.items()}

    def ids(self, ids: Any, *, prompt: int = 0, windows: bool = False) -> Detection:
        """The answer about one text's token ids [L], the first `prompt` of which are only context."""
        return self._best_detection(self._run_tests(_to_id_array(ids), prompt, windows))

    def text(self, text: str, *, prompt: str | None = None, windows: bool = False) -> Detection:
        """The answer about a text, read as tokens again; its `prompt` may be its beginning or be left out."""
        if not isinstance(text, str):
            raise InputError("text", "must be a string", text, "give token ids to `ids`")
        return self._best_detection(self._run_tests(text, prompt, windows))

    def each(self, given: Any, *, prompt: Any = None, windows: bool = False) -> list[Detection]:
        """The answers about a text, or about its token ids, one for every key, corrected for their number."""
        tried = self._run_tests(given if isinstance(given, str) else _to_id_array(given), prompt, windows)
        return [self._make_detection(one) for one in tried]

    # ------------------------------------------------------------------------------- testing
    def _run_tests(self, given: str | Array, prompt: Any, windows: bool) -> list[_KeyTests]:
        """What was tried for each key; all have the same share of the error, however much they tried."""
        every = []
        read: dict[tuple[int, int], list[Retokenization]] = {}  # once for all keys that ask alike
        for schemes in self._schemes.values():
            shape = schemes[0].context_size, prompt_reach(schemes[0])
            if shape not in read:
                read[shape] = self._retokenize(given, prompt, schemes[0])
            every.append([_run_test(scheme, one, windows) for one in read[shape] for scheme in schemes])
        raw = [len(tests) * min(one.best_window.corrected_p_value for one in tests) for tests in every]
        final = adjust_p_values([min(1.0, p) for p in raw], self.correction)
        order = sorted(range(len(raw)), key=lambda at: raw[at])
        out = []
        for at, (name, tests) in enumerate(zip(self._schemes, every, strict=True)):
            rivals = len(every) - (order.index(at) if self.correction == "holm" else 0)
            out.append(_KeyTests(name, tests, final[at], len(tests) * rivals))
        return out

    def _retokenize(self, given: str | Array, prompt: Any, scheme: WatermarkScheme) -> list[Retokenization]:
        if isinstance(given, str):
            if self.tokenizer is None:
                do = "give one to Detector, or token ids to `ids`"
                raise InputError("tokenizer", "is needed to read a text", None, do)
            if prompt is not None and not isinstance(prompt, str):
                raise InputError("prompt", "must be a string, as the text is", prompt)
            readings = retokenizations(self.tokenizer, given, prompt, scheme)
            for one in readings:
                self._check_ids(np.asarray(one.context + one.ids, np.int64))
            return readings
        ids = self._check_ids(given)
        count = 0 if prompt is None else prompt
        if type(count) is not int or not 0 <= count <= len(ids):
            raise InputError("prompt", f"must be a number of tokens between 0 and {len(ids)}", prompt)
        return [Retokenization(tuple(ids.tolist()), prompt_length=count)]

    def _check_ids(self, ids: Array) -> Array:
        strange = ids[(ids < 0) | (ids >= self.vocab_size)]
        if len(strange):
            must = f"must lie between 0 and {self.vocab_size - 1}"
            raise InputError("ids", must, int(strange[0]), "is the tokenizer another model's?")
        return ids

    # ----------------------------------------------------------------------------- answering
    def _best_detection(self, tried: list[_KeyTests]) -> Detection:
        # Where all are 1 after the correction, what they were before it still tells them apart.
        return self._make_detection(
            min(
                tried,
                key=lambda one: (
                    one.p_value,
                    one.best_test.best_window.corrected_p_value * one.correction_factor,
                ),
            )
        )

    def _make_detection(self, tried: _KeyTests) -> Detection:
        test = tried.best_test
        best = told = test.best_window
        marked = tried.p_value <= self.alpha
        if not marked:
            test = min(tried.tests, key=lambda one: one.windows[0].p_value)
            told = test.windows[0]
        scheme, reading, evidence = test.scheme, test.retokenization, test.scores
        values = evidence.values[evidence.mask][told.first : told.stop]
        count = len(values)
        interval = _confidence_interval(scheme, values)
        verdict = MARKED if marked else NOT_MARKED if interval[1] < scheme.min_marked_mean else TOO_SHORT
        span = (
            passage_edges(scheme, evidence, told, reading.prompt_length)
            if marked and len(test.windows) > 1
            else None
        )
        enough = None
        if verdict == TOO_SHORT:
            enough = required_tokens(
                scheme, scheme.min_marked_mean, self.alpha / (told.num_tests * tried.correction_factor)
            )
            # One in ten falls short of it, and to such a text it says nothing.
            enough = enough if enough is not None and enough > count else None
        return Detection(
            verdict=verdict,
            scheme=scheme.name,
            key=tried.name,
            tokens=len(reading.ids) - reading.prompt_length,
            scored=count,
            score=told.total / count if count else math.nan,
            expected=scheme.null_mean,
            interval=interval,
            z=(told.total - count * scheme.null_mean) / (scheme.null_std * math.sqrt(count))
            if count
            else 0.0,
            p_value=tried.p_value,
            uncorrected=best.p_value,
            tests=best.num_tests * tried.correction_factor,
            alpha=self.alpha,
            span=span,
            characters=_character_span(span, reading.offsets),
            ids=reading.ids,
            evidence=evidence,
            offsets=reading.offsets,
            nonce=getattr(scheme, "nonce", None),
            needed=enough,
        )


def _name_keys(
    keys: BaseWatermarkingConfig | Mapping[str, BaseWatermarkingConfig] | Sequence[BaseWatermarkingConfig],
) -> dict[str, BaseWatermarkingConfig]:
    given: list[Any] = (
        [keys]
        if isinstance(keys, BaseWatermarkingConfig)
        else list(keys)
        if isinstance(keys, Sequence)
        else []
    )
    named: dict[str, Any] = dict(keys) if isinstance(keys, Mapping) else {}
    if not (given or named) or not all(
        isinstance(one, BaseWatermarkingConfig) for one in (*given, *named.values())
    ):
        kind = type(keys).__name__  # what it holds may be a key, which no error may show
        raise InputError("keys", "must be one watermark's settings or several", kind)
    for one in given:  # the same twice would be one test made twice; the same key used otherwise is another
        name = fingerprint(one)
        again = (f"{name}-{count}" for count in itertools.count(2))
        while named.get(name, one) != one:
            name = next(again)
        named[name] = one
    return named


def _to_id_array(given: Any) -> Array:
    """One text's token ids from a list or a tensor."""
    listed = given.tolist() if hasattr(given, "tolist") else given
    plain = (
        [one.item() if hasattr(one, "item") else one for one in listed] if _is_sequence(listed) else [None]
    )
    if not all(type(one) is int for one in plain):
        raise InputError("ids", "must be one text's token ids, whole numbers in a row", given)
    return np.asarray(plain, np.int64)


def _is_sequence(given: Any) -> bool:
    return isinstance(given, list | tuple)


def _run_test(scheme: WatermarkScheme, reading: Retokenization, windows: bool) -> _SchemeTest:
    evidence = _score_text(scheme, reading)
    return _SchemeTest(
        scheme, reading, evidence, scan_windows(scheme, evidence.values[evidence.mask], windows)
    )


def _score_text(scheme: WatermarkScheme, reading: Retokenization) -> TokenScores:
    """What a reading's tokens say; those of its prompt, nothing."""
    # No more of the prompt than the mark reaches, or what occurs there too would not be scored afterwards.
    known = reading.last_prefix_ids(prompt_reach(scheme))
    run = np.asarray(known + reading.ids[reading.prompt_length :], np.int64)
    scored, value = np.zeros(len(reading.ids), bool), np.zeros(len(reading.ids))
    if len(run) > scheme.context_size:
        found = scheme.score_tokens(run)
        scored[reading.prompt_length :] = found.mask[len(known) :]
        value[reading.prompt_length :] = np.where(found.mask, found.values, 0.0)[len(known) :]
    return TokenScores(scored, value)


def _confidence_interval(scheme: WatermarkScheme, values: Array) -> tuple[float, float]:
    """The 95 % confidence interval of the mean value: exact for counts, safe for the others."""
    if isinstance(scheme.settings, WatermarkingConfig):
        return proportion_interval(len(values), round(float(values.sum())))
    if isinstance(scheme.settings, GumbelWatermarkingConfig):
        return gamma_interval(len(values), float(values.sum()))
    low, high = mean_interval(values, scheme.null_std)
    return max(0.0, low), min(1.0, high)


def _character_span(span: tuple[int, int] | None, offsets: Offsets | None) -> tuple[int, int] | None:
    if span is None or offsets is None:
        return None
    return offsets[span[0]][0], offsets[span[1] - 1][1]


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
