"""A strategy of a third party that forks rows: all of its sequences are returned, and a stream gives them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import descant
from descant import ConfigError, GenerationConfig, InputError, RecipeError, Request, Session
from descant.engine.scheduling.config import SchedulerConfig
from descant.parts import Sampling
from descant.testing import check_recipe
from tests.support.markov_model import Chain


class Undeclared(Sampling):
    """Follows the two best tokens of every row, until a request has `most` sequences."""

    def __init__(self, noise, stop, rank_group=None, *, most=3):
        super().__init__(noise, stop, rank_group)
        self.most = most

    def select(self, rows, proposal, output):
        scores = output.logits[:, 0]
        best = scores.argmax(-1).tolist()
        counts = Counter(rows.request.tolist())
        for request in counts:
            counts[request] += len(self.finished_so_far(request))
        parents, slots, seconds = [], [], []
        for row in rows.slot.argsort().tolist():  # rows come in any order
            request = int(rows.request[row])
            parents.append(row)
            slots.append(int(rows.slot[row]))
            if counts[request] < self.most:
                seconds.append((len(parents), best[row]))
                parents.append(row)
                slots.append(counts[request])
                counts[request] += 1
        parents = torch.tensor(parents)
        scores = scores[parents]
        for row, token in seconds:
            scores[row, token] = -torch.inf
        return self.continue_rows(rows.take(parents).replace(slot=torch.tensor(slots)), scores, parents)


class Fork(Undeclared):
    """The same, with its most rows declared."""

    @staticmethod
    def params(config, most=3):
        return {"max_rows": most}


class Best(Fork):
    """Its longest sequence first."""

    def finish(self, request):
        return sorted(super().finish(request), key=lambda one: -len(one.tokens))


@pytest.fixture
def model(tiny):
    return tiny("llama").model


@pytest.fixture
def ids():
    return torch.randint(3, 60, (2, 6), generator=torch.Generator().manual_seed(5))


SETTINGS = {"max_new_tokens": 6, "eos_token_id": None}


def sequences_of(model, ids, recipe=Fork, **how):
    """The new tokens of each sequence of each prompt, by requests of a session."""
    config = GenerationConfig(**{**SETTINGS, **how})
    session = Session(model, scheduler=how.pop("scheduler", None))
    numbers = session.admit(*(Request(line, config, recipe=recipe) for line in ids))
    found = {event.request: event for event in session.drain() if isinstance(event, descant.Finished)}
    return [[one.tokens.tolist() for one in found[number].hypotheses] for number in numbers]


@pytest.mark.parametrize("how", [{}, {"do_sample": True, "seed": 3}, {"logprobs": 1}])
def test_all_sequences_are_returned(model, ids, how):
    expected = sequences_of(model, ids, **how)
    assert [len(group) for group in expected] == [3, 3]
    assert all(len(set(map(tuple, group))) == 3 for group in expected)
    called = descant.generate(
        model, ids, recipe=Fork, return_dict_in_generate=True, use_cache=True, trace=True, **SETTINGS, **how
    )
    assert called.sequence_counts == (3, 3)
    assert called.sequences[:, 6:].tolist() == [tokens for group in expected for tokens in group]
    assert called.sequences[:, :6].tolist() == ids.repeat_interleave(3, 0).tolist()
    assert called.past_key_values.get_seq_length() == 11
    continued = descant.generate(
        model, called.sequences, past_key_values=called.past_key_values, max_new_tokens=2, eos_token_id=None
    )
    again = descant.generate(model, called.sequences, max_new_tokens=2, eos_token_id=None)
    assert torch.equal(continued, again)


@pytest.mark.parametrize("how", [{}, {"do_sample": True, "seed": 3}])
def test_the_best_are_returned_where_a_number_is_asked_for(model, ids, how):
    everything = descant.generate(model, ids, recipe=Fork, **SETTINGS, **how)
    best = descant.generate(model, ids, recipe=Fork, num_return_sequences=2, **SETTINGS, **how)
    assert torch.equal(best, everything[[0, 1, 3, 4]])
    with pytest.raises(ConfigError, match=r"at most the 3 sequences that the recipe has found, got 4: leave"):
        descant.generate(model, ids, recipe=Fork, num_return_sequences=4, **SETTINGS, **how)


@pytest.mark.parametrize("recipe", [Fork, Best])
def test_a_stream_gives_each_sequence(model, ids, recipe):
    expected = sequences_of(model, ids, recipe)
    for how in ({}, {"scheduler": SchedulerConfig(num_blocks=16, block_size=4)}):
        told = [[[], [], []], [[], [], []]]
        for event in descant.stream(model, ids, recipe=recipe, **SETTINGS, **how):
            told[event.row][event.sequence] += event.token_ids
        assert told == expected


@pytest.mark.parametrize("most", [1, 3])
def test_it_fulfils_the_contracts(most):
    check_recipe(Fork, model=Chain.chance(17, seed=3), arguments={"most": most})


def test_rows_that_are_not_declared_are_refused_by_name(model, ids):
    said = r"`max_rows` must be the most rows .* it is 1, got 2: have its `params` return it"
    for call in (
        lambda: descant.generate(model, ids, recipe=Undeclared, **SETTINGS),
        lambda: list(descant.stream(model, ids, recipe=Undeclared, **SETTINGS)),
        lambda: check_recipe(Undeclared),
    ):
        with pytest.raises(InputError, match=said):
            call()
    config = GenerationConfig(**SETTINGS)
    session = Session(model)
    numbers = session.admit(Request(ids[0], config, recipe=Undeclared), Request(ids[1], config))
    ended = {event.request: event for event in session.drain() if not isinstance(event, descant.Tokens)}
    assert isinstance(ended[numbers[0]], descant.Failed)
    plain = descant.generate(model, ids[1:], **SETTINGS)
    assert ended[numbers[1]].hypotheses[0].tokens.tolist() == plain[0, 6:].tolist()


@pytest.mark.parametrize(
    ("recipe", "how", "error", "said"),
    [
        (Undeclared, {"num_return_sequences": 2}, ConfigError, r"greedy search with Undeclared.*`max_rows`"),
        (Fork, {"most": 0}, RecipeError, r"at least the 1 rows of `num_sequences`.*`max_rows` 0"),
        (Fork, {"return_dict_in_generate": True, "output_scores": True}, ConfigError, "`output_scores`"),
        (Fork, {"streamer": object()}, InputError, "`streamer` must be None with a recipe that forks"),
    ],
)
def test_what_it_cannot_do_is_refused(model, ids, recipe, how, error, said):
    with pytest.raises(error, match=said):
        descant.generate(model, ids, recipe=recipe, max_new_tokens=4, **how)
