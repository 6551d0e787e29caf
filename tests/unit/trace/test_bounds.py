"""The trace of a run of any length stays within its limit, and remains readable."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import descant
from descant import GenerationConfig, Request, Session, Trace, Tracer
from descant.core.records import Hypothesis
from descant.trace.records import RequestRecord, to_json_line
from tests.contracts.configs import tokenizer

IDS = torch.tensor([[5, 9, 11, 4], [7, 3, 3, 8]])


def _size(trace: Trace) -> int:
    return sum(len(to_json_line(one)) + 1 for one in trace.records)


def _generated(model, limit, **fields):
    ends = {"eos_token_id": None, "pad_token_id": 0}
    tracer = Tracer(limit=limit, tokenizer=tokenizer())
    out = descant.generate(model, IDS, trace=tracer, **ends, **fields)
    return out, out.trace


@pytest.mark.parametrize("fields", [{}, {"num_beams": 4, "num_return_sequences": 2}])
def test_first_details_go_then_steps_and_what_was_returned_stays(tiny, fields, tmp_path):
    out, trace = _generated(tiny("llama").model, 30_000, max_new_tokens=90, **fields)
    assert [one.what for one in trace.truncations] == ["details", "steps"]
    assert _size(trace) <= 30_000
    path = trace.save(tmp_path / "trace.jsonl")
    assert path.stat().st_size == _size(trace)
    assert Trace.load(path).records == trace.records
    details, steps = (one.step for one in trace.truncations)
    assert [one.step for one in trace.steps] == list(range(steps))
    for step in trace.steps:
        for row in step.rows:
            taken = {run.tokens[0] for run in row.runs}
            for look in row.looks:
                assert taken <= {one.token for one in look.top}
                assert len(look.top) == len(taken) or step.step < details
                assert len(look.top) <= 8 + len(taken)
                assert look.stages == () or step.step < details
    said = [one for _, result in sorted(trace.results.items()) for one in result.sequences]
    assert [list(one.tokens) for one in said] == [line[4:] for line in out.sequences.tolist()]
    for one in said:  # the leaf is where the record of it ends
        path_ = trace.tree.path_to(one.leaf)
        assert 0 < len(path_) <= steps
        assert [node.token for node in path_] == list(one.tokens[: len(path_)])
    assert list(trace.replay())[-1].returned_sequences.keys() == {0, 1}


@settings(max_examples=10, deadline=None)
@given(
    limit=st.integers(4096, 20_000),
    top=st.integers(1, 12),
    beams=st.sampled_from([1, 1, 3]),
    new=st.integers(1, 60),
    words=st.booleans(),
)
def test_no_trace_is_longer_than_its_limit(tiny, limit, top, beams, new, words):
    tracer = Tracer(top, limit, tokenizer() if words else None)
    session = Session(tiny("llama").model, trace=tracer)
    config = GenerationConfig(num_beams=beams, max_new_tokens=new, eos_token_id=None, pad_token_id=0)
    session.admit(*(Request(line.tolist(), config) for line in IDS))
    while len(session):
        session.step()
        assert _size(session.trace) <= limit
    _ = session.trace.tree
    assert all(one.tokens for result in session.trace.results.values() for one in result.sequences)
    assert sum(1 for _ in session.trace.replay()) == len(session.trace.steps)
    cuts = [one.what for one in session.trace.truncations]
    assert len(set(cuts)) == len(cuts)


def test_a_prompt_without_room_is_left_out_and_so_is_all_of_its_request(tiny):
    tracer = Tracer(limit=4096)
    session = Session(tiny("llama").model, trace=tracer)
    config = GenerationConfig(max_new_tokens=2)
    session.admit(Request([5] * 2000, config))
    session.admit(Request([5, 6], config))
    list(session.drain())
    assert _size(tracer.trace) <= 4096
    assert [one.what for one in tracer.trace.truncations] == ["requests"]
    assert tracer.trace.requests == {}
    assert tracer.trace.results == {}
    assert all(not step.rows for step in tracer.trace.steps)


def test_results_beyond_the_limit_are_omitted_and_recorded():
    tracer = Tracer(limit=4096)
    tracer.start_run("Model", 10)
    tracer.add_request(RequestRecord(0, 0, (1,), "greedy search"), "")
    tracer.record_result(0, [Hypothesis(torch.full((3000,), 7), "length")])
    tracer.add_request(RequestRecord(1, 0, (1,), "greedy search"), "")
    tracer.record_result(1, [Hypothesis(torch.tensor([7]), "length")])
    assert [one.what for one in tracer.trace.truncations] == ["results"]
    assert tracer.trace.results == {}
    assert _size(tracer.trace) <= 4096
