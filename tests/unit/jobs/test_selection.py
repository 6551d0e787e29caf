"""Selection among completions: scorers, votes, minimum Bayes risk, patterns, and every refusal."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

from descant import ConfigError, InputError
from descant.jobs.selection import MAX_SEARCHED_CHARS, AnswerPattern, CompletionSelector, SelectionConfig


def made(*texts: str) -> list[dict[str, Any]]:
    return [{"text": text, "tokens": len(text), "finish_reason": "eos"} for text in texts]


def chosen(config: SelectionConfig, *texts: str, row: dict[str, Any] | None = None, **more: Any) -> Any:
    return CompletionSelector(config).select(row or {}, made(*texts), **more)


def scorer_file(folder: Path, body: str, name: str = "scorer.py") -> str:
    path = folder / name
    path.write_text(body, encoding="utf-8")
    return f"{path}:rate"


# ------------------------------------------------------------------------ configs
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": "vot"}, "`method` must be one of best_of_n, vote, mbr, got 'vot': did you mean `vote`?"),
        ({"method": 3}, "`method` must be one of best_of_n, vote, mbr, got 3"),
        (
            {"method": "best_of_n"},
            "`scorer` must be given with the method best_of_n, got None: use mean_logp",
        ),
        ({"method": "best_of_n", "scorer": ""}, "`scorer` must be text, got ''"),
        ({"method": "best_of_n", "scorer": "long"}, "`scorer` must be a function, as file.py:function or"),
        ({"method": "best_of_n", "scorer": "a b:c"}, "`scorer` must be a function, as file.py:function or"),
        ({"method": "best_of_n", "scorer": "a.py:"}, "`scorer` must be a function, as file.py:function or"),
        ({"method": "vote", "scorer": "length"}, "`scorer` has no effect with the method vote, got 'length'"),
        ({"method": "vote", "ngram": 3}, "`ngram` has no effect with the method vote, got 3: leave it out"),
        ({"method": "mbr", "ngram": 0}, "`ngram` must be an integer >= 1, got 0"),
        ({"method": "mbr", "keep": 0}, "`keep` must be an integer >= 1, got 0"),
        ({"method": "mbr", "keep": True}, "`keep` must be an integer >= 1, got True"),
        ({"method": "vote", "pattern": "("}, "`pattern` must be a regular expression (missing )"),
        ({"method": "vote", "pattern": "(a)(b)"}, "`pattern` must have at most one group, got '(a)(b)'"),
        ({"method": "vote", "pattern": "(a+)+$"}, "`pattern` must have no repeated group with a repetition"),
        ({"method": "vote", "patern": "a"}, "`patern` is not a key of `select`, got 'a': did you mean `patt"),
        ({"keep": 2}, "`method` must be given in `select`, got None: use best_of_n, vote, mbr"),
        (3, "`select` must be a table, got 3"),
    ],
)
def test_wrong_tables_are_refused(values: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        SelectionConfig.from_table(values)
    assert str(caught.value).startswith(message)


def test_a_table_has_all_fields() -> None:
    config = SelectionConfig.from_table({"method": "mbr", "keep": 2, "ngram": 3, "pattern": "[0-9]+"})
    assert config == SelectionConfig(method="mbr", keep=2, ngram=3, pattern="[0-9]+")
    assert config.needs_tokens
    assert not config.needs_logprobs
    assert SelectionConfig(method="best_of_n", scorer="mean_logprob").needs_logprobs
    with pytest.raises(ConfigError, match="`num_return_sequences` must be at least 2 with `select`, got 1"):
        config.check_samples(1)
    config.check_samples(2)
    with pytest.raises(ConfigError, match="at least 3"):
        SelectionConfig(method="vote", keep=3).check_samples(2)


# ------------------------------------------------------------------------ patterns
@pytest.mark.parametrize(
    ("pattern", "text", "answer"),
    [
        (r"answer is (\d+)", "the answer is 4. No, the answer is 5.", "5"),
        (r"\d+", "4 and 17", "17"),
        (r"#### (.*)", "####  7 \nrest", "7"),
        (r"x(\d)?", "x1 x", "1"),  # a match without its group gives none
        (r"(\d+)", "none", None),
        (r"\\boxed\{([^}]*)\}", r"so \boxed{12}", "12"),
        (r"-?\d{1,3}(?:,\d{3})*(?:\.\d+)?", "it is 1,234.5 indeed", "1,234.5"),
        (r"(?:a|b)+c", "xabac", "abac"),  # alternatives of one character are a set
    ],
)
def test_the_last_match_is_the_answer(pattern: str, text: str, answer: str | None) -> None:
    assert AnswerPattern(pattern).find(text) == answer


@pytest.mark.parametrize(
    "pattern",
    ["(a*)*", "(?:a|aa)+b", "(?:a?b?)*", "((?:x+)y)*", "(?:(?=a+)b)+", "(?:a{1,3}){2,9}", "(?:(?>a+)b)+"],
)
def test_patterns_of_exponential_time_are_refused(pattern: str) -> None:
    with pytest.raises(InputError, match="no repeated group with a repetition or alternatives"):
        AnswerPattern(pattern)


def test_only_the_end_of_a_text_is_searched() -> None:
    pattern = AnswerPattern(r"n(\d)")
    assert pattern.find("n1" + "x" * (MAX_SEARCHED_CHARS - 2)) == "1"
    assert pattern.find("n1" + "x" * (MAX_SEARCHED_CHARS - 1)) is None


# ------------------------------------------------------------------------ methods
def test_a_vote_goes_to_the_answer_of_most_samples() -> None:
    config = SelectionConfig(method="vote", pattern=r"(\d+)")
    texts = ("it is 4", "it is 5", "no idea", "surely 5")
    assert chosen(config, *texts) == [{**made("it is 5")[0], "score": 0.5, "answer": "5", "votes": 2}]
    every = chosen(SelectionConfig(method="vote", pattern=r"(\d+)", keep=9), *texts)
    assert [(one["text"], one["votes"], one["score"]) for one in every] == [
        ("it is 5", 2, 0.5), ("surely 5", 2, 0.5), ("it is 4", 1, 0.25), ("no idea", 0, 0.0),
    ]  # fmt: skip
    [none] = chosen(config, "no", "idea")
    assert (none["text"], none["answer"], none["votes"], none["score"]) == ("no", None, 0, 0.0)


def test_a_tie_goes_to_the_earlier_sample_and_white_space_does_not_count() -> None:
    [tie] = chosen(SelectionConfig(method="vote"), "b", "a ", " a", "b\n")
    assert (tie["text"], tie["answer"], tie["votes"]) == ("b", "b", 2)
    [third] = chosen(SelectionConfig(method="vote"), "x", "y", "y ", "z")
    assert (third["text"], third["score"]) == ("y", 0.5)


def test_the_best_of_n_by_length_and_by_log_probability() -> None:
    longest = chosen(SelectionConfig(method="best_of_n", scorer="length", keep=2), "a", "ccc", "bb", "ddd")
    assert [(one["text"], one["score"]) for one in longest] == [("ccc", 3.0), ("ddd", 3.0)]
    config = SelectionConfig(method="best_of_n", scorer="mean_logprob", keep=3)
    # Means of -1, -0.5004 and -0.4996: the last two are equal where they are written.
    by_probability = chosen(config, "ab", "abcd", "abcde", logprob_sums=[-2.0, -2.0016, -2.498])
    assert [(one["text"], one["score"]) for one in by_probability] == [
        ("abcd", -0.5), ("abcde", -0.5), ("ab", -1.0),
    ]  # fmt: skip
    [zero] = chosen(SelectionConfig(method="best_of_n", scorer="mean_logprob"), "a", logprob_sums=[-1e-9])
    assert math.copysign(1, zero["score"]) == 1
    with pytest.raises(InputError, match="`logprob_sums` must be given for each of 2 completions, got 1"):
        chosen(config, "ab", "abcd", logprob_sums=[-2.0])
    with pytest.raises(InputError, match="`scorer` must give finite scores"):
        chosen(config, "ab", logprob_sums=[-math.inf])


def test_texts_without_an_answer_come_last() -> None:
    config = SelectionConfig(method="best_of_n", scorer="length", pattern=r"\d", keep=3)
    found = chosen(config, "none at all", "1", "22")
    assert [(one["text"], one["answer"]) for one in found] == [("22", "2"), ("1", "1"), ("none at all", None)]


def test_minimum_bayes_risk_takes_what_shares_most() -> None:
    ids = [[1, 2, 3], [1, 2, 4], [7, 8, 9], [1, 2, 3, 4]]
    [best] = chosen(SelectionConfig(method="mbr"), "a", "b", "c", "d", token_ids=ids)
    # Pairs of d by hand: with a 2 * 5 / 12, with b 2 * 4 / 12, with c 0.
    assert (best["text"], best["score"]) == ("d", round((10 / 12 + 8 / 12) / 3, 6))
    unigrams = chosen(SelectionConfig(method="mbr", ngram=1, keep=4), "a", "b", "c", "d", token_ids=ids)
    assert [one["text"] for one in unigrams] == ["d", "a", "b", "c"]
    assert unigrams[-1]["score"] == 0.0
    [alone] = chosen(SelectionConfig(method="mbr"), "a", token_ids=[[1]])
    assert alone["score"] == 0.0
    assert [one["score"] for one in chosen(SelectionConfig(method="mbr"), "", "", token_ids=[[], []])] == [
        0.0
    ]
    with pytest.raises(InputError, match="`token_ids` must be given for each of 2 completions, got 1"):
        chosen(SelectionConfig(method="mbr"), "a", "b", token_ids=[[1]])


# ------------------------------------------------------------------------ functions
def test_a_function_of_a_file_scores(tmp_path: Path) -> None:
    body = """
from dataclasses import dataclass

@dataclass
class Weight:
    value: float

def rate(row, text):
    row["seen"] = row.get("seen", 0) + 1
    return Weight(row["seen"] * text.count(row["letter"])).value
"""
    config = SelectionConfig(method="best_of_n", scorer=scorer_file(tmp_path, body), keep=3)
    row = {"letter": "a"}
    found = chosen(config, "ab", "aab", "b", row=row)
    assert [(one["text"], one["score"]) for one in found] == [("aab", 2.0), ("ab", 1.0), ("b", 0.0)]
    assert row == {"letter": "a"}  # a function that changes its row changes a copy


def test_a_function_of_a_module_scores() -> None:
    config = SelectionConfig(method="best_of_n", scorer="operator:contains")
    with pytest.raises(InputError, match=r"`scorer` must not raise .TypeError: "):
        CompletionSelector(SelectionConfig(method="best_of_n", scorer="json:loads")).select({}, made("a"))
    [found] = chosen(config, "a", "key", row={"key": 1})
    assert (found["text"], found["score"]) == ("key", 1.0)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def rate(row, text):\n    return row['no']", "`scorer` must not raise (KeyError: 'no'), got"),
        ("def rate(row, text):\n    raise SystemExit", "`scorer` must not raise (SystemExit), got"),
        ("def rate(row, text):\n    return None", "`scorer` must return a number, and "),
        ("def rate(row, text):\n    return '1'", "`scorer` must return a number, and "),
        ("def rate(row, text):\n    return float('nan')", "`scorer` must return a finite number, and "),
        ("def rate(row, text):\n    return 10**400", "`scorer` must return a finite number, and "),
        (
            "def rate(row, text):\n    raise ValueError('a\\nb')",
            "`scorer` must not raise (ValueError: a\\nb)",
        ),
    ],
)
def test_failing_functions_are_errors_of_the_row(tmp_path: Path, body: str, message: str) -> None:
    selector = CompletionSelector(SelectionConfig(method="best_of_n", scorer=scorer_file(tmp_path, body)))
    with pytest.raises(InputError) as caught:
        selector.select({}, made("a", "b"))
    assert str(caught.value).startswith(message)
    assert " at 0x" not in str(caught.value)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("import no_such_module", "`scorer` must be importable (ModuleNotFoundError: No module named 'no_su"),
        ("raise SystemExit(3)", "`scorer` must be importable (SystemExit: 3)"),
        ("def", "`scorer` must be importable (SyntaxError: "),
        ("rate = 3", "`scorer` must name a function of "),
    ],
)
def test_functions_that_cannot_be_loaded_are_refused(tmp_path: Path, body: str, message: str) -> None:
    config = SelectionConfig(method="best_of_n", scorer=scorer_file(tmp_path, body))
    before = set(sys.modules)
    with pytest.raises(InputError) as caught:
        CompletionSelector(config)
    assert str(caught.value).startswith(message)
    left = {one for one in set(sys.modules) - before if one.startswith("_descant_scorer_")}
    assert len(left) == (1 if body == "rate = 3" else 0)


def test_a_function_that_is_nowhere_is_refused(tmp_path: Path) -> None:
    for name in (f"{tmp_path}/no.py:rate", "no_such_package.scorers:rate"):
        config = SelectionConfig(method="best_of_n", scorer=name)
        with pytest.raises(InputError, match="`scorer` must be"):
            CompletionSelector(config)
        with pytest.raises(InputError, match="`scorer` must be"):
            config.digest_parts()


def test_the_digest_covers_the_source_of_a_function(tmp_path: Path) -> None:
    name = scorer_file(tmp_path, "def rate(row, text):\n    return 1")
    config = SelectionConfig(method="best_of_n", scorer=name)
    first = config.digest_parts()
    assert first == config.digest_parts()
    CompletionSelector(config, first)
    scorer_file(tmp_path, "def rate(row, text):\n    return 2")
    assert config.digest_parts() != first
    with pytest.raises(InputError, match="`scorer` must not change during a job"):
        CompletionSelector(config, first)
    # The new content is loaded, although the old one was before.
    assert chosen(config, "a")[0]["score"] == 2.0
    module = SelectionConfig(method="best_of_n", scorer="json:loads")
    assert module.digest_parts() == module.digest_parts() != first
    votes = {SelectionConfig(method="vote", pattern=one).digest_parts() for one in (None, "a", "b")}
    assert len(votes) == 3
