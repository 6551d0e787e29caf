"""Watermark detection: whether a text is marked, with which confidence, or whether it is too short to tell.

A false positive accuses an author. So every p-value is exact or conservative, and every selection based on
the data (of a key, nonce, tokenization or window) is corrected for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np

from descant.core.interfaces import Array
from descant.decoding.watermark.padding import PaddingTokens
from descant.decoding.watermark.retokenize import Offsets, Retokenization, retokenizations
from descant.decoding.watermark.scan import ScoreWindow, passage_edges, scan_windows
from descant.decoding.watermark.scheme_factory import build_schemes, resolve_vocab_size
from descant.decoding.watermark.schemes import BaseWatermarkingConfig
from descant.decoding.watermark.schemes.keys import fingerprint, warn_if_public
from descant.decoding.watermark.scores import TokenScores, WatermarkScheme
from descant.decoding.watermark.statistics import CORRECTIONS, adjust_p_values, required_tokens
from descant.errors import InputError

__all__ = ["MARKED", "NOT_MARKED", "TOO_SHORT", "Detection", "Detector"]

MARKED: Final = "marked"
NOT_MARKED: Final = "not marked"
TOO_SHORT: Final = "too short to tell"


@dataclass(frozen=True, eq=False)
class Detection:
    """The verdict on one text and one key, with the statistics behind it.

    `scored`, `score`, `interval` and `z` refer to the marked passage, or to the whole text if none was found.
    "not marked" refers to the whole text: a few marked words inside it are never excluded.
    """

    verdict: str  # "marked", "not marked" or "too short to tell"
    scheme: str
    key: str  # name of the key, never the key itself
    tokens: int  # tokens of the text without its prompt
    scored: int
    score: float  # mean value of the scored tokens; nan if there are none
    expected: float  # mean value of unmarked text
    interval: tuple[float, float]  # 95 % confidence interval of the score
    z: float
    p_value: float  # corrected for all tests
    uncorrected: float  # p-value of the best test
    tests: int  # correction factor
    alpha: float
    span: tuple[int, int] | None  # tokens of the marked passage, if `windows` was set
    characters: tuple[int, int] | None  # characters of the marked passage
    ids: tuple[int, ...]  # tokens of the text in the best tokenization
    evidence: TokenScores  # scores of these tokens
    offsets: Offsets | None  # character offsets of these tokens
    nonce: int | None = None  # nonce of the sequence, for schemes that have one
    needed: int | None = None  # if too short: scored tokens that reveal even a weak watermark 9 times in 10

    @property
    def marked(self) -> bool:
        """Whether a watermark was found."""
        return self.verdict == MARKED

    def to_dict(self, tokens: bool = False) -> dict[str, Any]:
        """Return all fields as JSON types (None for non-finite numbers), per-token scores if `tokens`."""
        fields: dict[str, Any] = {
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
            fields["ids"] = list(self.ids)
            fields["offsets"] = None if self.offsets is None else [list(pair) for pair in self.offsets]
            fields["evidence"] = [
                float(value) if scored else None
                for scored, value in zip(self.evidence.mask, self.evidence.values, strict=True)
            ]
        return fields

    def __str__(self) -> str:
        text = f"{self.verdict} ({self.scheme}, key {self.key}): "
        if not self.scored:
            return text + f"none of {self.tokens} tokens can be scored"
        text += f"{self.scored} of {self.tokens} tokens scored, mean {self.score:.3f} "
        text += f"where unmarked text has {self.expected:.3f}, p = {self.p_value:.2g}"
        if self.verdict == TOO_SHORT and self.needed is not None:
            text += f"; about {self.needed} would tell"
        return text


class _SchemeTest(NamedTuple):
    """The test of one scheme on one tokenization."""

    scheme: WatermarkScheme
    retokenization: Retokenization
    scores: TokenScores
    windows: list[ScoreWindow]  # the whole text is the first

    @property
    def best_window(self) -> ScoreWindow:
        return min(self.windows, key=lambda window: window.corrected_p_value)


class _KeyTests(NamedTuple):
    """All tests of one key, and their corrected p-value."""

    name: str
    tests: list[_SchemeTest]
    p_value: float
    correction_factor: int  # of the best test's own p-value

    @property
    def best_test(self) -> _SchemeTest:
        return min(self.tests, key=lambda test: test.best_window.corrected_p_value)


class Detector:
    """Tests texts for the watermarks of one or more keys.

    `keys` are the settings of one watermark, several, or several by name; a key without a name is named by
    its fingerprint. `vocabulary` is the vocabulary size of the marking model, the model, or its config.
    Padding on the right of token ids is not scored: the pad token of the tokenizer or the model's config.
    `alpha` is the false positive rate over all keys and all other tests together.
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
            raise InputError("alpha", "must be between 0 and 1", alpha)
        if correction not in CORRECTIONS:
            raise InputError("correction", f"must be one of {', '.join(CORRECTIONS)}", correction)
        self.vocab_size = resolve_vocab_size(vocabulary)
        self.tokenizer = tokenizer
        self.alpha = float(alpha)
        self.correction = correction
        config = getattr(vocabulary, "config", vocabulary)
        self._padding = PaddingTokens.of(config if tokenizer is None else tokenizer)
        # Copies: the user may update the given settings.
        self.keys = {name: replace(settings) for name, settings in _name_keys(keys).items()}
        for settings in self.keys.values():
            warn_if_public(settings)
        self._schemes = {name: build_schemes(one, self.vocab_size) for name, one in self.keys.items()}

    def ids(self, ids: Any, *, prompt: int = 0, windows: bool = False) -> Detection:
        """Test one text's token ids [L], of which the first `prompt` are context only."""
        return self._best_detection(self._run_tests(_to_id_array(ids), prompt, windows))

    def text(self, text: str, *, prompt: str | None = None, windows: bool = False) -> Detection:
        """Test a text, tokenized again; `prompt` may be the beginning of the text or precede it."""
        if not isinstance(text, str):
            raise InputError("text", "must be a string", text, "pass token ids to `ids`")
        return self._best_detection(self._run_tests(text, prompt, windows))

    def each(self, given: Any, *, prompt: Any = None, windows: bool = False) -> list[Detection]:
        """Test a text or its token ids; return one detection per key, corrected for their number."""
        results = self._run_tests(given if isinstance(given, str) else _to_id_array(given), prompt, windows)
        return [self._make_detection(result) for result in results]

    # ------------------------------------------------------------------------------- testing
    def _run_tests(self, text: str | Array, prompt: Any, windows: bool) -> list[_KeyTests]:
        """Run all tests of each key; every key has the same share of the error rate."""
        tests_by_key = []
        # Shared by keys with the same context shape.
        tokenizations: dict[tuple[int, int], list[Retokenization]] = {}
        for schemes in self._schemes.values():
            shape = schemes[0].context_size, schemes[0].prompt_reach
            if shape not in tokenizations:
                tokenizations[shape] = self._retokenize(text, prompt, schemes[0])
            tests_by_key.append(
                [_run_test(scheme, tokens, windows) for tokens in tokenizations[shape] for scheme in schemes]
            )
        uncorrected = [
            len(tests) * min(test.best_window.corrected_p_value for test in tests) for tests in tests_by_key
        ]
        corrected = adjust_p_values([min(1.0, p) for p in uncorrected], self.correction)
        order = sorted(range(len(uncorrected)), key=lambda index: uncorrected[index])
        results = []
        for index, (name, tests) in enumerate(zip(self._schemes, tests_by_key, strict=True)):
            num_rivals = len(tests_by_key) - (order.index(index) if self.correction == "holm" else 0)
            results.append(_KeyTests(name, tests, corrected[index], len(tests) * num_rivals))
        return results

    def _retokenize(self, text: str | Array, prompt: Any, scheme: WatermarkScheme) -> list[Retokenization]:
        if isinstance(text, str):
            if self.tokenizer is None:
                do = "pass a tokenizer to Detector, or token ids to `ids`"
                raise InputError("tokenizer", "is required for text", None, do)
            if prompt is not None and not isinstance(prompt, str):
                raise InputError("prompt", "must be a string, like the text", prompt)
            candidates = retokenizations(self.tokenizer, text, prompt, scheme)
            for candidate in candidates:
                self._check_ids(np.asarray(candidate.context + candidate.ids, np.int64))
            return candidates
        ids = self._check_ids(text)
        ids = ids[: max(self._padding.text_span(ids)[1], prompt if type(prompt) is int else 0)]
        prompt_length = 0 if prompt is None else prompt
        if type(prompt_length) is not int or not 0 <= prompt_length <= len(ids):
            raise InputError("prompt", f"must be a number of tokens between 0 and {len(ids)}", prompt)
        return [Retokenization(tuple(ids.tolist()), prompt_length=prompt_length)]

    def _check_ids(self, ids: Array) -> Array:
        invalid = ids[(ids < 0) | (ids >= self.vocab_size)]
        if len(invalid):
            must = f"must be between 0 and {self.vocab_size - 1}"
            raise InputError("ids", must, int(invalid[0]), "check that the tokenizer belongs to the model")
        return ids

    # ----------------------------------------------------------------------------- detections
    def _best_detection(self, results: list[_KeyTests]) -> Detection:
        # If all corrected p-values are 1, the uncorrected ones break the tie.
        return self._make_detection(
            min(
                results,
                key=lambda result: (
                    result.p_value,
                    result.best_test.best_window.corrected_p_value * result.correction_factor,
                ),
            )
        )

    def _make_detection(self, result: _KeyTests) -> Detection:
        test = result.best_test
        best = window = test.best_window
        marked = result.p_value <= self.alpha
        if not marked:
            test = min(result.tests, key=lambda candidate: candidate.windows[0].p_value)
            window = test.windows[0]
        scheme, tokens, scores = test.scheme, test.retokenization, test.scores
        values = scores.values[scores.mask][window.first : window.stop]
        count = len(values)
        interval = scheme.confidence_interval(values)
        verdict = MARKED if marked else NOT_MARKED if interval[1] < scheme.min_marked_mean else TOO_SHORT
        span = (
            passage_edges(scheme, scores, window, tokens.prompt_length)
            if marked and len(test.windows) > 1
            else None
        )
        needed = None
        if verdict == TOO_SHORT:
            needed = required_tokens(
                scheme, scheme.min_marked_mean, self.alpha / (window.num_tests * result.correction_factor)
            )
            # One text in ten needs more; the number would not help a text that already has so many tokens.
            needed = needed if needed is not None and needed > count else None
        return Detection(
            verdict=verdict,
            scheme=scheme.name,
            key=result.name,
            tokens=len(tokens.ids) - tokens.prompt_length,
            scored=count,
            score=window.total / count if count else math.nan,
            expected=scheme.null_mean,
            interval=interval,
            z=(window.total - count * scheme.null_mean) / (scheme.null_std * math.sqrt(count))
            if count
            else 0.0,
            p_value=result.p_value,
            uncorrected=best.p_value,
            tests=best.num_tests * result.correction_factor,
            alpha=self.alpha,
            span=span,
            characters=_character_span(span, tokens.offsets),
            ids=tokens.ids,
            evidence=scores,
            offsets=tokens.offsets,
            nonce=scheme.nonce,
            needed=needed,
        )


def _name_keys(
    keys: BaseWatermarkingConfig | Mapping[str, BaseWatermarkingConfig] | Sequence[BaseWatermarkingConfig],
) -> dict[str, BaseWatermarkingConfig]:
    unnamed: list[Any] = (
        [keys]
        if isinstance(keys, BaseWatermarkingConfig)
        else list(keys)
        if isinstance(keys, Sequence)
        else []
    )
    named: dict[str, Any] = dict(keys) if isinstance(keys, Mapping) else {}
    if not (unnamed or named) or not all(
        isinstance(settings, BaseWatermarkingConfig) for settings in (*unnamed, *named.values())
    ):
        kind = type(keys).__name__  # the value may be a key, which errors must not show
        raise InputError("keys", "must be the settings of one or more watermarks", kind)
    # Duplicates would be tested twice; the same key with other settings is another test.
    for settings in unnamed:
        name = fingerprint(settings)
        numbered = (f"{name}-{count}" for count in itertools.count(2))
        while named.get(name, settings) != settings:
            name = next(numbered)
        named[name] = settings
    return named


def _to_id_array(ids: Any) -> Array:
    """Convert one text's token ids from a list or a tensor."""
    values = ids.tolist() if hasattr(ids, "tolist") else ids
    numbers = (
        [value.item() if hasattr(value, "item") else value for value in values]
        if _is_sequence(values)
        else [None]
    )
    if not all(type(value) is int for value in numbers):
        raise InputError("ids", "must be a one-dimensional sequence of token ids", ids)
    return np.asarray(numbers, np.int64)


def _is_sequence(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _run_test(scheme: WatermarkScheme, tokens: Retokenization, windows: bool) -> _SchemeTest:
    scores = _score_text(scheme, tokens)
    return _SchemeTest(scheme, tokens, scores, scan_windows(scheme, scores.values[scores.mask], windows))


def _score_text(scheme: WatermarkScheme, tokens: Retokenization) -> TokenScores:
    """Score the tokens of a tokenization; prompt tokens are not scored."""
    # Include no more of the prompt than a context can reach: n-grams that also occur in the prompt would not
    # be scored later.
    prefix = tokens.last_prefix_ids(scheme.prompt_reach)
    run = np.asarray(prefix + tokens.ids[tokens.prompt_length :], np.int64)
    scored, values = np.zeros(len(tokens.ids), bool), np.zeros(len(tokens.ids))
    if len(run) > scheme.context_size:
        result = scheme.score_tokens(run)
        scored[tokens.prompt_length :] = result.mask[len(prefix) :]
        values[tokens.prompt_length :] = np.where(result.mask, result.values, 0.0)[len(prefix) :]
    return TokenScores(scored, values)


def _character_span(span: tuple[int, int] | None, offsets: Offsets | None) -> tuple[int, int] | None:
    if span is None or offsets is None:
        return None
    return offsets[span[0]][0], offsets[span[1] - 1][1]


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
