"""Watermark detection: whether a text is marked, with which confidence, or whether it is too short to tell.

A false positive accuses an author. So every p-value is exact or conservative, and every selection based on
the data (of a key, nonce, tokenization or window) is corrected for.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np

from descant.config.watermarking_config import (
    BaseWatermarkingConfig,
    GumbelWatermarkingConfig,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from descant.core.interfaces import Array
from descant.decoding.processors.base import LogitsProcessor
from descant.decoding.watermark.green_list import GreenListScheme, WatermarkLogitsProcessor, config_vocab_size
from descant.decoding.watermark.gumbel import GumbelScheme, GumbelWatermarkLogitsProcessor
from descant.decoding.watermark.keys import fingerprint, warn_if_public
from descant.decoding.watermark.statistics import (
    CORRECTIONS,
    PaddingTokens,
    TokenScores,
    WatermarkScheme,
    adjust_p_values,
    required_tokens,
)
from descant.decoding.watermark.synthid import SynthIDScheme, SynthIDTextWatermarkLogitsProcessor
from descant.errors import InputError

# Imported from here, the settings know their processors: see `processor_factory` below.
__all__ = ["GumbelWatermarkingConfig", "SynthIDTextWatermarkingConfig", "WatermarkingConfig"]


def build_schemes(settings: BaseWatermarkingConfig, vocab_size: int) -> list[WatermarkScheme]:
    """Return the schemes to test for these settings: one, or one per possible nonce."""
    if isinstance(settings, WatermarkingConfig):
        return [GreenListScheme(settings, vocab_size)]
    if isinstance(settings, SynthIDTextWatermarkingConfig):
        return [SynthIDScheme(settings)]
    if isinstance(settings, GumbelWatermarkingConfig):
        nonces = range(settings.nonces) if settings.nonce is None else [settings.nonce]
        return [GumbelScheme(settings, nonce) for nonce in nonces]
    raise InputError("keys", "must be watermark settings", settings)


def resolve_vocab_size(vocabulary: Any) -> int:
    """Return the vocabulary size from a number, a model or its config."""
    if isinstance(vocabulary, int) and not isinstance(vocabulary, bool):
        if vocabulary < 1:
            raise InputError("vocabulary", "must be >= 1", vocabulary)
        return vocabulary
    size = config_vocab_size(getattr(vocabulary, "config", vocabulary))
    if size is None or size < 1:
        raise InputError("vocabulary", "must be a number, a model or a model's config", vocabulary)
    return size


def make_watermark_processor(
    settings: BaseWatermarkingConfig, vocab_size: int, device: Any
) -> LogitsProcessor:
    """The processor that marks text with these settings."""
    values = settings.to_dict()
    if isinstance(settings, WatermarkingConfig):
        return WatermarkLogitsProcessor(vocab_size, device, **values)
    if isinstance(settings, SynthIDTextWatermarkingConfig):
        return SynthIDTextWatermarkLogitsProcessor(**values, device=device)
    return GumbelWatermarkLogitsProcessor(**values)


BaseWatermarkingConfig.processor_factory = make_watermark_processor  # for `construct_processor`


_MIN_WINDOW_SIZE: Final = 16  # scored tokens; smaller windows could hardly outweigh the correction
_STEPS_PER_WINDOW: Final = 2  # windows overlap by half


class ScoreWindow(NamedTuple):
    """A run of scored tokens and its p-value in unmarked text."""

    first: int  # index among the scored tokens
    stop: int
    total: float
    p_value: float
    num_tests: int  # correction factor for all windows scanned

    @property
    def corrected_p_value(self) -> float:
        """The p-value corrected for the windows of this text; values above 1 still rank windows."""
        return self.p_value * self.num_tests


def window_grid(count: int) -> list[tuple[int, Array]]:
    """Return the window sizes for `count` scored tokens, largest first, with the starts of each size.

    The grid depends only on the number of tokens, never on their scores; otherwise the correction is invalid.
    """
    grid = [(count, np.zeros(1, np.int64))]
    size = 1 << max(count - 1, 0).bit_length() >> 1  # the largest power of two below `count`
    while size >= _MIN_WINDOW_SIZE:
        starts = np.arange(0, count - size + 1, size // _STEPS_PER_WINDOW)
        if starts[-1] != count - size:
            starts = np.append(starts, count - size)
        grid.append((size, starts))
        size //= 2
    return grid


def scan_windows(scheme: WatermarkScheme, values: Array, windows: bool) -> list[ScoreWindow]:
    """Return the most significant window of each size over the values [N]; the first is the whole text.

    Each size has the same share of the error rate, and each window the same share of its size's. A watermark
    over the whole text is only corrected for the number of sizes.
    """
    count = len(values)
    sums = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    grid = window_grid(count) if windows else [(count, np.zeros(1, np.int64))]
    best_windows = []
    for size, starts in grid:
        totals = sums[starts + size] - sums[starts]
        best = int(np.argmax(totals))  # windows of one size: the largest sum has the smallest p-value
        first = int(starts[best])
        # Summed again: differences of cumulative sums lose digits, and a lost tie makes the p-value too
        # small.
        total = float(values[first : first + size].sum())
        p = scheme.p_value(size, total) if size else 1.0
        best_windows.append(ScoreWindow(first, first + size, total, p, len(starts) * len(grid)))
    return best_windows


def passage_edges(
    scheme: WatermarkScheme, scores: TokenScores, window: ScoreWindow, earliest: int = 0
) -> tuple[int, int]:
    """Estimate where the passage of a window starts (at `earliest` or later) and ends.

    The maximum likelihood edges around the window's middle: tokens count by their distance from the midpoint
    between the means of unmarked text and of the window. The estimate has no error rate of its own.
    """
    positions = np.flatnonzero(scores.mask)
    values = scores.values[positions]
    mean = window.total / (window.stop - window.first)
    cumulative = np.concatenate([[0.0], np.cumsum(values - 0.5 * (scheme.null_mean + mean))])
    middle = (window.first + window.stop) // 2
    first = int(np.argmin(cumulative[: middle + 1]))
    stop = middle + 1 + int(np.argmax(cumulative[middle + 1 :]))
    # The first tokens of a passage are contexts only, so the passage starts `context_size` tokens earlier.
    begin = max(earliest, int(positions[first]) - scheme.context_size)
    return begin, int(positions[stop - 1]) + 1


Offsets = tuple[tuple[int, int], ...]

# A marked token adds about 0.15 nats of evidence (green list, default bias), and a second tokenization costs
# log 2 = 0.69 nats: with fewer new inputs it could not pay off even if it were right.
_MIN_NEW_NGRAMS: Final = 5
_WORD: Final = re.compile(r"\S+(?=\s)")
# Replacements by word processors and web pages, character by character.
_TYPOGRAPHY: Final = str.maketrans("\u2018\u2019\u201c\u201d\u00a0", "''\"\" ")


@dataclass(frozen=True)
class Retokenization:
    """A tokenization: `ids`, of which the first `prompt_length` are not scored, after `context`."""

    ids: tuple[int, ...]
    prompt_length: int = 0
    context: tuple[int, ...] = ()
    offsets: Offsets | None = None  # of each token in the text, if the tokenizer provides them

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """The tokens before the first scored one."""
        return self.context + self.ids[: self.prompt_length]

    def last_prefix_ids(self, reach: int) -> tuple[int, ...]:
        """The last `reach` prefix tokens, or fewer if there are fewer."""
        return self.prefix_ids[max(0, len(self.prefix_ids) - reach) :]

    def scored_ngrams(self, width: int, reach: int) -> set[tuple[int, ...]]:
        """The n-grams a scheme scores, with `width` context tokens and `reach` prompt tokens."""
        run = self.last_prefix_ids(reach) + self.ids[self.prompt_length :]
        return {run[end - width : end + 1] for end in range(width, len(run))}


def tokenize(tokenizer: Any, text: str) -> tuple[tuple[int, ...], Offsets | None]:
    """Tokenize without special tokens; return the ids, and the character offsets if available."""
    is_fast = bool(getattr(tokenizer, "is_fast", False))
    encoding = tokenizer(
        text, add_special_tokens=False, **({"return_offsets_mapping": True} if is_fast else {})
    )
    ids = tuple(int(token) for token in encoding["input_ids"])
    if not is_fast:
        return ids, None
    return ids, tuple((int(begin), int(end)) for begin, end in encoding["offset_mapping"])


def retokenizations(
    tokenizer: Any, text: str, prompt: str | None, scheme: WatermarkScheme
) -> list[Retokenization]:
    """Return the tokenizations of a text that are worth their correction, the plain one first.

    Their number depends on the text and the scheme's context size, never on the key.
    """
    selected: list[Retokenization] = []
    known_ngrams: set[tuple[int, ...]] = set()
    for candidate in _candidates(tokenizer, text, prompt):
        ngrams = candidate.scored_ngrams(scheme.context_size, scheme.prompt_reach)
        if not selected or len(ngrams - known_ngrams) >= _MIN_NEW_NGRAMS:
            selected.append(candidate)
            known_ngrams |= ngrams
    return selected


def _candidates(tokenizer: Any, text: str, prompt: str | None) -> Iterator[Retokenization]:
    first = _tokenize_whole(tokenizer, text, prompt)
    yield first
    prompt_end = _prompt_end(text, prompt)
    continuation, prefix = text[prompt_end:], first.prefix_ids
    if prompt_end:  # the continuation alone, as it was generated
        yield replace(_tokenize_slice(tokenizer, continuation, prompt_end), context=prefix)
    if indent := len(continuation) - len(continuation.lstrip()):
        yield replace(_tokenize_slice(tokenizer, continuation[indent:], prompt_end + indent), context=prefix)
    elif continuation:
        yield replace(_tokenize_slice(tokenizer, " " + continuation, prompt_end - 1), context=prefix)
    for word in itertools.islice(
        _WORD.finditer(continuation), 2
    ):  # the text may start in the middle of a word
        yield _tokenize_slice(tokenizer, continuation[word.end() :], prompt_end + word.end())
    normalized, positions = _normalize_typography(text)
    if normalized != text:
        candidate = _tokenize_whole(
            tokenizer, normalized, None if prompt is None else _normalize_typography(prompt)[0]
        )
        yield _map_offsets(candidate, lambda index: positions[index])


def _tokenize_whole(tokenizer: Any, text: str, prompt: str | None) -> Retokenization:
    """Tokenize the text as it is. A prompt it starts with is not scored; any other prompt becomes context."""
    ids, offsets = tokenize(tokenizer, text)
    if not prompt:
        return Retokenization(ids, offsets=offsets)
    prompt_end = _prompt_end(text, prompt)
    if not prompt_end:
        return Retokenization(ids, context=tokenize(tokenizer, prompt)[0], offsets=offsets)
    if offsets is None:
        prompt_ids = tokenize(tokenizer, text[:prompt_end])[0]
        return Retokenization(
            prompt_ids + tokenize(tokenizer, text[prompt_end:])[0], prompt_length=len(prompt_ids)
        )
    prompt_length = sum(1 for begin, _ in offsets if begin < prompt_end)
    return Retokenization(ids, prompt_length=prompt_length, offsets=offsets)


def _tokenize_slice(tokenizer: Any, piece: str, begin: int) -> Retokenization:
    """Tokenize a slice of the text that starts at `begin`."""
    ids, offsets = tokenize(tokenizer, piece)
    return _map_offsets(Retokenization(ids, offsets=offsets), lambda index: max(0, index + begin))


def _map_offsets(tokens: Retokenization, to_original: Callable[[int], int]) -> Retokenization:
    """Map the offsets of a changed text back to the original text."""
    if tokens.offsets is None:
        return tokens
    return replace(
        tokens, offsets=tuple((to_original(begin), to_original(end)) for begin, end in tokens.offsets)
    )


def _prompt_end(text: str, prompt: str | None) -> int:
    """End of the prompt that the text starts with, ignoring surrounding white space; 0 if it does not."""
    stripped = (prompt or "").strip()
    begin = len(text) - len(text.lstrip())
    return begin + len(stripped) if stripped and text.startswith(stripped, begin) else 0


def _normalize_typography(text: str) -> tuple[str, list[int]]:
    """Return the text in plain typography, and the original position of each character and of the end."""
    positions = [
        index for index, char in enumerate(text) if not (char == "\r" and text.startswith("\n", index + 1))
    ]
    return "".join(text[index] for index in positions).translate(_TYPOGRAPHY), [*positions, len(text)]


MARKED: Final = "marked"
NOT_MARKED: Final = "not marked"
TOO_SHORT: Final = "too short to tell"
_JSON_FIELDS: Final = (
    *("verdict", "scheme", "key", "nonce", "tokens", "scored", "score", "expected", "interval", "z"),
    *("p_value", "uncorrected", "tests", "alpha", "span", "characters", "needed"),
)


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
        fields = {name: _to_json(getattr(self, name)) for name in _JSON_FIELDS}
        if tokens:
            fields |= {"ids": _to_json(self.ids), "offsets": _to_json(self.offsets)}
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
        self._schemes = {
            name: build_schemes(settings, self.vocab_size) for name, settings in self.keys.items()
        }

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
    unnamed: list[Any] = list(keys) if isinstance(keys, Sequence) else []
    named: dict[str, Any] = dict(keys) if isinstance(keys, Mapping) else {}
    if isinstance(keys, BaseWatermarkingConfig):
        unnamed, named = [keys], {}
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
    is_sequence = isinstance(values, list | tuple)
    numbers = (
        [value.item() if hasattr(value, "item") else value for value in values] if is_sequence else [None]
    )
    if not all(type(value) is int for value in numbers):
        raise InputError("ids", "must be a one-dimensional sequence of token ids", ids)
    return np.asarray(numbers, np.int64)


def _run_test(scheme: WatermarkScheme, tokens: Retokenization, windows: bool) -> _SchemeTest:
    scores = _score_text(scheme, tokens)
    return _SchemeTest(scheme, tokens, scores, scan_windows(scheme, scores.values[scores.mask], windows))


def _score_text(scheme: WatermarkScheme, tokens: Retokenization) -> TokenScores:
    """Score the tokens of a tokenization; prompt tokens are not scored."""
    # Include no more of the prompt than a context can reach: n-grams that also occur in the prompt would not
    # be scored later.
    prefix = tokens.last_prefix_ids(scheme.prompt_reach)
    run = np.asarray(prefix + tokens.ids[tokens.prompt_length :], np.int64)
    result = scheme.score_tokens(run)
    positions = np.flatnonzero(result.mask[len(prefix) :])
    values = result.values[len(prefix) + positions]
    return TokenScores.at(tokens.prompt_length + positions, values, len(tokens.ids))


def _character_span(span: tuple[int, int] | None, offsets: Offsets | None) -> tuple[int, int] | None:
    if span is None or offsets is None:
        return None
    return offsets[span[0]][0], offsets[span[1] - 1][1]


def _to_json(value: Any) -> Any:
    """Tuples as lists, and numbers that are not finite as None."""
    if isinstance(value, tuple):
        return [_to_json(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
