"""Eviction by attention, against lists that count votes one by one and a model that is recomputed."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from descant import GenerationConfig, Request
from descant.core.interfaces import KVSpan
from descant.errors import ConfigError, InputError, UnsupportedModel
from descant.kv_cache.stores.dense import DenseStore
from descant.kv_cache.stores.evicting import H2OStore, SnapKVStore
from descant.testing import outcomes
from tests.support.tiny_models import prompts


# ---------------------------------------------------------------------------- the rules, one number at a time
def snap_keeps(votes: list[float], budget: int, window: int, kernel: int) -> list[int]:
    """Which of the slots with these votes stay: the best of the means of neighbours, and the window."""
    free = len(votes) - window
    half = kernel // 2
    means = [sum(votes[max(0, at - half) : min(free, at + half + 1)]) / kernel for at in range(free)]
    best = sorted(range(free), key=lambda at: (-means[at], at))[: budget - window]
    return sorted(best) + list(range(free, len(votes)))


def heavy_keeps(votes: list[float], budget: int, recent: int) -> list[int]:
    """Which of the slots with these votes stay: the best, and the recent."""
    free = len(votes) - recent
    best = sorted(range(free), key=lambda at: (-votes[at], at))[: budget - recent]
    return sorted(best) + list(range(free, len(votes)))


# ---------------------------------------------------------------------------- a store of lists
HEADS = [(4, 2, 4, 4), (2, 1, 4, 2)]  # a layer: query heads, heads, size of keys, of values


@dataclass
class Entry:
    """A slot of one head, and what it has been looked at."""

    position: int
    key: Tensor
    value: Tensor
    score: float = 0.0


@dataclass
class Row:
    """A row: the slots of each head of each layer, and what was written since the last commit."""

    slots: list[list[list[Entry]]] = field(default_factory=lambda: [[[] for _ in range(h[1])] for h in HEADS])
    length: int = 0
    highest: int = 0
    reading: bool = True
    given: int = 0  # the most that a forward gave it, drafts aside
    sure: int = 0  # what a commit will not cut
    firm: int | None = None  # of the forward that it is fed by, how many are no drafts, where that matters
    new: list[list[tuple[Tensor, Tensor, Tensor]]] = field(default_factory=lambda: [[] for _ in HEADS])


class ListStore:
    """Slots as lists, votes counted one by one."""

    def __init__(self, budget: int, spared: int, kernel: int | None) -> None:
        self.budget, self.spared, self.kernel = budget, spared, kernel
        self.rows: list[Row] = []

    def write(self, row: int, layer: int, start: int, content: tuple[Tensor, Tensor, Tensor]) -> None:
        """Keys, values and queries [H, T, D] of a row from a position on."""
        mine = self.rows[row]
        fresh = mine.new[layer]
        del fresh[start - mine.length :]
        assert len(fresh) == start - mine.length
        fresh += list(zip(*(block.unbind(1) for block in content), strict=True))

    def seen(self, row: Row, layer: int, head: int, at: int) -> list[Entry]:
        """What the query at place `at` among the new ones sees."""
        new = [
            Entry(row.length + n, key[head], value[head])
            for n, (key, value, _) in enumerate(row.new[layer][: at + 1])
        ]
        return row.slots[layer][head] + new

    def looks(self, row: Row, layer: int, query_head: int, at: int) -> tuple[list[Entry], Tensor]:
        """The visible slots of a query, and their attention weights."""
        head = query_head // (HEADS[layer][0] // HEADS[layer][1])
        entries = self.seen(row, layer, head, at)
        if self.kernel is None and row.firm is not None and at >= row.firm:
            # A draft sees what is left when all before it are accepted.
            entries = [*self.heavy(row, layer, at)[head], entries[-1]]
        query = row.new[layer][at][2][query_head]
        logits = torch.stack([entry.key for entry in entries]) @ query / math.sqrt(len(query))
        return entries, logits.softmax(0)

    def heavy(self, row: Row, layer: int, count: int) -> list[list[Entry]]:
        """The slots of each head after so many new positions, committed together or draft by draft."""
        queries, heads, *_ = HEADS[layer]
        kept = [[replace(entry) for entry in head] for head in row.slots[layer]]
        firm = count if row.firm is None else min(row.firm, count)
        done = 0
        for size in [firm, *[1] * (count - firm)]:
            for at in range(done, done + size):
                for head in range(heads):
                    key, value, _ = row.new[layer][at]
                    kept[head].append(Entry(row.length + at, key[head], value[head]))
            for at in range(done, done + size):
                for head in range(queries):
                    _, weights = self.looks(row, layer, head, at)
                    for entry, weight in zip(
                        kept[head // (queries // heads)], weights.tolist(), strict=False
                    ):
                        entry.score += weight
            kept = [self.evicted(head, True) for head in kept]
            done += size
        return kept

    def attended(self, row: int, layer: int, at: int) -> Tensor:
        """What the query at place `at` finds [Hq, E]."""
        found = []
        for head in range(HEADS[layer][0]):
            entries, weights = self.looks(self.rows[row], layer, head, at)
            found.append(weights @ torch.stack([entry.value for entry in entries]))
        return torch.stack(found)

    def commit(self, parents: list[int], lengths: list[int]) -> None:
        """New rows out of old ones."""
        self.rows = [self.after(self.rows[p], length) for p, length in zip(parents, lengths, strict=True)]

    def after(self, row: Row, length: int) -> Row:
        """A row cut to a length, less what it can do without."""
        grown = length - row.length
        new = Row(length=length, highest=max(row.highest, length))
        piece = row.reading and min(grown, row.given) > 1
        new.reading = row.reading and (row.length == 0 or grown <= 0 or piece)
        for layer in range(len(HEADS)):
            if grown <= 0:
                kept = [[e for e in head if e.position < length] for head in row.slots[layer]]
            elif self.kernel is None:
                kept = self.heavy(row, layer, grown)
            else:
                kept = self.snap(row, layer, grown, piece)
            new.slots[layer] = [[replace(entry) for entry in head] for head in kept]
        return new

    def snap(self, row: Row, layer: int, grown: int, piece: bool) -> list[list[Entry]]:
        """The slots of each head after so many new positions."""
        queries, heads, *_ = HEADS[layer]
        kept = [
            [replace(e, score=0.0) for e in self.seen(row, layer, head, grown - 1)] for head in range(heads)
        ]
        for at in range(max(0, grown - self.spared), grown) if piece else ():
            for head in range(queries):
                _, weights = self.looks(row, layer, head, at)
                for entry, weight in zip(kept[head // (queries // heads)], weights.tolist(), strict=False):
                    entry.score += weight
        return [self.evicted(head, piece) for head in kept]

    def evicted(self, entries: list[Entry], piece: bool) -> list[Entry]:
        """What stays of a head's slots."""
        votes = [entry.score for entry in entries]
        if len(entries) <= self.budget or (self.kernel is not None and not piece):
            return entries
        if self.kernel is None:
            return [entries[at] for at in heavy_keeps(votes, self.budget, self.spared)]
        return [entries[at] for at in snap_keeps(votes, self.budget, self.spared, self.kernel)]


class Trial:
    """A store and lists with the same random operations."""

    def __init__(self, store: Any, lists: ListStore, data: st.DataObject) -> None:
        self.store, self.lists, self.data = store, lists, data
        self.random = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))

    def int(self, low: int, high: int) -> int:
        return self.data.draw(st.integers(low, high))

    def run(self) -> None:
        """Some steps."""
        self.extend()
        for _ in range(self.int(1, 7)):
            kind = self.int(0, 9)
            if kind == 0:
                self.extend()
            elif kind == 1:
                self.commit([0] * len(self.lists.rows))  # a row leaves between two steps
            elif kind == 2:
                self.whole()
            if self.lists.rows:
                self.step()
            self.check()

    def extend(self) -> None:
        count = self.int(1, 2)
        self.store.extend(count)
        self.lists.rows += [Row() for _ in range(count)]

    def step(self) -> None:
        """Forwards over disjoint rows, some of them tried twice, and a commit."""
        fed = [0] * len(self.lists.rows)
        group = [self.int(0, 2) for _ in fed]
        if self.int(0, 1):
            group = [1] * len(fed)
        for number in (1, 2):
            # Rows that begin are fed apart from those that have a past, as the loop does.
            for begins in (True, False):
                rows = [
                    row
                    for row, mine in enumerate(self.lists.rows)
                    if group[row] == number and (mine.length == 0) == begins
                ]
                if rows:
                    self.forwards(rows, fed)
        self.commit(fed)

    def forwards(self, rows: list[int], fed: list[int]) -> None:
        starts = [self.lists.rows[row].length for row in rows]
        kind = self.int(0, 5)
        if kind == 0:  # the first layer drafts ahead, twice, and all is written again
            real = self.forward(rows, starts, [0], self.int(1, 3))
            self.forward(rows, [a + b for a, b in zip(starts, real, strict=True)], [0], 1)
        elif kind == 1:  # two forwards, the second goes on from the first
            real = self.forward(rows, starts, [0, 1], self.int(1, 9))
            starts = [a + b for a, b in zip(starts, real, strict=True)]
        committed = kind != 1 and bool(self.int(0, 1))
        real = self.forward(rows, starts, [0, 1], self.int(1, 9) if self.int(0, 1) else 1, committed)
        for row, start, count in zip(rows, starts, real, strict=True):
            fed[row] = start + count - self.lists.rows[row].length

    def forward(
        self, rows: list[int], starts: list[int], layers: list[int], width: int, committed: bool = False
    ) -> list[int]:
        """One forward, of which each row has so many real positions; the rest is padding."""
        real = [self.int(1, width) for _ in rows]
        sure = [self.int(max(0, count - 4), count) for count in real]
        whole, level = len(rows) == len(self.lists.rows), len(set(starts)) == 1
        start = starts[0] if level else torch.tensor(starts)
        span = KVSpan(None if whole else torch.tensor(rows), start, width, max(starts) + width)
        if committed:
            span = span._replace(num_committed=torch.tensor(sure))
        for line, row in enumerate(rows):
            mine = self.lists.rows[row]
            mine.given = max(mine.given, sure[line] if committed else width)
            mine.firm = sure[line] if committed and not span.is_first_write else None
            mine.sure = starts[line] + sure[line] if committed else mine.length
        for layer in layers:
            queries, heads, size, wide = HEADS[layer]
            key, value, query = (
                torch.randn(len(rows), h, width, d, generator=self.random, dtype=torch.float64)
                for h, d in ((heads, size), (heads, wide), (queries, size))
            )
            reach = self.store.visible_slots(layer, span)
            held = torch.tensor(starts) if reach is None else reach.past_lengths
            shown = span.read_length if reach is None else reach.num_slots
            keys, values = self.store.update(layer, key, value, span)
            assert keys.shape[2] == values.shape[2] == shown
            mask = torch.arange(shown) <= held[:, None, None, None] + torch.arange(width)[:, None]
            plain = bool((held == shown - width).all()) and (width == 1 or span.is_first_write)
            options = {"is_causal": width > 1} if plain else {"attn_mask": mask}
            found = scaled_dot_product_attention(query, keys, values, enable_gqa=True, **options)
            for line, row in enumerate(rows):
                mine = (block[line] for block in (key, value, query))
                self.lists.write(row, layer, starts[line], tuple(mine))
                for at in range(real[line]):
                    place = starts[line] + at - self.lists.rows[row].length
                    expected = self.lists.attended(row, layer, place)
                    torch.testing.assert_close(found[line, :, at], expected, rtol=0, atol=1e-6)
        return real

    def commit(self, fed: list[int]) -> None:
        """Reorder, fork, drop and cut."""
        rows = self.lists.rows
        parents = list(range(len(rows)))
        moves = bool(self.int(0, 1))
        if moves and rows:
            parents = [self.int(0, len(rows) - 1) for _ in range(self.int(0, len(rows) + 1))]
        lengths = []
        for parent in parents:
            mine = rows[parent]
            mine.sure = mine.sure if fed[parent] else 0
            most = mine.length + fed[parent]
            back = self.int(0, 2)  # all of it; what was not committed before; as far as it goes
            least = (most, mine.length, max(0, mine.highest - self.store.max_rewind))[back]
            lengths.append(self.int(max(mine.sure, min(least, most)), most))
        self.store.commit(torch.tensor(parents).long() if moves else None, torch.tensor(lengths).long())
        self.lists.commit(parents, lengths)
        assert self.store.lengths.tolist() == lengths

    def whole(self) -> None:
        """Rows are copied into a store of their own, put below, saved and read again."""
        count = len(self.lists.rows)
        rows = [self.int(0, count - 1) for _ in range(self.int(0, 2))] if count else []
        self.store.join(self.store.select(torch.tensor(rows).long()))
        self.lists.rows += [copy.deepcopy(self.lists.rows[row]) for row in rows]
        state = self.store.state()
        assert all(block.is_contiguous() for block in state.values())
        self.store = self.store.select(torch.zeros(0).long())
        assert len(self.store) == 0
        self.store.load(state)

    def check(self) -> None:
        """Every head has the slots that the lists have, and the votes."""
        everyone = torch.arange(len(self.lists.rows))
        state = self.store.state()
        assert self.store.slot_counts.tolist() == [len(row.slots[0][0]) for row in self.lists.rows]
        for layer in self.store.layers:
            keys, values = self.store.read(layer, everyone)
            for line, row in enumerate(self.lists.rows):
                for head, entries in enumerate(row.slots[layer]):
                    if not entries:
                        continue
                    mine = slice(len(entries))
                    assert torch.equal(keys[line, head, mine], torch.stack([one.key for one in entries]))
                    assert torch.equal(values[line, head, mine], torch.stack([one.value for one in entries]))
                    if self.lists.kernel is None:
                        votes = state[f"score.{layer}"][line, head, mine].tolist()
                        assert votes == pytest.approx([one.score for one in entries], abs=1e-5)


@pytest.mark.ci_cases("heavy", "snap")
@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
@pytest.mark.parametrize(
    ("store", "lists"),
    [
        (lambda: SnapKVStore(6, 2, 3), (6, 2, 3)),
        (lambda: SnapKVStore(5, 5, 1), (5, 5, 1)),
        (lambda: H2OStore(6, 2), (6, 2, None)),
        (lambda: H2OStore(3, 3), (3, 3, None)),
    ],
    ids=["snap", "snap that keeps its window alone", "heavy", "heavy that keeps the recent alone"],
)
def test_any_history_leaves_what_lists_keep(store, lists, data):
    Trial(store(), ListStore(*lists), data).run()


# ---------------------------------------------------------------------------- a model, recomputed
Seen = list[list[list[list[int]]]]  # layer, head, position of a query: the positions that it sees


def recomputed(model: Any, tokens: list[int], seen: Seen) -> tuple[Tensor, list[Tensor]]:
    """A Llama read from its first token on: logits [T, V], and the attention mask [Hq, T, T] of each layer.

    Each query sees the given positions of each head and no others.
    """
    body, count = model.model, len(tokens)
    hidden = body.embed_tokens(torch.tensor([tokens]))
    cos, sin = body.rotary_emb(hidden, torch.arange(count)[None])
    looks = []
    for number, layer in enumerate(body.layers):
        part, normed = layer.self_attn, layer.input_layernorm(hidden)
        heads = [p(normed).view(count, -1, part.head_dim) for p in (part.q_proj, part.k_proj, part.v_proj)]
        query, key = (rotated(one, cos[0][:, None], sin[0][:, None]) for one in heads[:2])
        group = query.shape[1] // key.shape[1]
        out, weights = [], []
        for head in range(query.shape[1]):
            hidden_from = torch.full((count, count), -torch.inf)
            for at in range(count):
                hidden_from[at, seen[number][head // group][at]] = 0.0
            logits = query[:, head] @ key[:, head // group].T * part.scaling + hidden_from
            weights.append(logits.softmax(-1))
            out.append(weights[-1] @ heads[2][:, head // group])
        hidden = hidden + part.o_proj(torch.stack(out, 1).flatten(1))[None]
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        looks.append(torch.stack(weights))
    return model.lm_head(body.norm(hidden))[0], looks


def rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [T, H, D] turned by their positions."""
    first, second = heads.chunk(2, -1)
    return heads * cos + torch.cat((-second, first), -1) * sin


class Recomputing:
    """Greedy text of a model with eviction by a rule, recomputed for each token."""

    def __init__(self, model: Any, rule: Any, once: bool, window: int | None = None) -> None:
        self.model, self.rule, self.once, self.window = model, rule, once, window
        self.shape = model.config.num_hidden_layers, model.config.num_key_value_heads

    @torch.no_grad()
    def logits(self, prompt: list[int], new: list[int]) -> list[Tensor]:
        """The logits after the prompt and after each new token."""
        layers, heads = self.shape
        tokens = list(prompt)
        everything = [list(range(at + 1)) for at in range(len(tokens))]
        seen = [[[list(some) for some in everything] for _ in range(heads)] for _ in range(layers)]
        held = [[list(range(len(tokens))) for _ in range(heads)] for _ in range(layers)]
        votes = [[[0.0] * len(tokens) for _ in range(heads)] for _ in range(layers)]
        found, fresh = [], list(range(len(tokens)))
        for token in [*new, None]:
            logits, looks = recomputed(self.model, tokens, seen)
            found.append(logits[-1])
            self._forget(looks, held, votes, fresh)
            if token is None:
                break
            tokens.append(token)
            fresh = [len(tokens) - 1]
            for layer in range(layers):
                for head in range(heads):
                    held[layer][head].append(fresh[0])
                    votes[layer][head].append(0.0)
                    seen[layer][head].append(list(held[layer][head]))
        return found

    def _forget(self, looks: list[Tensor], held: Any, votes: Any, fresh: list[int]) -> None:
        if self.once and len(fresh) == 1:
            return
        voters = fresh if self.window is None else fresh[-self.window :]
        for layer, weights in enumerate(looks):
            group = len(weights) // self.shape[1]
            for head in range(self.shape[1]):
                mine = weights[head * group : (head + 1) * group, voters].sum((0, 1))
                for slot, position in enumerate(held[layer][head]):
                    votes[layer][head][slot] += float(mine[position])
                stay = self.rule(votes[layer][head])
                held[layer][head] = [held[layer][head][slot] for slot in stay]
                votes[layer][head] = [votes[layer][head][slot] for slot in stay]


BUDGET, RECENT, WINDOW, KERNEL = 14, 5, 4, 3


def snap_rule(votes: list[float]) -> list[int]:
    whole = len(votes) <= BUDGET
    return list(range(len(votes))) if whole else snap_keeps(votes, BUDGET, WINDOW, KERNEL)


def heavy_rule(votes: list[float]) -> list[int]:
    whole = len(votes) <= BUDGET
    return list(range(len(votes))) if whole else heavy_keeps(votes, BUDGET, RECENT)


KINDS = {
    "snap": (lambda: SnapKVStore(BUDGET, WINDOW, KERNEL), lambda m: Recomputing(m, snap_rule, True, WINDOW)),
    "heavy": (lambda: H2OStore(BUDGET, RECENT), lambda m: Recomputing(m, heavy_rule, False)),
}
LENGTHS = [40, 9, 23]


@pytest.fixture(params=list(KINDS))
def kind(request):
    return KINDS[request.param]


def equals_recomputed(reference: Recomputing, prompt: list[int], outcome: Any) -> int:
    """Logits at every step equal those of the model that is recomputed; how many steps that was."""
    longest: dict[tuple[int, ...], list[Tensor]] = {}
    for prefix in sorted(outcome.logits, key=len, reverse=True):
        new = prefix[len(prompt) :]
        known = next((found for text, found in longest.items() if text[: len(new)] == new), None)
        if known is None:
            known = longest[new] = reference.logits(prompt, list(new))
        torch.testing.assert_close(outcome.logits[prefix], known[len(new)], rtol=0, atol=1e-4)
    return len(outcome.logits)


def test_ragged_rows_equal_a_model_that_is_recomputed(tiny, kind):
    """Twenty greedy steps; two query heads share each head of keys."""
    one = tiny("llama", attn_implementation="sdpa")
    store, reference = kind[0](), kind[1](one.model)
    texts = prompts(one.arch, LENGTHS, 7)
    config = GenerationConfig(max_new_tokens=20, eos_token_id=None)
    found = outcomes(one.model, [Request(text, config) for text in texts], cache=store)
    for text, outcome in zip(texts, found, strict=True):
        assert equals_recomputed(reference, text, outcome) == 20
        assert (
            outcome.tokens[0] == [int(row.argmax()) for row in reference.logits(text, outcome.tokens[0])][:-1]
        )


@pytest.mark.parametrize(
    "method",
    [
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "seed": 5, "num_return_sequences": 3, "temperature": 1.5},
    ],
    ids=["beams", "samples"],
)
def test_forked_rows_equal_a_model_that_is_recomputed(tiny, kind, method):
    """Every row of a beam search keeps what its own past looked at, wherever it goes."""
    one = tiny("llama", attn_implementation="sdpa")
    reference = kind[1](one.model)
    texts = prompts(one.arch, LENGTHS[:3], 8)
    config = GenerationConfig(max_new_tokens=8, eos_token_id=None, **method)
    found = outcomes(one.model, [Request(text, config) for text in texts], cache=kind[0]())
    for text, outcome in zip(texts, found, strict=True):
        assert equals_recomputed(reference, text, outcome) > 12


def test_the_rule_matters(tiny, kind):
    """Another budget gives other logits, so that the tests above can fail."""
    one = tiny("llama", attn_implementation="sdpa")
    text = prompts(one.arch, LENGTHS[:1], 7)[0]
    config = GenerationConfig(max_new_tokens=4, eos_token_id=None)
    found = outcomes(one.model, [Request(text, config)], cache=DenseStore())[0]
    with pytest.raises(AssertionError, match="not close"):
        equals_recomputed(kind[1](one.model), text, found)


# ---------------------------------------------------------------------------- in a session


@pytest.mark.parametrize(
    ("size", "held"), [(20, [14, 14, 14, 14]), (3, [3, 6, 9, 12, *[14] * 17]), (63, [14])]
)
def test_a_prompt_in_pieces(tiny, size, held):
    """After each piece a row is cut down to its budget; what is written then stays."""
    one = tiny("llama", attn_implementation="sdpa")
    store = SnapKVStore(BUDGET, WINDOW, KERNEL)
    config = GenerationConfig(max_new_tokens=4, eos_token_id=None, prefill_chunk_size=size)
    text = prompts(one.arch, [63], 3)[0]
    seen: list[int] = []
    commit = store.commit
    store.commit = lambda *given: (commit(*given), seen.extend(store.slot_counts.tolist()))
    outcomes(one.model, [Request(text, config)], cache=store)
    assert seen == [*held, 15, 16, *seen[len(held) + 2 :]]


# ---------------------------------------------------------------------------- how much is kept
def feed(store: Any, width: int, start: int = 0, rows: list[int] | None = None) -> None:
    """A forward over all rows or some, at level."""
    count = len(store) if rows is None else len(rows)
    span = KVSpan(None if rows is None else torch.tensor(rows), start, width, start + width)
    reach = store.visible_slots(0, span)
    held = torch.full((count,), start) if reach is None else reach.past_lengths
    size = span.read_length if reach is None else reach.num_slots
    key, value, query = (torch.randn(count, heads, width, 8) for heads in (2, 2, 4))
    keys, values = store.update(0, key, value, span)
    mask = torch.arange(size) <= held[:, None, None, None] + torch.arange(width)[:, None]
    scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)


def test_a_row_holds_its_budget_and_not_more():
    heavy, snap, dense = H2OStore(16, 8), SnapKVStore(16, 8, 3), DenseStore()
    for store in (heavy, snap):
        store.extend(2)
        feed(store, 500)
        store.commit(None, torch.tensor([500, 450]))
        assert store.slot_counts.tolist() == [16, 16]
        for length in range(450, 460):
            feed(store, 1, length, [1])
            store.commit(None, torch.tensor([500, length + 1]))
    assert heavy.slot_counts.tolist() == [16, 16]
    assert snap.slot_counts.tolist() == [16, 26]
    dense.extend(2)
    block = torch.randn(2, 2, 500, 8)
    dense.update(0, block, block, KVSpan(None, 0, 500, 500))
    assert snap.nbytes < heavy.nbytes < dense.nbytes / 5


def test_a_prompt_that_comes_later_does_not_widen_the_rows_that_are_there():
    store = H2OStore(16)
    store.extend(30)
    feed(store, 20)
    store.commit(None, torch.full((30,), 20))
    before = store.nbytes
    store.extend(1)
    feed(store, 4000, 0, [30])
    one = 4000 * (2 * 2 + 4) * 8 * 4  # its keys, values and queries
    assert store.nbytes <= before + one
    store.commit(None, torch.tensor([20] * 30 + [4000]))
    assert store.nbytes <= 3 * before


def test_memory_of_rows_that_left_is_given_back():
    store = SnapKVStore(16, 8, 3)
    store.extend(40)
    feed(store, 100)
    store.commit(None, torch.full((40,), 100))
    before = store.nbytes
    store.commit(torch.tensor([7]), torch.tensor([100]))
    assert store.nbytes < before / 5


def test_a_fork_may_be_cut_between_what_two_forwards_wrote():
    """Each child has the votes of the queries that it still has."""
    store = H2OStore(10, 4)
    store.extend(1)
    feed(store, 2)
    feed(store, 1, 2)
    store.commit(torch.tensor([0, 0]), torch.tensor([3, 2]))
    votes = store.state()["score.0"].sum(-1)  # two query heads to a head, a vote for each query
    assert votes.tolist() == [pytest.approx([6.0, 6.0]), pytest.approx([4.0, 4.0])]


@pytest.mark.parametrize(("store", "spared"), [(H2OStore(10, 4), 4), (SnapKVStore(10, 3, 3), 3)])
def test_a_row_can_be_cut_by_what_is_never_forgotten(store, spared):
    store.extend(1)
    feed(store, 30)
    store.commit(None, torch.tensor([30]))
    assert store.max_rewind == spared
    keys = store.read(0, torch.tensor([0]))[0].clone()
    store.commit(None, torch.tensor([30 - spared]))
    assert store.slot_counts.tolist() == [10 - spared]
    assert torch.equal(store.read(0, torch.tensor([0]))[0], keys[:, :, : 10 - spared])
    with pytest.raises(InputError, match=f"must be >= {30 - spared} for row 0, .* got {29 - spared}"):
        store.commit(None, torch.tensor([29 - spared]))


def test_a_row_that_has_forgotten_nothing_can_be_cut_anywhere():
    store = H2OStore(10, 4)
    store.extend(1)
    feed(store, 9)
    store.commit(None, torch.tensor([9]))
    store.commit(None, torch.tensor([1]))
    assert store.slot_counts.tolist() == [1]


@pytest.mark.parametrize(
    "make", [lambda: H2OStore(10, 4), lambda: SnapKVStore(10, 3, 3)], ids=["heavy", "snap"]
)
def test_what_is_read_from_its_beginning_replaces_what_there_was(make):
    """Some models read everything again when a text has grown."""
    store = make()
    store.extend(2)
    feed(store, 30)
    store.commit(None, torch.tensor([30, 30]))
    feed(store, 6, 0, [1])
    feed(store, 1, 6, [1])
    store.commit(None, torch.tensor([30, 7]))
    assert store.slot_counts.tolist() == [10, 7]
    store.commit(None, torch.tensor([30, 1]))
    feed(store, 30, 0, [0])
    store.commit(None, torch.tensor([30, 1]))
    assert store.slot_counts.tolist() == [10, 1]


def test_a_model_that_looks_at_its_keys_in_another_way_is_refused():
    store = H2OStore(4)
    store.extend(1)
    keys, values = store.update(0, *torch.randn(2, 1, 2, 9, 8), KVSpan(None, 0, 9, 9))
    assert (keys @ values.transpose(2, 3)).shape == (1, 2, 9, 9)
    with pytest.raises(UnsupportedModel, match="attn_implementation='sdpa'"):
        store.commit(None, torch.tensor([9]))


def test_moved_to_another_device_it_goes_on():
    store = H2OStore(4, 2)
    store.extend(1)
    feed(store, 9)
    store.commit(None, torch.tensor([9]))
    store.to("meta")
    assert all(block.device.type == "meta" for name, block in store.state().items() if "." in name)
    assert store.lengths.tolist() == [9]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SnapKVStore(0), "`budget` must be an integer >= 1, got 0"),
        (lambda: SnapKVStore(16), "`window` must be at most `budget`, 16, got 32"),
        (lambda: SnapKVStore(64, kernel=4), "`kernel` must be odd, got 4"),
        (lambda: SnapKVStore(64, window=True), "`window` must be an integer >= 1, got True"),
        (lambda: H2OStore(1.5), "`budget` must be an integer >= 1, got 1.5"),
        (lambda: H2OStore(8, 9), "`recent` must be at most `budget`, 8, got 9"),
        (lambda: H2OStore(8, 0), "`recent` must be an integer >= 1, got 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ConfigError) as error:
        make()
    assert str(error.value) == message
