"""The fuzz itself: a wrong result is found, named and reduced."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from descant import Hypothesis, Logprobs
from tools.fuzz import runs
from tools.fuzz.cases import Ask, Case
from tools.fuzz.explained import explanation
from tools.fuzz.oracles import judge
from tools.fuzz.reduction import reduce_case
from tools.fuzz.runs import Result, compare
from tools.fuzz.subjects import Store


def result(tokens, reason="length", **more):
    return Result([Hypothesis(torch.tensor(tokens), reason, **more)])


def probs(value):
    one = torch.tensor([value, -1.0])
    return Logprobs(one, one, one[:, None].long(), one[:, None], one[:, None])


@pytest.mark.parametrize(
    ("expected", "found", "told"),
    [
        (result([4, 5]), result([4, 6]), "tokens"),
        (result([4, 5]), result([4, 5], "eos"), "ended by eos"),
        (result([4, 5], score=-1.0), result([4, 5], score=-1.001), "score"),
        (result([4, 5], beam_indices=(0, 1)), result([4, 5], beam_indices=(0, 0)), "beam_indices"),
        (result([4, 5], logprobs=probs(-2.0)), result([4, 5], logprobs=probs(-2.1)), "logprobs.raw"),
        (result([4, 5]), Result(error=ValueError("no")), "error"),
        (result([4, 5, 0, 7], ""), result([4, 5]), "tokens"),
        (result([4, 5, 0, 0], ""), result([4, 5]), None),
        (result([4, 5], score=-1.0), result([4, 5], score=-1.00001), None),
    ],
)
def test_differences_are_named(expected, found, told):
    difference = compare(expected, found, {0})
    assert difference is None if told is None else told in difference


def test_a_wrong_result_is_found_and_reduced(monkeypatch):
    asks = tuple(Ask("greedy", (5, 6, 7), {"max_new_tokens": 2, "logprobs": n}) for n in range(2))
    actions = {0: (runs.Action("admit", (0, 1)),)}
    case = Case(0, "llama", asks, Store("paged"), actions)
    assert not judge(case).differences
    right = runs.alone

    def wrong(on, ask):
        found = right(on, ask)
        if ask.fields.get("logprobs") == 1:
            found.hypotheses[0].tokens += 1
        return found

    monkeypatch.setattr(runs, "alone", wrong)
    (found,) = judge(case).differences
    assert (found.oracle, found.ask, found.explained_by) == ("alone", 1, None)
    small = reduce_case(case, lambda one: bool(judge(one).differences))
    assert [ask.fields for ask in small.asks] == [{"logprobs": 1}]
    assert [ask.prompt for ask in small.asks] == [(5,)]


@pytest.mark.parametrize(
    ("theirs", "ours", "name"),
    [
        # 41 and 19 22 are met after 6 tokens here, and there anew with the last one of 9.
        (
            [41, 36, 19, 47, 47, 19, 36, 19, 22],
            [41, 36, 19, 47, 19, 22, 47, 29, 47],
            "a beam that meets the constraints is dropped",
        ),
        ([41, 36, 19, 47, 47, 19, 22, 36, 19], [41, 36, 19, 47, 19, 22, 47, 29, 47], None),
        ([41, 36, 19, 47, 19, 22, 47, 29, 47], [41, 36, 19, 47, 47, 19, 36, 19, 22], None),
        ([41, 36, 47, 47, 47, 47, 36, 19, 22], [41, 36, 19, 47, 47, 19, 36, 19, 22], None),
        ([41, 36, 19, 47, 47, 19, 36, 19, 9], [41, 36, 19, 22], "constraints that are not met"),
    ],
)
def test_a_dropped_beam_explains_only_what_is_met_late(theirs, ours, name):
    fields = {"num_beams": 2, "force_words_ids": [[19, 22], [[41], [42, 43, 44]]], "max_new_tokens": 9}
    ask = Ask("constrained beams", (40, 31), fields)
    case = Case(0, "llama", (ask,), Store("paged"), {})
    assert explanation(case, ask, "4.52.4", result(theirs, ""), result(ours)) == name
    del fields["max_new_tokens"]
    by_length = replace(ask, fields={**fields, "max_length": 11})
    assert explanation(case, by_length, "4.52.4", result(theirs, ""), result(ours)) == name
