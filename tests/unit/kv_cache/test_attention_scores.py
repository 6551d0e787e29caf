"""The attention that slots get: the same sum whatever number of weights is computed at once."""

from __future__ import annotations

import pytest
import torch

from descant.core.interfaces import KVSpan
from descant.kv_cache.attention import attention_scores
from descant.kv_cache.attention.attention_proxy import AttentionCall
from descant.kv_cache.attention.attention_scores import PendingWrite, ScoringQueries, WriteRegion, score_slots

ROWS, HEADS, QUERY_HEADS, LENGTH, SIZE = 2, 2, 4, 6, 4


def prompt_write(query):
    """A prompt of `LENGTH` tokens in every row, attended by its own queries."""
    zeros = torch.zeros(ROWS, dtype=torch.long)
    region = WriteRegion(KVSpan(None, 0, LENGTH, LENGTH), torch.arange(ROWS), zeros, zeros, LENGTH)
    write = PendingWrite(region)
    write.record_queries(AttentionCall(query=query, mask=None, is_causal=True, scale=None), 0)
    return write


@pytest.mark.parametrize("stops", [[6, 6], [6, 4]])
@pytest.mark.parametrize("queries_at_once", [1, 2, 4, 100])
def test_weights_are_summed_in_parts_of_bounded_size(monkeypatch, stops, queries_at_once):
    torch.manual_seed(0)
    query, keys = torch.randn(ROWS, QUERY_HEADS, LENGTH, SIZE), torch.randn(ROWS, HEADS, LENGTH, SIZE)
    limit = queries_at_once * ROWS * QUERY_HEADS * LENGTH
    sizes = []
    compute = attention_scores.attention_weights

    def spy(*arguments):
        weights = compute(*arguments)
        sizes.append(weights.numel())
        return weights

    monkeypatch.setattr(attention_scores, "_MAX_WEIGHTS", limit)
    monkeypatch.setattr(attention_scores, "attention_weights", spy)
    rows = torch.arange(ROWS)
    scoring = ScoringQueries(0, rows, rows, None, torch.tensor([2, 2]), torch.tensor(stops))
    found = score_slots(prompt_write(query), scoring, keys)

    logits = query @ keys.repeat_interleave(QUERY_HEADS // HEADS, 1).transpose(2, 3) / SIZE**0.5
    weights = logits.masked_fill(~torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
    expected = torch.stack([row[:, 2:stop].sum(1) for row, stop in zip(weights, stops, strict=True)])
    torch.testing.assert_close(found, expected.view(ROWS, HEADS, -1, LENGTH).sum(2))
    assert max(sizes) <= limit
    assert len(sizes) == -(-4 // queries_at_once)
