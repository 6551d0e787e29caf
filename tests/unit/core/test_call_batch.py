"""User code that keeps state by the index of a row: it is shown the batch that it saw first."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import descant
from tests.support.tiny_models import prompts

NEW = 10


class Recorded:
    """A processor that changes nothing and keeps what it is shown."""

    def __init__(self) -> None:
        self.shown: list[list[list[int]]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert len(input_ids) == len(scores)
        self.shown.append(input_ids.tolist())
        return scores


def padded(tiny: Any, lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    rows = prompts(tiny.arch, lengths, seed=3)
    width = max(map(len, rows))
    ids = torch.tensor([[tiny.pad] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def ends(tiny: Any, inputs: dict[str, torch.Tensor], **more: Any) -> list[int]:
    """End tokens that stop the first two rows at different steps."""
    free = descant.generate(tiny.model, **inputs, max_new_tokens=NEW, eos_token_id=None, **more)
    width = inputs["input_ids"].shape[1]
    return [int(row[width + 2 + 3 * number]) for number, row in enumerate(free[:2])]


@pytest.mark.parametrize("options", [{}, {"num_return_sequences": 2, "do_sample": True, "top_k": 4}])
def test_what_a_processor_sees_is_what_transformers_shows(tiny, options):
    one = tiny("llama")
    inputs = padded(one, (3, 5, 2))
    torch.manual_seed(1)
    eos = ends(one, inputs, **options)
    arguments = {**inputs, "max_new_tokens": NEW, "eos_token_id": eos, "pad_token_id": one.pad, **options}
    ours, theirs = Recorded(), Recorded()
    torch.manual_seed(1)
    mine = descant.generate(one.model, **arguments, logits_processor=[ours])
    torch.manual_seed(1)
    wanted = one.model.generate(**arguments, logits_processor=[theirs])
    assert mine.tolist() == wanted.tolist()
    assert len({tuple(row).index(one.pad) if one.pad in row else -1 for row in mine[:, 5:].tolist()}) > 1
    assert ours.shown == theirs.shown


def test_a_criterion_with_state_by_row_is_shown_the_same_batch(tiny):
    one = tiny("llama")
    inputs = padded(one, (3, 5, 2))
    arguments = {**inputs, "max_new_tokens": NEW, "eos_token_id": ends(one, inputs), "pad_token_id": one.pad}

    class Sizes(descant.StoppingCriteria):
        def __init__(self) -> None:
            self.shown: list[list[list[int]]] = []

        def __call__(self, input_ids, scores, **_):
            self.shown.append(input_ids.tolist())
            return torch.zeros(len(input_ids), dtype=torch.bool)

    ours, theirs = Sizes(), Sizes()
    descant.generate(one.model, **arguments, stopping_criteria=[ours])
    one.model.generate(**arguments, stopping_criteria=[theirs])
    assert ours.shown == theirs.shown


def test_each_request_of_a_session_sees_its_own_sequences(tiny):
    one = tiny("llama")
    config = descant.GenerationConfig(
        do_sample=True, num_return_sequences=3, max_new_tokens=NEW, seed=5, eos_token_id=list(range(3, 30))
    )
    alone = Recorded()
    session = descant.Session(one.model)
    session.admit(descant.Request([5, 6, 7], config, logits_processor=[alone]))
    list(session.drain())
    sizes = {len(rows) for rows in alone.shown}
    assert sizes == {3}
    beside = Recorded()
    session = descant.Session(one.model)
    session.admit(descant.Request([9, 8], descant.GenerationConfig(max_new_tokens=NEW)))
    session.admit(descant.Request([5, 6, 7], config, logits_processor=[beside]))
    list(session.drain())
    assert beside.shown == alone.shown


def test_requests_that_share_a_processor_are_shown_apart(tiny):
    one = tiny("llama")

    class Avoiding(Recorded):
        """Lowers tokens by the last one of a row."""

        def __call__(self, input_ids, scores):
            scores = super().__call__(input_ids, scores).clone()
            for row, ids in zip(scores, input_ids.tolist(), strict=True):
                row[ids[-1] % 5 :: 5] -= 5.0
            return scores

    requests = [([5, 6, 7], 2), ([9, 8, 4], 3)]

    def run(*chosen):
        processor, session = Avoiding(), descant.Session(one.model)
        configs = [
            descant.GenerationConfig(do_sample=True, num_return_sequences=count, max_new_tokens=4, seed=count)
            for _, count in chosen
        ]
        for (prompt, _), config in zip(chosen, configs, strict=True):
            session.admit(descant.Request(prompt, config, logits_processor=[processor]))
        finished = {event.request: event for event in session.drain() if isinstance(event, descant.Finished)}
        tokens = [
            [found.tokens.tolist() for found in finished[number].hypotheses] for number in sorted(finished)
        ]
        return tokens, processor.shown

    alone = [run(request) for request in requests]
    tokens, shown = run(*requests)
    assert tokens == [found for ((found,), _) in alone]
    assert sorted(shown) == sorted(part for _, parts in alone for part in parts)


def test_beams_and_drafts_are_shown_as_they_run(tiny):
    one = tiny("llama")
    inputs = padded(one, (3, 5))
    for options in ({"num_beams": 2}, {"prompt_lookup_num_tokens": 2}):
        seen = Recorded()
        plain = descant.generate(one.model, **inputs, max_new_tokens=5, **options)
        kept = descant.generate(one.model, **inputs, max_new_tokens=5, **options, logits_processor=[seen])
        assert kept.tolist() == plain.tolist()
        assert seen.shown
