"""The replay of a trace of any method, without the model, gives the output of the method."""

from __future__ import annotations

import pytest
import torch

import descant
from descant import Trace, TraceError, Tracer
from descant.testing import failing_request
from descant.trace.records import RequestRecord, RowRecord, RunRecord, StepRecord, TraceHeader
from tests.contracts import methods, subjects
from tests.contracts.speculation import DRAFTERS, drafted, few_words, words
from tests.unit.trace.running import check, plain_values, run

METHODS = (*subjects.METHODS, *methods.METHODS, *methods.DECODER_ONLY)


def _requests(tiny, method, count=2):
    if method in subjects.METHODS:
        return subjects.of_method(tiny, method, count)
    return methods.of_method(tiny, method, count, new=5)


@pytest.mark.parametrize("method", METHODS)
def test_a_method_replays_to_what_it_returned_and_is_not_disturbed(tiny, method):
    model, given = tiny("llama").model, _requests(tiny("llama"), method)
    tracer = Tracer(top=3)
    found = run(model, given, tracer)
    assert plain_values(found) == plain_values(run(model, given))
    check(tracer.trace, found)


@pytest.mark.ci_cases("t5")
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_all_methods_in_one_table_come_late_fail_and_are_cancelled(tiny, name, tmp_path):
    model, given = tiny(name).model, methods.mixed(tiny(name))
    later = methods.mixed(tiny(name), seed=5)[::3]
    cancelled = [3, 8, len(given) + 3]
    tracer = Tracer(top=2)

    def doomed():
        return [*given, *(failing_request(one, 2) for one in given[:8])]

    found = run(model, doomed(), tracer, later, cancelled)
    assert plain_values(found) == plain_values(run(model, doomed(), None, later, cancelled))
    check(tracer.trace, found)
    assert sum(isinstance(one, str) for one in found.values()) > len(cancelled)
    again = Trace.load(tracer.trace.save(tmp_path / "trace.jsonl"))
    assert again.records == tracer.trace.records


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_replay_too(tiny, drafter, sampled):
    llama = tiny("llama")
    fields = {**few_words(llama), **drafted(llama.model, drafter), "max_new_tokens": 16}
    fields |= {"do_sample": True, "temperature": 1.5} if sampled else {}
    ids = torch.tensor([words(llama, 5), words(llama, 5)[::-1]])
    torch.manual_seed(3)
    plain = descant.generate(llama.model, ids, return_dict_in_generate=True, logprobs=0, **fields)
    torch.manual_seed(3)
    out = descant.generate(llama.model, ids, trace=True, logprobs=0, **fields)
    assert out.sequences.tolist() == plain.sequences.tolist()
    trace, tree = out.trace, out.trace.tree
    tried = accepted = 0
    for step in trace.steps:
        for row in step.rows:
            [run_] = row.runs
            assert run_.tokens[:-1] == row.drafts[: len(run_.tokens) - 1]
            assert len(row.looks) == len(run_.tokens)
            tried += len(row.drafts)
            ends = run_.reason is not None and run_.tokens == row.drafts[: len(run_.tokens)]
            accepted += len(run_.tokens) - (0 if ends else 1)
            for look, token in zip(row.looks, run_.tokens, strict=True):
                assert token in [one.token for one in look.top]
            if len(run_.tokens) <= len(row.drafts):  # the rejected draft is recorded
                assert row.drafts[len(run_.tokens) - 1] in [one.token for one in row.looks[-1].top]
    assert tried == sum(sum(one.drafted) for one in out.speculation)
    assert accepted == sum(sum(one.accepted) for one in out.speculation)
    assert accepted
    for number, result in trace.results.items():
        path, law = tree.path_to(result.sequences[0].leaf), out.logprobs[number]
        assert [node.token for node in path] == list(result.sequences[0].tokens)
        assert [node.raw for node in path] == pytest.approx(law.raw.tolist(), abs=1e-3)
        assert [node.processed for node in path] == pytest.approx(law.processed.tolist(), abs=1e-3)


@pytest.mark.parametrize("recipe", ["bayes-risk", "keep-thinking", "roll-back"])
def test_other_peoples_methods_replay_too(tiny, recipe):
    model = tiny("llama").model
    fields = {"recipe": recipe, "max_new_tokens": 12, "do_sample": recipe == "bayes-risk"}
    fields |= {"samples": 4} if recipe == "bayes-risk" else {}
    torch.manual_seed(1)
    plain = descant.generate(model, torch.tensor([[5, 9, 11]]), **fields)
    torch.manual_seed(1)
    out = descant.generate(model, torch.tensor([[5, 9, 11]]), trace=True, **fields)
    assert out.sequences.tolist() == plain.tolist()
    [result] = out.trace.results.values()
    [*_, last] = out.trace.replay()
    assert last.returned_sequences == {0: result.sequences}
    said = result.sequences[0]
    assert [node.token for node in out.trace.tree.path_to(said.leaf)] == list(said.tokens)
    assert list(said.tokens) == out.sequences[0, 3 : 3 + len(said.tokens)].tolist()


def test_beams_have_their_scores_and_sums(tiny):
    llama = tiny("llama")
    out = descant.generate(
        llama.model,
        torch.tensor([[5, 9, 11], [7, 3, 4]]),
        num_beams=4,
        num_return_sequences=3,
        max_new_tokens=9,
        length_penalty=0.7,
        output_scores=True,
        trace=True,
    )
    said = [one for _, result in sorted(out.trace.results.items()) for one in result.sequences]
    assert [one.score for one in said] == pytest.approx(out.sequences_scores.tolist(), abs=1e-3)
    sums: dict[int, float] = {}
    for moment in out.trace.replay():
        for one in moment.rows:
            path = out.trace.tree.path_to(one.node)
            assert one.score == pytest.approx(sum(node.processed for node in path), abs=2e-3)
            sums[one.node] = one.score
        for one in moment.finished_rows:
            path = out.trace.tree.path_to(one.node)
            total = sum(node.processed for node in path)
            assert one.score == pytest.approx(total / len(path) ** 0.7, abs=2e-3)
    assert len(sums) > 20


def test_a_row_that_stands_nowhere_is_an_error():
    header = TraceHeader("1", "Model", 10, 1, 4096)
    asked = RequestRecord(0, 0, (1,), "greedy search")
    lost = StepRecord(0, 0.0, (RowRecord(0, 7, runs=(RunRecord((3,), (8,)),)),))
    with pytest.raises(TraceError, match="node 7 of request 0"):
        list(Trace([header, asked, lost]).replay())
    back = StepRecord(0, 0.0, (RowRecord(0, 0, runs=(RunRecord((), (), back=1),)),))
    with pytest.raises(TraceError, match="must have one node per token"):
        list(Trace([header, asked, back]).replay())
