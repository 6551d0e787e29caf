"""The Gumbel watermark against a version that runs the race token by token."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from descant.config.watermarking_config import GumbelWatermarkingConfig
from descant.core.context import Context, columns_from_rows
from descant.decoding.watermark import gumbel
from descant.decoding.watermark.gumbel import GumbelWatermarkLogitsProcessor, KeyedUniforms
from tests.unit.decoding.processors.reference import chance_scores, context, spoil, store

INF = float("inf")
ABOVE = gumbel._SMALL_VOCAB + 1  # a vocabulary whose lines are looked at one by one


# -------------------------------------------------------------------------- the slow version
def slow(row, prompt, line, settings):
    """The winner, or None where the line stays as it is, and by how much it won."""
    new, width = row[prompt:], settings.context_width
    now = new[len(new) - width :]
    before = [new[at : at + width] for at in range(len(new) - width)]
    if len(new) < width or now in before or max(line) == -INF:
        return None, INF
    race = KeyedUniforms(settings)
    words = race.context_states_on_host(np.array([now] * len(line)), settings.nonce)
    paces = -np.log1p(-race.token_uniforms(words, np.arange(len(line))))
    reached = [score - math.log(pace) for score, pace in zip(line, paces, strict=True)]
    second, first = sorted(reached)[-2:]
    return reached.index(first), first - second


def alone(winner, size):
    return [0.0 if token == winner else -INF for token in range(size)]


def chance_settings(rng):
    return GumbelWatermarkingConfig(
        rng.choice([5, 6, 2**62 + 1]), rng.choice([1, 2, 3, 20]), rng.randrange(3)
    )


def chance_row(rng, vocabulary, longest=30):
    """Tokens of a few sorts, some of the row copied from before, so that contexts come again."""
    few = min(vocabulary, rng.choice([1, 2, 3, 64]))
    row = [rng.randrange(few) for _ in range(rng.randint(1, longest))]
    return row + row[: rng.randint(0, len(row))] if rng.random() < 0.5 else row


@pytest.mark.parametrize("vocabulary", [2, 9, 64, ABOVE])
def test_the_winner_is_that_of_the_slow_race(vocabulary):
    rng, won, stayed = random.Random(vocabulary), 0, 0
    for _ in range(30 if vocabulary == ABOVE else 120):
        rows = [chance_row(rng, vocabulary) for _ in range(rng.randint(1, 12))]
        prompts = [rng.randint(0, len(row) // 2) for row in rows]
        marks = [{"watermark": chance_settings(rng)} for _ in rows]
        lines = [chance_scores(rng, vocabulary) for _ in rows]
        given, nan = spoil(rng, torch.tensor(lines))
        before = given.clone()
        found = GumbelWatermarkLogitsProcessor.make_unbound().process(
            context(rng, rows, prompts, marks), given
        )
        assert torch.equal(given.nan_to_num(7), before.nan_to_num(7))
        for at, row in enumerate(rows):
            if at == nan:
                assert found[at].isnan().all()
                continue
            winner, margin = slow(row, prompts[at], lines[at], marks[at]["watermark"])
            if winner is None:
                assert found[at].tolist() == lines[at]
                stayed += 1
            elif margin > 1e-4:
                assert found[at].tolist() == alone(winner, vocabulary)
                won += 1
    assert won > 20
    assert stayed > 20


@pytest.mark.parametrize("kept", [1, 7, 80, 600, 3000])
def test_every_way_to_the_winner_is_the_same(kept, monkeypatch):
    """All tokens that a device evaluates, the candidates, and the possible ones."""
    torch.manual_seed(kept)
    scores = 3 * torch.randn(24, 3000)
    scores = scores.masked_fill(scores < scores.topk(kept).values[:, -1:], -INF)
    ids, processor = torch.randint(0, 3000, (24, 9)), GumbelWatermarkLogitsProcessor(11, nonce=1)
    found = []
    for small, sparse in ((10**9, 1), (0, 10**9), (0, 0), (0, gumbel._SPARSE_RATIO)):
        monkeypatch.setattr(gumbel, "_SMALL_VOCAB", small)
        monkeypatch.setattr(gumbel, "_SPARSE_RATIO", sparse)
        found.append(processor(ids, scores))
    assert all(torch.equal(one, found[0]) for one in found)
    assert (found[0] == 0).sum(1).tolist() == [1] * 24
    assert (scores[found[0] == 0] > -INF).all()


@pytest.mark.parametrize("vocabulary", [8, ABOVE])
def test_lines_without_a_candidate_stay_unchanged(vocabulary):
    """The loop must see that there is no token, or no number."""
    scores = torch.randn(5, vocabulary)
    scores[0], scores[1], scores[2, 3], scores[3, 3] = -INF, torch.nan, torch.nan, INF
    found = GumbelWatermarkLogitsProcessor(3, 1, 0)(torch.arange(5)[:, None], scores)
    assert torch.equal(found[:4].nan_to_num(7, 8, 9), scores[:4].nan_to_num(7, 8, 9))
    assert (found[4] == 0).sum() == 1


def test_who_is_alone_wins_with_the_worst_luck():
    """Of all bits set, u is 1 in float32 and the pace without end."""
    race, token = KeyedUniforms(GumbelWatermarkingConfig(3, 1)), 700
    state = torch.tensor([[int(race._token_words(torch.device("cpu"), 2000)[token]) ^ 0x331DA083, 1]])
    assert race.vocab_uniforms(state, 2000)[0, token] == 1.0
    only = torch.full((1, 2000), -INF)
    only[0, token] = 1.5
    assert gumbel._gumbel_argmax(race, state, only).item() == token
    assert gumbel._gumbel_argmax_on_host(race, state, only, torch.tensor([[True]])).item() == token
    many = torch.full((1, 2000), -200.0)
    many[0, token] = 1.5
    assert gumbel._gumbel_argmax(race, state, many).item() == token
    assert gumbel._gumbel_argmax_on_host(race, state, many, torch.tensor([[True]])).item() == token


def test_a_context_is_new_tokens_only():
    scores = torch.randn(1, 50)
    text = [1, 2, 3, 4, 5]
    for prompt in range(6):
        processor = GumbelWatermarkLogitsProcessor(3, 2, 0, prompt_length=prompt)
        assert torch.equal(processor(torch.tensor([text]), scores), scores) == (prompt > 3)
    # Repetition of the prompt has no effect; repetition of new tokens has.
    again = torch.tensor([[4, 5, 1, 4, 5]])
    assert torch.equal(GumbelWatermarkLogitsProcessor(3, 2, 0)(again, scores), scores)
    marked = GumbelWatermarkLogitsProcessor(3, 2, 0, prompt_length=1)(again, scores)
    assert torch.equal(marked, GumbelWatermarkLogitsProcessor(3, 2, 0)(again[:, 3:], scores))
    assert not torch.equal(marked, scores)


def test_a_row_without_tokens_is_left_alone():
    for width in range(4):
        scores = torch.randn(2, 5)
        found = GumbelWatermarkLogitsProcessor(3)(torch.zeros(2, width, dtype=torch.long), scores)
        assert torch.equal(found, scores)
        assert found is not scores


def test_half_numbers_stay_half_numbers():
    scores = torch.randn(2, 60, dtype=torch.bfloat16)
    found = GumbelWatermarkLogitsProcessor(3, 1, 0)(torch.tensor([[3], [4]]), scores)
    assert found.dtype == torch.bfloat16
    assert (found == 0).sum(1).tolist() == [1, 1]


# -------------------------------------------------------------------------- nonces
def winners(settings, dice, lengths=(9,)):
    """The winners of the same context, for rows with those dice."""
    rng = random.Random(0)
    texts = [[*range(40, 40 + size), 1, 2] for size in lengths for _ in dice]
    marks = [{"watermark": settings, "processor_seed": one} for _ in lengths for one in dice]
    there = context(rng, texts, [0] * len(texts), marks)
    return (
        GumbelWatermarkLogitsProcessor.make_unbound()
        .process(there, torch.zeros(len(texts), 1000))
        .argmax(1)
        .tolist()
    )


def test_every_sequence_draws_its_nonce_and_keeps_it():
    given = [winners(GumbelWatermarkingConfig(9, 2, nonce), [1])[0] for nonce in range(16)]
    assert len(set(given)) == 16
    found = winners(GumbelWatermarkingConfig(9, 2), range(400))
    assert set(found) == set(given)
    counts = np.bincount([given.index(one) for one in found])
    assert counts.min() >= 8  # of 25 expected
    # At another place of the row it is the same.
    assert winners(GumbelWatermarkingConfig(9, 2), range(20), lengths=(9, 13))[:20] == found[:20]
    assert winners(GumbelWatermarkingConfig(9, 2), range(20), lengths=(9, 13))[20:] == found[:20]
    assert set(winners(GumbelWatermarkingConfig(9, 2, nonces=1), range(50))) == {given[0]}


def test_the_best_luck_is_a_nonce_too(monkeypatch):
    """In float32 the largest number below 1 may come out as 1."""
    monkeypatch.setattr(
        "descant.core.context.Context.uniform_per_sequence",
        lambda self, salt: torch.ones(len(self._length), 1),
    )
    assert winners(GumbelWatermarkingConfig(9, 2), [3]) == winners(GumbelWatermarkingConfig(9, 2, 15), [3])


def test_sequences_of_a_request_draw_apart():
    tokens = store(random.Random(0), [[3, 4]] * 60)
    marks = [{"watermark": GumbelWatermarkingConfig(9, 2), "processor_seed": 5}] * 60
    there = Context(
        tokens, torch.full((60,), 2), torch.zeros(60).long(), columns_from_rows(marks), slot=torch.arange(60)
    )
    found = GumbelWatermarkLogitsProcessor.make_unbound().process(there, torch.zeros(60, 1000)).argmax(1)
    assert len(set(found.tolist())) > 8


def test_by_hand_a_nonce_is_drawn_once():
    state = torch.get_rng_state()
    made = [GumbelWatermarkLogitsProcessor(9, nonces=4) for _ in range(200)]
    assert torch.equal(torch.get_rng_state(), state)
    assert {one.watermark.nonce for one in made} == {0, 1, 2, 3}
    ids, scores = torch.randint(0, 9, (3, 6)), torch.zeros(3, 500)
    assert torch.equal(made[0](ids, scores), made[0](ids, scores))
    assert GumbelWatermarkLogitsProcessor(9, nonce=77).watermark.nonce == 77


# -------------------------------------------------------------------------- the law of processors, and errors
