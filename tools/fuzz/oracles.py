"""The oracles: what else must give the same result as a request in its crowd."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tests.reference.process.client import ReferenceClient
from tools.fuzz import installed, reference, runs
from tools.fuzz.cases import Ask, Case
from tools.fuzz.explained import explanation
from tools.fuzz.runs import Result, compare
from tools.fuzz.subjects import Subject

__all__ = ["Difference", "Verdict", "judge"]


# Fields of the errors for a request that a scheduler's limits refuse.
_LIMITED = {
    *("rows", "prompt_tokens", "step_tokens"),
    *("prompt_lookup_num_tokens", "suffix_lookup_num_tokens", "num_assistant_tokens", "assistant_model"),
}


@dataclass(frozen=True)
class Difference:
    """A request whose results by two ways are not the same."""

    seed: int
    oracle: str  # "alone", "other cache", "transformers", "4.52.4", "prompt", "crash"
    ask: int  # -1: the case as a whole
    text: str
    explained_by: str | None = None

    def __str__(self) -> str:
        by = "" if self.explained_by is None else f" [{self.explained_by}]"
        return f"seed {self.seed}, request {self.ask}, {self.oracle}{by}: {self.text}"


class Verdict(NamedTuple):
    """What was compared for a case, and what differs."""

    compared: dict[str, int]  # requests by oracle
    refused: list[tuple[str, str]]  # methods of requests that are not legal, with the error
    differences: list[Difference]
    crowd: list[Result]


def judge(case: Case, client: ReferenceClient | None = None) -> Verdict:
    """Run a case in every way and compare; with a client also on transformers 4.52.4."""
    compared: dict[str, int] = {}
    differences: list[Difference] = []
    refused: list[tuple[str, str]] = []
    on = case.subject()
    try:
        crowd = runs.crowd(case, on)
    except Exception as error:
        return Verdict({"crash": 1}, [], [_crash(case, "crash in the crowd", -1, error)], [])
    for oracle, index, expected in _expectations(case, on, crowd, client):
        ask = case.asks[index]
        if isinstance(expected, Exception):
            by = explanation(case, ask, oracle, expected, crowd[index])
            differences.append(_crash(case, oracle, index, expected, by))
            continue
        if crowd[index].is_refused and (expected.is_refused or _is_for_session(case, crowd[index])):
            refused.append((ask.method, str(expected.error)))
            continue
        compared[oracle] = compared.get(oracle, 0) + 1
        # transformers fills up beams with an end token where the pad token is 0.
        fills = {on.pad, on.eos}
        fills |= {reference.pad(on)} if oracle == "4.52.4" else set()
        text = compare(expected, crowd[index], fills)
        if text is not None:
            by = explanation(case, ask, oracle, expected, crowd[index])
            differences.append(Difference(case.seed, oracle, index, text, by))
    for index, found in enumerate(crowd):
        if found.prompt_logprobs is not None:
            compared["prompt"] = compared.get("prompt", 0) + 1
            expected = _by_itself(runs.prompt_logprobs, on, case.asks[index])
            if not runs.is_close(found.prompt_logprobs.raw, expected):
                text = f"prompt log-probabilities {found.prompt_logprobs.raw.tolist()}, expected {expected}"
                differences.append(Difference(case.seed, "prompt", index, text))
    return Verdict(compared, refused, differences, crowd)


def _is_for_session(case: Case, result: Result) -> bool:
    """Whether a request was refused because its session has another cache, or too little room."""
    names = _LIMITED if case.scheduler is not None else set()
    names = names | ({"cache_implementation"} if case.mixes_caches else set())
    field = getattr(result.error, "field", ())
    return not names.isdisjoint((field,) if isinstance(field, str) else field)


def _crash(case: Case, oracle: str, index: int, error: Exception, by: str | None = None) -> Difference:
    lines = traceback.format_exception(error)[-3:]
    return Difference(case.seed, oracle, index, f"{type(error).__name__}: {error}\n" + "".join(lines), by)


def _expectations(
    case: Case, on: Subject, crowd: list[Result], client: ReferenceClient | None
) -> Iterator[tuple[str, int, Result | Exception]]:
    """By oracle and request: the result that it must have, or what was raised instead."""
    compared = [
        index
        for index, ask in enumerate(case.asks)
        if not crowd[index].is_cancelled and ask.fails_after is None
    ]
    for index in compared:
        ask = case.asks[index].without_drafter()
        if not ask.is_lossy:
            ask = ask.on(None)
        way = runs.generated if case.through_generate and "healing" not in ask.method else runs.alone
        name = "generate" if way is runs.generated else "alone"
        yield name, index, _by_itself(way, on, ask)
    # A lossy cache has no counterpart.
    compared = [index for index in compared if not case.asks[index].is_lossy]
    others = [
        replace(case.asks[index], priority=0, prompt_logprobs=None).on(case.other) for index in compared
    ]
    found = _attempt(runs.together, on, others)
    for place, index in enumerate(compared):
        yield "other cache", index, found if isinstance(found, Exception) else found[place]
    for index in compared:
        ask = case.asks[index]
        if crowd[index].error is not None:  # it ends without a result only here
            continue
        if installed.has(on, ask):
            yield "transformers", index, _by_itself(installed.generated, on, ask)
        elif client is not None and reference.has(on, ask):
            yield "4.52.4", index, _attempt(reference.generated, client, on, ask)


def _by_itself(way: Any, on: Subject, ask: Ask) -> Any:
    """What a way gives for a request, whose adapter is the active one."""
    with runs.active_adapter(on.model, ask.adapter):
        return _attempt(way, on, ask.by_itself())


def _attempt(way: Any, *given: Any) -> Any:
    try:
        return way(*given)
    except Exception as error:
        return error
