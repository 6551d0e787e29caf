"""Stopping criteria get the scores of all steps, where the call returns them."""

from __future__ import annotations

import pytest
import torch

import descant
from tests.unit.core.test_call_batch import ends, padded

SCORES = {"return_dict_in_generate": True, "output_scores": True}


class Watching(descant.StoppingCriteria):
    """Keeps what it is given, and ends rows that were certain of their last token."""

    def __init__(self, threshold: float = 2.0) -> None:
        self.threshold = threshold
        self.calls: list[tuple[torch.Tensor, tuple[torch.Tensor, ...] | None]] = []

    def __call__(self, input_ids, scores, **_):
        self.calls.append((input_ids.clone(), scores))
        if scores is None:
            return torch.zeros(len(input_ids), dtype=torch.bool)
        if not len(scores):
            return False
        return scores[-1].softmax(-1).amax(-1) > self.threshold


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": 3, "num_return_sequences": 2}])
def test_scores_are_those_of_the_output(options, tiny):
    one = tiny("llama")
    inputs = padded(one, (3, 5, 2))
    eos = ends(one, inputs)
    seen = Watching()
    out = descant.generate(
        one.model, **inputs, **SCORES, **options, max_new_tokens=9, eos_token_id=eos, stopping_criteria=[seen]
    )
    assert len(seen.calls) == len(out.scores)
    for number, (ids, scores) in enumerate(seen.calls):
        assert len(scores) == number + 1
        assert len(ids) == len(scores[0]) == len(out.sequences)
        for mine, wanted in zip(scores, out.scores, strict=False):
            assert torch.equal(mine, wanted)


def test_a_criterion_by_score_ends_the_rows_that_transformers_ends(tiny):
    one = tiny("llama")
    inputs = padded(one, (3, 5, 2))
    arguments = {**inputs, **SCORES, "max_new_tokens": 9, "eos_token_id": 2, "pad_token_id": 0}
    mine = descant.generate(one.model, **arguments, stopping_criteria=[Watching(0.5)])
    theirs = one.model.generate(**arguments, stopping_criteria=[Watching(0.5)])
    assert mine.sequences.tolist() == theirs.sequences.tolist()
    assert mine.sequences.shape[1] < 14


def test_beams_and_drafts_get_scores_too(tiny):
    one, ids = tiny("llama"), torch.tensor([[5, 6, 7, 5, 6]])
    for options in ({"num_beams": 2}, {"prompt_lookup_num_tokens": 2}, {"penalty_alpha": 0.5, "top_k": 3}):
        seen = Watching()
        descant.generate(one.model, ids, **SCORES, **options, max_new_tokens=6, stopping_criteria=[seen])
        for shown, scores in seen.calls:
            assert all(len(step) == len(shown) for step in scores[-2:])
        lengths = [len(scores) for _, scores in seen.calls]
        assert lengths == sorted(lengths)


def test_without_scores_a_criterion_gets_none(tiny):
    seen = Watching()
    descant.generate(tiny("llama").model, torch.tensor([[5, 6]]), max_new_tokens=3, stopping_criteria=[seen])
    assert {scores for _, scores in seen.calls} == {None}
