"""The tracer: its records are correct, and the run is the same as without."""

from __future__ import annotations

import itertools
import math
import sys

import pytest
import torch

import descant
from descant import GenerationConfig, InputError, NotInThisVersion, Request, Session, Trace, Tracer
from tests.contracts.configs import tokenizer

PROMPT = torch.tensor([[5, 9, 11, 4]])
SAMPLED = {"do_sample": True, "temperature": 1.7, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.3}


def _law(scores: torch.Tensor) -> torch.Tensor:
    return scores.log_softmax(-1)


# ------------------------------------------------------------------------ the records are correct
@pytest.mark.parametrize("fields", [{}, SAMPLED, {"num_return_sequences": 3, **SAMPLED}])
def test_log_probabilities_are_those_that_logprobs_gives(tiny, fields):
    torch.manual_seed(4)
    out = descant.generate(
        tiny("llama").model, PROMPT, max_new_tokens=12, logprobs=3, trace=Tracer(top=5), **fields
    )
    said = out.trace.results[0].sequences
    assert [node.rank for node in (out.trace.tree.node(one.leaf) for one in said)] == list(range(len(said)))
    for law, one in zip(out.logprobs, said, strict=True):
        path = out.trace.tree.path_to(one.leaf)
        assert [node.token for node in path] == list(one.tokens)
        assert [node.raw for node in path] == pytest.approx(law.raw.tolist(), abs=1e-3)
        assert [node.processed for node in path] == pytest.approx(law.processed.tolist(), abs=1e-3)
        for node, top, raw in zip(path, law.top.tolist(), law.top_raw.tolist(), strict=True):
            known = {one.token: one.raw for one in node.choice.top}
            if not fields:  # likeliest before and after the processors are the same
                assert list(known)[:3] == top
            for token, value in zip(top, raw, strict=True):
                assert known.get(token, value) == pytest.approx(value, abs=1e-3)


def test_summaries_have_the_logits_before_and_after_processors(tiny):
    """Entropies, candidates and every stage, of the logits and the scores that the call returns."""
    torch.manual_seed(4)
    out = descant.generate(
        tiny("llama").model,
        PROMPT,
        max_new_tokens=8,
        output_scores=True,
        output_logits=True,
        trace=Tracer(top=5),
        **SAMPLED,
    )
    asked = out.trace.requests[0]
    assert list(asked.stages) == [
        "RepetitionPenaltyLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
    ]
    assert (asked.method, asked.prompt, asked.config["top_k"]) == ("sampling", (5, 9, 11, 4), 30)
    for step, logits, scores in zip(out.trace.steps, out.logits, out.scores, strict=True):
        [row] = step.rows
        [look] = row.looks
        raw, left = _law(logits[0]), _law(scores[0])
        entropy = [float(torch.special.entr(law.exp()).sum()) for law in (raw, left)]
        assert [look.entropy, look.left] == pytest.approx(entropy, abs=1e-3)
        best = [token for token in left.topk(5).indices.tolist() if left[token] > -math.inf]
        assert [one.token for one in look.top][: len(best)] == best
        assert row.runs[0].tokens[0] in [one.token for one in look.top]
        for one in look.top:
            assert one.raw == pytest.approx(float(raw[one.token]), abs=1e-3)
            assert one.processed == pytest.approx(float(left[one.token]), abs=1e-3)
        _check_stages(look, raw, left)


def _check_stages(look, raw, left):
    """Stages lead from the logits to the processed scores, each from the output of the one before."""
    first, last = look.stages[0].moved, look.stages[-1].moved
    for one in first:
        assert one.before == pytest.approx(float(raw[one.token]), abs=1e-3)
    for one in last:
        assert one.after == pytest.approx(float(left[one.token]), abs=1e-3)
    possible = len(raw)
    for stage in look.stages:
        assert stage.kept == possible - stage.cut
        assert [one.before for one in stage.moved] == sorted(
            (one.before for one in stage.moved), reverse=True
        )
        assert (stage.cut > 0) == any(one.after == -math.inf for one in stage.moved)
        assert (stage.cut > 0) == (stage.mass > 0)
        possible = stage.kept
    assert possible == int((left > -math.inf).sum())
    for before, after in zip(look.stages, look.stages[1:], strict=False):
        known = {one.token: one.after for one in before.moved}
        for one in after.moved:
            assert known.get(one.token, one.before) == pytest.approx(one.before, abs=1e-3)


def test_a_custom_processor_that_writes_into_its_scores_is_recorded(tiny):
    def without_best(input_ids, scores):
        scores[:, scores[0].argmax()] = -math.inf
        return scores

    out = descant.generate(
        tiny("llama").model,
        PROMPT,
        max_new_tokens=3,
        logits_processor=[without_best],
        output_logits=True,
        trace=True,
    )
    for step, logits in zip(out.trace.steps, out.logits, strict=True):
        [look] = step.rows[0].looks
        [stage] = look.stages
        raw, best = _law(logits[0]), int(logits[0].argmax())
        assert (stage.name, stage.cut, stage.kept) == ("without_best", 1, len(raw) - 1)
        assert stage.mass == pytest.approx(float(raw[best].exp()), abs=1e-3)
        assert stage.moved[0] == (best, pytest.approx(float(raw[best]), abs=1e-3), -math.inf)
        assert best not in [one.token for one in look.top]


@pytest.mark.parametrize(
    ("name", "fields"),
    [("ClassifierFreeGuidance", {"guidance_scale": 2.0}), ("DoLa", {"dola_layers": "low"})],
)
def test_a_wrapper_is_the_first_stage(tiny, name, fields):
    out = descant.generate(
        tiny("llama").model, PROMPT, max_new_tokens=5, repetition_penalty=1.5, trace=True, **fields
    )
    assert out.trace.requests[0].stages == (name, "RepetitionPenaltyLogitsProcessor")
    for look in (step.rows[0].looks[0] for step in out.trace.steps):
        # What DoLa leaves may have nothing that the penalty would move.
        assert [stage.name for stage in look.stages][: 1 if name == "DoLa" else 2] == (
            [name] if name == "DoLa" else [name, "RepetitionPenaltyLogitsProcessor"]
        )
        raw = {one.token: one.raw for one in look.top}
        for one in look.stages[0].moved:
            assert raw.get(one.token, one.before) == one.before


def test_groups_are_recorded_one_by_one(tiny):
    out = descant.generate(
        tiny("llama").model,
        PROMPT,
        max_new_tokens=6,
        num_beams=6,
        num_beam_groups=3,
        diversity_penalty=4.0,
        trace=Tracer(top=4),
    )
    first = out.trace.steps[0]
    assert [(row.at, row.slot) for row in first.rows] == [(0, 0), (0, 2), (0, 4)]
    assert [sum(run.reason is None for run in row.runs) for row in first.rows] == [2, 2, 2]
    rivals: set[int] = set()
    for number, row in enumerate(first.rows):
        [look] = row.looks
        # The first group has no rivals; to the others what was chosen before costs more.
        assert [stage.name for stage in look.stages] == ["HammingDiversityLogitsProcessor"][: number > 0]
        for one in look.top:
            assert (one.processed < one.raw - 1) == (one.token in rivals)
        rivals |= {run.tokens[0] for run in row.runs if run.reason is None}
    groups = {node.slot: node.group for node in out.trace.tree.nodes.values() if node.token is not None}
    assert groups == {slot: slot // 2 for slot in range(6)}
    for step in out.trace.steps[1:]:
        assert len({(row.at, row.slot) for row in step.rows}) == len(step.rows)


def test_constraints_are_counted(tiny):
    out = descant.generate(
        tiny("llama").model,
        PROMPT,
        max_new_tokens=9,
        num_beams=4,
        force_words_ids=[[20, 21], [30]],
        trace=True,
    )
    trace = out.trace
    assert trace.requests[0].demands == 3
    runs = [run for step in trace.steps for row in step.rows for run in row.runs]
    assert {run.met for run in runs} == {0, 1, 2, 3}
    for moment in trace.replay():
        for one in (*moment.rows, *moment.finished_rows):
            phrase = (20, 21) in itertools.pairwise(one.tokens)
            assert (one.met == 3) == (30 in one.tokens and phrase)
    assert trace.results[0].sequences[0].unmet == ()


def test_times_and_bytes_and_texts(tiny):
    out = descant.generate(
        tiny("llama").model, PROMPT, max_new_tokens=5, tokenizer=tokenizer(), trace=Tracer(top=2)
    )
    trace = out.trace
    assert trace.header.model == "LlamaForCausalLM"
    assert all(step.cache > 0 and 0 <= step.seconds < 60 for step in trace.steps)
    told = {5, 9, 11, 4, *(one.token for step in trace.steps for one in step.rows[0].looks[0].top)}
    assert trace.texts.keys() == told
    assert all(text == tokenizer().decode([token]) for token, text in trace.texts.items())
    bare = descant.generate(tiny("llama").model, PROMPT, max_new_tokens=5, trace=True).trace
    assert (bare.texts, bare.special_tokens) == ({}, frozenset())


# ------------------------------------------------------------------------ the run is as it is without
@pytest.mark.parametrize(
    "fields",
    [
        {},
        SAMPLED,
        {"num_return_sequences": 3, "do_sample": True},
        {"num_beams": 3, "do_sample": True, "temperature": 1.5},
        {"do_sample": True, "prompt_lookup_num_tokens": 3},
    ],
)
def test_torch_is_drawn_from_as_ever(tiny, fields):
    ids = torch.tensor([[5, 9, 11, 4], [7, 3, 3, 8]])
    found = []
    for trace in (None, True):
        torch.manual_seed(7)
        made = descant.generate(
            tiny("llama").model, ids, max_new_tokens=8, return_dict_in_generate=True, trace=trace, **fields
        )
        found.append((made.sequences.tolist(), torch.get_rng_state().tolist()))
    assert found[0] == found[1]


# ------------------------------------------------------------------------ how it is enabled
def test_a_traced_call_always_returns_an_output_object(tiny):
    model = tiny("llama").model
    plain = descant.generate(model, PROMPT, max_new_tokens=4)
    for asked in (True, Tracer(top=1)):
        out = descant.generate(model, PROMPT, max_new_tokens=4, return_dict_in_generate=False, trace=asked)
        assert out.sequences.tolist() == plain.tolist()
        assert isinstance(out.trace, Trace)
        assert out["trace"] is out.trace
    for asked in (None, False):
        out = descant.generate(model, PROMPT, max_new_tokens=4, return_dict_in_generate=True, trace=asked)
        assert out.trace is None
        assert "trace" not in out
        assert out._repr_html_() is None


def test_a_notebook_shows_the_pictures(tiny):
    out = descant.generate(tiny("llama").model, PROMPT, max_new_tokens=4, trace=True)
    assert out._repr_html_() == out.trace._repr_html_()
    assert out._repr_html_().startswith("<iframe")


def test_a_stream_and_a_session_have_it_as_it_grows(tiny):
    stream = descant.stream(tiny("llama").model, PROMPT, max_new_tokens=5, trace=True)
    next(stream)
    assert len(stream.trace.steps) == 1
    stream.close()
    assert stream.trace.results[0].error == "cancelled"
    assert descant.stream(tiny("llama").model, PROMPT, max_new_tokens=5).trace is None
    tracer = Tracer(tokenizer=tokenizer())
    session = Session(tiny("llama").model, trace=tracer)
    session.admit(Request([5, 9], GenerationConfig(max_new_tokens=2)))
    list(session.drain())
    assert session.trace.records == tracer.trace.records
    assert len(session.trace.steps) == 2
    assert session.trace.texts
    assert Session(tiny("llama").model).trace is None


def test_what_failed_can_be_looked_at(tiny):
    tracer = Tracer()
    with pytest.raises(descant.RowError) as caught:
        descant.generate(
            tiny("llama").model,
            PROMPT,
            max_new_tokens=8,
            eos_token_id=None,
            logits_processor=[lambda ids, scores: scores if ids.shape[1] < 7 else scores - math.inf],
            trace=tracer,
        )
    assert tracer.trace.results[0].error == str(caught.value)
    assert len(tracer.trace.steps) == 4
    assert not tracer.trace.steps[-1].rows[0].runs


def test_a_repeated_step_after_an_error_is_recorded_once(tiny):
    calls = []

    def broken(ids, scores):
        calls.append(len(calls))
        if len(calls) == 2:
            raise KeyboardInterrupt("once")  # an Exception would end its request
        return scores

    session = Session(tiny("llama").model, trace=Tracer())
    plain = Request([5, 9], GenerationConfig(max_new_tokens=4, num_beams=2))
    session.admit(plain, Request([5, 9], GenerationConfig(max_new_tokens=4), logits_processor=(broken,)))
    session.step()
    with pytest.raises(KeyboardInterrupt, match="once"):
        session.step()
    list(session.drain())
    assert [one.step for one in session.trace.steps] == [0, 1, 2, 3]
    assert len(list(session.trace.replay())) == 4
    assert session.trace.results.keys() == {0, 1}


@pytest.mark.parametrize("given", ["yes", 1, {"top": 3}, Tracer])
def test_anything_else_is_refused(tiny, given):
    with pytest.raises(InputError, match="`trace` must be True, False or a"):
        descant.generate(tiny("llama").model, PROMPT, trace=given)


@pytest.mark.parametrize(
    "fields", [{"top": 0}, {"top": True}, {"limit": 10}, {"limit": 1e6}, {"limit": 10**12}]
)
def test_bounds_must_make_sense(fields):
    with pytest.raises(InputError, match=f"`{next(iter(fields))}` must be"):
        Tracer(**fields)


def test_a_tracer_is_for_one_run(tiny):
    tracer = Tracer()
    with pytest.raises(InputError, match="none yet"):
        _ = tracer.trace
    descant.generate(tiny("llama").model, PROMPT, max_new_tokens=2, trace=tracer)
    with pytest.raises(InputError, match="a new Tracer"):
        descant.generate(tiny("llama").model, PROMPT, max_new_tokens=2, trace=tracer)
    with pytest.raises(InputError, match="a new Tracer"):
        Session(tiny("llama").model, trace=tracer)


def test_what_has_a_loop_of_its_own_is_refused(tiny):
    def own(model, input_ids=None, **others):
        return input_ids

    with pytest.raises(InputError, match="`trace` must be None with a recipe that is a function"):
        descant.generate(tiny("llama").model, PROMPT, recipe=own, trace=True)


@pytest.mark.parametrize("kind", ["whisper", "own generate", "latents"])
def test_a_model_that_calls_more_than_once_is_refused(tiny, monkeypatch, kind):
    monkeypatch.setattr(sys.modules["descant.api.generate"], "model_kind", lambda model: kind)
    with pytest.raises(NotInThisVersion, match="`trace` is not supported for LlamaForCausalLM"):
        descant.generate(tiny("llama").model, PROMPT, trace=True)


def test_where_must_be_known(tiny):
    trace = descant.generate(tiny("llama").model, PROMPT, max_new_tokens=2, trace=True).trace
    for draw in (trace.svg, trace.text):
        with pytest.raises(InputError, match="`steps` must be one of"):
            draw("tree", steps=3)
        with pytest.raises(InputError, match="`sequence` must be an int"):
            draw("tree", sequence="first")
