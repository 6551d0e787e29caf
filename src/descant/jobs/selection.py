"""Selection among the completions of a row: the best by a scorer, by vote, or by minimum Bayes risk."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from descant.errors import ConfigError, InputError
from descant.jobs.answer_pattern import AnswerPattern
from descant.jobs.scorers import FunctionScorer, check_scorer_name, scorer_digest

__all__ = ["CompletionSelector", "SelectionConfig"]

METHODS: Final = ("best_of_n", "vote", "mbr")
BUILT_IN_SCORERS: Final = ("mean_logprob", "length")
DEFAULT_NGRAM: Final = 2
_SCORE_DIGITS: Final = 6
# The last digits of log-probabilities depend on the rows that are computed together.
_LOGPROB_DIGITS: Final = 2
_KINDS: Final[tuple[tuple[str, type, str], ...]] = (
    ("method", str, f"must be one of {', '.join(METHODS)}"),
    ("scorer", str, "must be text"),
    ("pattern", str, "must be text"),
    ("keep", int, "must be an integer >= 1"),
    ("ngram", int, "must be an integer >= 1"),
)


@dataclass(frozen=True, kw_only=True)
class SelectionConfig:
    """The table `[select]` of a job."""

    method: str  # "best_of_n", "vote" or "mbr"
    scorer: str | None = None  # of best_of_n: "mean_logprob", "length", "file.py:function", "module:function"
    pattern: str | None = None  # takes the answer out of a text; None: the answer of a vote is the text
    keep: int = 1  # completions of a row that are written
    ngram: int | None = None  # of mbr: the longest n-grams of tokens that are compared; None: 2

    def __post_init__(self) -> None:
        for name, kind, must in _KINDS:
            value = getattr(self, name)
            is_unset = value is None and name in ("scorer", "pattern", "ngram")
            is_small = isinstance(value, int) and value < 1
            if not is_unset and (type(value) is not kind or is_small or value == ""):
                raise InputError(name, must, value)
        if self.method not in METHODS:
            close = difflib.get_close_matches(self.method, METHODS, n=1)
            advice = f"did you mean `{close[0]}`?" if close else ""
            raise InputError("method", f"must be one of {', '.join(METHODS)}", self.method, advice)
        self._check_scorer()
        if self.ngram is not None and self.method != "mbr":
            raise InputError(
                "ngram", f"has no effect with the method {self.method}", self.ngram, "leave it out"
            )
        if self.pattern is not None:
            AnswerPattern(self.pattern)

    @classmethod
    def from_table(cls, values: Any) -> Self:
        """The config of a TOML table."""
        if not isinstance(values, Mapping):
            raise InputError("select", "must be a table", values)
        known = [one.name for one in dataclasses.fields(cls)]
        for name, value in values.items():
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                advice = f"did you mean `{close[0]}`?" if close else f"use {', '.join(known)}"
                raise InputError(name, "is not a key of `select`", value, advice)
        if "method" not in values:
            raise InputError("method", "must be given in `select`", None, f"use {', '.join(METHODS)}")
        return cls(**values)

    @property
    def needs_logprobs(self) -> bool:
        """Whether `CompletionSelector.select` needs `logprob_sums`."""
        return self.scorer == "mean_logprob"

    @property
    def needs_tokens(self) -> bool:
        """Whether `CompletionSelector.select` needs `token_ids`."""
        return self.method == "mbr"

    @property
    def needs_row(self) -> bool:
        """Whether a function scores completions, which is given all columns of their row."""
        return self.scorer is not None and self.scorer not in BUILT_IN_SCORERS

    def check_samples(self, count: int) -> None:
        """Raise ConfigError if rows of `count` completions leave nothing to select."""
        least = max(2, self.keep)
        if count < least:
            must, advice = f"must be at least {least} with `select`", "raise it, and set do_sample"
            raise ConfigError("num_return_sequences", must, count, advice)

    def with_absolute_path(self) -> Self:
        """The same config for a process in another folder."""
        if self.scorer is None or ".py:" not in self.scorer:
            return self
        return dataclasses.replace(self, scorer=os.path.abspath(self.scorer))

    def digest_parts(self) -> str:
        """Everything that decides a selection, with the source of a function, as JSON."""
        parts = dataclasses.asdict(self)
        if self.scorer is not None and self.needs_row:
            parts["source"] = scorer_digest(self.scorer)
            parts["scorer"] = os.path.basename(self.scorer)  # in another folder it is the same
        return json.dumps(parts, sort_keys=True)

    def _check_scorer(self) -> None:
        if self.method != "best_of_n":
            if self.scorer is not None:
                must = f"has no effect with the method {self.method}"
                raise InputError("scorer", must, self.scorer, "leave it out")
        elif self.scorer is None:
            must = "must be given with the method best_of_n"
            raise InputError("scorer", must, None, f"use {', '.join(BUILT_IN_SCORERS)} or file.py:function")
        elif self.scorer not in BUILT_IN_SCORERS:
            check_scorer_name(self.scorer)


class CompletionSelector:
    """Orders the completions of a row, best first, and keeps the first ones.

    `digest_parts` are those of the job: a function whose source has changed since then is refused.
    """

    def __init__(self, config: SelectionConfig, digest_parts: str | None = None) -> None:
        if digest_parts is not None and config.digest_parts() != digest_parts:
            must = "must not change during a job"
            raise InputError("scorer", must, config.scorer, "restore it, or give another folder as `sink`")
        self.config = config
        self._pattern = None if config.pattern is None else AnswerPattern(config.pattern)
        is_function = config.scorer is not None and config.scorer not in BUILT_IN_SCORERS
        self._function = FunctionScorer(config.scorer) if config.scorer is not None and is_function else None

    def select(
        self,
        row: Mapping[str, Any],
        completions: Sequence[Mapping[str, Any]],
        token_ids: Sequence[Sequence[int]] = (),
        logprob_sums: Sequence[float] = (),
    ) -> list[dict[str, Any]]:
        """The completions to write, best first; of equal ones the earlier comes first.

        Each has its `score`; with a pattern its `answer`, and those without one come last; with a vote also
        the `votes` of its answer. `token_ids` and `logprob_sums` are aligned to the completions.
        """
        answers = [self._answer(one["text"]) for one in completions]
        scores, counts = self._scores(row, completions, answers, token_ids, logprob_sums), Counter(answers)
        order = sorted(range(len(completions)), key=lambda at: (answers[at] is None, -scores[at], at))
        chosen = []
        for at in order[: self.config.keep]:
            extra: dict[str, Any] = {"score": scores[at]}
            if self.config.method == "vote" or self._pattern is not None:
                extra["answer"] = answers[at]
            if self.config.method == "vote":
                extra["votes"] = 0 if answers[at] is None else counts[answers[at]]
            chosen.append({**completions[at], **extra})
        return chosen

    def _answer(self, text: str) -> str | None:
        """The answer of a text; without a pattern the text itself."""
        return text.strip() if self._pattern is None else self._pattern.find(text)

    def _scores(
        self,
        row: Mapping[str, Any],
        completions: Sequence[Mapping[str, Any]],
        answers: Sequence[str | None],
        token_ids: Sequence[Sequence[int]],
        logprob_sums: Sequence[float],
    ) -> list[float]:
        """The rounded score of each completion; completions are ordered by what is written."""
        digits, count = _SCORE_DIGITS, len(completions)
        for name, given, is_needed in (
            ("token_ids", token_ids, self.config.needs_tokens),
            ("logprob_sums", logprob_sums, self.config.needs_logprobs),
        ):
            if is_needed and len(given) != count:
                raise InputError(name, f"must be given for each of {count} completions", len(given))
        if self.config.method == "vote":
            votes = Counter(answers)
            scores = [0.0 if one is None else votes[one] / count for one in answers]
        elif self.config.method == "mbr":
            scores = _expected_utilities(token_ids, self.config.ngram or DEFAULT_NGRAM)
        elif self._function is not None:
            scores = [self._function.score(row, one["text"]) for one in completions]
        elif self.config.scorer == "length":
            scores = [float(one["tokens"]) for one in completions]
        else:
            digits = _LOGPROB_DIGITS
            pairs = zip(completions, logprob_sums, strict=True)
            scores = [total / max(one["tokens"], 1) for one, total in pairs]
        if not all(math.isfinite(one) for one in scores):
            raise InputError("scorer", "must give finite scores", scores)
        return [round(one, digits) + 0.0 for one in scores]  # -0.0 + 0.0 is 0.0


def _expected_utilities(sequences: Sequence[Sequence[int]], max_size: int) -> list[float]:
    """The mean utility of each sequence over the others, as the recipe `bayes-risk` has it."""
    from descant.recipes.cookbook.bayes_risk import ngrams, utility

    grams = [ngrams(one, max_size) for one in sequences]
    totals = [0.0] * len(grams)
    for second in range(len(grams)):
        for first in range(second):
            # Two empty sequences share nothing.
            value = utility(grams[first], grams[second]) if grams[first] or grams[second] else 0.0
            totals[first] += value
            totals[second] += value
    return [total / max(len(grams) - 1, 1) for total in totals]
