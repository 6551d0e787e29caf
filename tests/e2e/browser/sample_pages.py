"""Traces that no model made: of given texts in every place that a text can have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from descant.trace.records import (
    CandidateRecord,
    ChoiceRecord,
    ProcessorRecord,
    RequestRecord,
    ResultRecord,
    ReturnedSequence,
    RowRecord,
    RunRecord,
    StepRecord,
    TokenShift,
    TokenTexts,
    TraceHeader,
    TraceRecord,
)
from descant.trace.trace import Trace

FIRST = 1000  # the token of the first text


def of_texts(texts: Sequence[str]) -> Trace:
    """A trace whose first request writes every text as a token, drafts and could have chosen every other.

    Each text then names a request of its own: what was asked, what was set, who drafted and what went wrong.
    """
    return Trace(_records(list(texts)))


def again(trace: Trace, times: int) -> Trace:
    """A trace of one row whose steps come so many times, each time below what was there before."""
    steps, nodes = len(trace.steps), len(trace.tree.nodes) - 1
    records: list[TraceRecord] = [
        one for one in trace.records if not isinstance(one, ResultRecord | StepRecord)
    ]
    for time in range(times):
        for step in trace.steps:
            [row] = step.rows
            [run] = row.runs
            last = time + 1 == times
            run = replace(
                run,
                nodes=tuple(one + time * nodes for one in run.nodes),
                reason=run.reason if last else None,
            )
            row = replace(row, at=row.at + time * nodes, runs=(run,))
            records.append(replace(step, step=step.step + time * steps, rows=(row,)))
    [said] = trace.results[0].sequences
    said = replace(said, tokens=said.tokens * times, leaf=said.leaf + (times - 1) * nodes)
    return Trace([*records, ResultRecord(0, (said,))])


def _records(texts: list[str]) -> Iterator[TraceRecord]:
    tokens = [FIRST + place for place in range(len(texts))]
    yield TraceHeader("0", " | ".join(texts), FIRST + len(texts), top=8, limit=4_000_000)
    yield TokenTexts(dict(zip(tokens, texts, strict=True)), special=(tokens[0],))
    yield _request_record(0, 0, tokens, texts[0], {"prompt": texts[0]})
    yield from _token_steps(tokens, texts)
    yield ResultRecord(0, (ReturnedSequence(tuple(tokens), "length", len(tokens), -1.0),))
    for place, text in enumerate(texts, 1):
        root = len(tokens) + place
        yield _request_record(
            place, root, [tokens[place - 1]], text, {text: text, "many": [text, {text: [text]}]}
        )
        yield ResultRecord(place, error=text)


def _request_record(
    request: int, root: int, prompt: Sequence[int], text: str, config: dict[str, object]
) -> RequestRecord:
    return RequestRecord(request, root, tuple(prompt), text, config, (text, "Other"), drafter=text, demands=3)


def _token_steps(tokens: Sequence[int], texts: Sequence[str]) -> Iterator[TraceRecord]:
    """A step a token: the next two are drafted, and all of them could have been chosen."""
    for place, token in enumerate(tokens):
        around = [tokens[(place + by) % len(tokens)] for by in range(min(4, len(tokens)))]
        top = tuple(CandidateRecord(one, -1.0 - by, -0.5 - by) for by, one in enumerate(around))
        moved = tuple(TokenShift(one, -1.0 - by, -0.5 - by) for by, one in enumerate(around))
        look = ChoiceRecord(1.5, 1.0, top, (ProcessorRecord(texts[place], 4, 2, 0.25, moved),))
        run = RunRecord(
            (token,),
            (place + 1,),
            score=-1.0,
            met=1,
            reason=texts[place] if place + 1 == len(tokens) else None,
        )
        yield StepRecord(
            place,
            0.01,
            (RowRecord(0, place, looks=(look,), drafts=tuple(around[1:3]), runs=(run,)),),
            cache=1000,
        )
