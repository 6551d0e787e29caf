"""Selection among the completions of a row: the best by a scorer, by vote, or by minimum Bayes risk."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import importlib
import importlib.util
import json
import math
import numbers
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Self

from descant.config.registry import suggest_name
from descant.errors import ConfigError, InputError, file_errors, printable

MAX_SEARCHED_CHARS: Final = 2048  # of the end of a text, where the last match is
_REPEATS: Final = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")
_ALTERNATIVES: Final = ("BRANCH", "GROUPREF_EXISTS")


class AnswerPattern:
    """Takes the answer out of a text: group 1 of the last match, or the whole match without a group.

    Only the last `MAX_SEARCHED_CHARS` characters are searched: the time of Python's regular expressions may
    grow with a power of the text's length. It grows exponentially where a repeated group matches one text in
    several ways, so a repeated group with a repetition or alternatives in it is refused.
    """

    def __init__(self, pattern: str) -> None:
        try:
            self._regex = re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise InputError("pattern", f"must be a regular expression ({error})", pattern) from None
        if self._regex.groups > 1:
            must, advice = "must have at most one group", "write (?:...) for groups that are not the answer"
            raise InputError("pattern", must, pattern, advice)
        # The parser of `re` has no public name; a parser of our own would have to follow its every change.
        if _has_ambiguous_repeat(importlib.import_module("re._parser").parse(pattern), is_repeated=False):
            must = "must have no repeated group with a repetition or alternatives in it"
            raise InputError("pattern", must, pattern, "repeat a set of characters, as in [0-9,]+")

    def find(self, text: str) -> str | None:
        """The answer without the white space around it; None: there is none, or it is blank."""
        answer = None
        for match in self._regex.finditer(text, max(len(text) - MAX_SEARCHED_CHARS, 0)):
            found = match.group(self._regex.groups)  # 0 is the whole match
            if found is not None and found.strip():
                answer = found.strip()
        return answer


def _has_ambiguous_repeat(parsed: Iterable[tuple[Any, Any]], is_repeated: bool) -> bool:
    """Whether a parsed pattern has a repetition or alternatives in what is repeated."""
    for operation, argument in parsed:
        name, is_inner_repeated = str(operation), is_repeated
        if name in _ALTERNATIVES and is_repeated:
            return True
        if name in _REPEATS:
            low, high, _ = argument
            if is_repeated and low != high:
                return True
            is_inner_repeated = is_repeated or high > 1
        if any(_has_ambiguous_repeat(inner, is_inner_repeated) for inner in _inner_patterns(name, argument)):
            return True
    return False


def _inner_patterns(name: str, argument: Any) -> list[Any]:
    """The parsed patterns inside of one operation."""
    if name in _REPEATS or name == "SUBPATTERN":
        return [argument[-1]]
    if name in ("ASSERT", "ASSERT_NOT"):
        return [argument[1]]
    if name == "BRANCH":
        return list(argument[1])
    if name == "GROUPREF_EXISTS":
        return [pattern for pattern in argument[1:] if pattern is not None]
    return [argument] if name == "ATOMIC_GROUP" else []


_MODULE_PREFIX: Final = "_descant_scorer_"
_FORM: Final = "must be a function, as file.py:function or package.module:function"


class FunctionScorer:
    """A function `(row, text) -> float` that is loaded once; what it raises is an InputError of the row."""

    def __init__(self, name: str) -> None:
        self.name = name
        place, _, attribute = name.rpartition(":")
        try:
            module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        except InputError:
            raise
        except (Exception, SystemExit) as error:  # a scorer must not end the program by `sys.exit()`
            raise InputError("scorer", f"must be importable ({_reason(error)})", name) from error
        function = getattr(module, attribute, None)
        if not callable(function):
            raise InputError("scorer", f"must name a function of {place}", attribute)
        self._function: Callable[[dict[str, Any], str], Any] = function

    def score(self, row: Mapping[str, Any], text: str) -> float:
        """The score of a text; each call has a copy of the row, so that none sees what another did to it."""
        try:
            value = self._function(copy.deepcopy(dict(row)), text)
        except (Exception, SystemExit) as error:
            raise InputError("scorer", f"must not raise ({_reason(error)})", self.name) from error
        if not isinstance(value, numbers.Real):
            # Its repr may have an address in it, which would differ between runs.
            must = f"must return a number, and {self.name} has not"
            raise InputError("scorer", must, type(value).__name__, "return float(...)")
        try:
            score = float(value)
        except OverflowError:
            score = math.inf
        if not math.isfinite(score):
            raise InputError("scorer", f"must return a finite number, and {self.name} has not", score)
        return score


def check_scorer_name(name: str) -> None:
    """Raise InputError for a name that is no function of a file or module."""
    place, _, attribute = name.rpartition(":")
    is_module = all(part.isidentifier() for part in place.split("."))
    if not attribute.isidentifier() or not (place.endswith(".py") or is_module):
        raise InputError("scorer", _FORM, name, "or use mean_logprob or length")


def scorer_digest(name: str) -> str:
    """The digest of the source of a scorer's file or module; what it imports is not part of it."""
    place = name.rpartition(":")[0]
    if place.endswith(".py"):
        return _digest(_read(Path(place)))
    try:
        spec = importlib.util.find_spec(place)
    except (Exception, SystemExit) as error:  # of a package that the module is in
        raise InputError("scorer", f"must be importable ({_reason(error)})", name) from error
    if spec is None:
        raise InputError("scorer", "must be of an installed module", name)
    return _digest(_read(Path(spec.origin))) if spec.has_location and spec.origin else ""


def _load_file(path: Path) -> ModuleType:
    """The module of a file; the same content is loaded once."""
    source = _read(path)
    name = _MODULE_PREFIX + _digest(source)
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module  # before it runs: dataclasses look their module up
    try:
        exec(compile(source, str(path), "exec"), vars(module))  # noqa: S102 - the user's own file
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _read(path: Path) -> bytes:
    with file_errors("scorer", path, "read"):
        return path.read_bytes()


def _digest(source: bytes) -> str:
    return hashlib.blake2b(source, digest_size=16, person=b"descant scorer").hexdigest()


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {printable(error)}" if str(error) else type(error).__name__


METHODS: Final = ("best_of_n", "vote", "mbr")
BUILT_IN_SCORERS: Final = ("mean_logprob", "length")
DEFAULT_NGRAM: Final = 2
_SCORE_DIGITS: Final = 6
# The last digits of log-probabilities depend on the rows that are computed together.
_LOGPROB_DIGITS: Final = 2
_COUNT: Final = "must be an integer >= 1"
_TYPES: Final[dict[str, tuple[Any, str]]] = {
    "method": (str, f"must be one of {', '.join(METHODS)}"),
    **dict.fromkeys(("scorer", "pattern"), (str | None, "must be text")),
    "keep": (int, _COUNT),
    "ngram": (int | None, _COUNT),
}


def check_types(config: Any, types: Mapping[str, tuple[Any, str]]) -> None:
    """Raise InputError for a field that has not its type, an empty text, or a count below 1."""
    for name, (kind, must) in types.items():
        value = getattr(config, name)
        is_kind = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if not is_kind or value == "" or (must == _COUNT and value is not None and value < 1):
            raise InputError(name, must, value)


def check_keys(config: Any, values: Mapping[str, Any], owner: str) -> None:
    """Raise InputError for a key of a table that is no field of a class of configs."""
    known = [field.name for field in dataclasses.fields(config)]
    for name, value in values.items():
        if name not in known:
            do = suggest_name(name, known) or f"use {', '.join(known)}"
            raise InputError(name, f"is not a key of {owner}", value, do)


@dataclass(frozen=True, kw_only=True)
class SelectionConfig:
    """The table `[select]` of a job."""

    method: str  # "best_of_n", "vote" or "mbr"
    scorer: str | None = None  # of best_of_n: "mean_logprob", "length", "file.py:function", "module:function"
    pattern: str | None = None  # takes the answer out of a text; None: the answer of a vote is the text
    keep: int = 1  # completions of a row that are written
    ngram: int | None = None  # of mbr: the longest n-grams of tokens that are compared; None: 2

    def __post_init__(self) -> None:
        check_types(self, _TYPES)
        if self.method not in METHODS:
            do = suggest_name(self.method, METHODS) or ""
            raise InputError("method", f"must be one of {', '.join(METHODS)}", self.method, do)
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
        check_keys(cls, values, "`select`")
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
        answers = [self._answer(completion["text"]) for completion in completions]
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
            scores = [0.0 if answer is None else votes[answer] / count for answer in answers]
        elif self.config.method == "mbr":
            scores = _expected_utilities(token_ids, self.config.ngram or DEFAULT_NGRAM)
        elif self._function is not None:
            scores = [self._function.score(row, completion["text"]) for completion in completions]
        elif self.config.scorer == "length":
            scores = [float(completion["tokens"]) for completion in completions]
        else:
            digits = _LOGPROB_DIGITS
            pairs = zip(completions, logprob_sums, strict=True)
            scores = [total / max(completion["tokens"], 1) for completion, total in pairs]
        if not all(math.isfinite(score) for score in scores):
            raise InputError("scorer", "must give finite scores", scores)
        return [round(score, digits) + 0.0 for score in scores]  # -0.0 + 0.0 is 0.0


def _expected_utilities(sequences: Sequence[Sequence[int]], max_size: int) -> list[float]:
    """The mean utility of each sequence over the others, as the recipe `bayes-risk` has it."""
    from descant.recipes.cookbook.bayes_risk import ngrams, utility

    grams = [ngrams(sequence, max_size) for sequence in sequences]
    totals = [0.0] * len(grams)
    for second in range(len(grams)):
        for first in range(second):
            # Two empty sequences share nothing.
            value = utility(grams[first], grams[second]) if grams[first] or grams[second] else 0.0
            totals[first] += value
            totals[second] += value
    return [total / max(len(grams) - 1, 1) for total in totals]
