"""Allowed sequences: the trie against a list that is searched, and the rows that it steers."""

from __future__ import annotations

import copy
import pickle
import random
import time
from itertools import product

import numpy as np
import pytest
import torch

from descant import GenerationConfig, Request, Session
from descant.decoding.processors.allowed_sequences import AllowedSequences, AllowedSequencesLogitsProcessor
from descant.decoding.processors.bans import PrefixConstrainedLogitsProcessor
from descant.engine.session import Failed, Finished
from descant.errors import InputError, RowError
from tests.support.markov_model import Chain

VOCABULARY = 13
ENDS = [0, 12]


def random_sequences(seed, count=40, longest=5, vocabulary=VOCABULARY):
    """Sequences of few kinds of tokens, so that they share prefixes, are prefixes and repeat."""
    rng = random.Random(seed)
    few = rng.choice((2, 4, vocabulary - 2))
    return [
        [1 + rng.randrange(few) for _ in range(rng.randint(1, longest))] for _ in range(rng.randint(1, count))
    ]


def searched(sequences, ends, prefix):
    """What may follow, by looking through the list."""
    prefix, size = list(prefix), len(prefix)
    found = {one[size] for one in sequences if len(one) > size and one[:size] == prefix}
    return sorted(found | (set(ends) if prefix in sequences else set()))


# ------------------------------------------------------------------- the trie
@pytest.mark.parametrize("seed", range(12))
def test_it_allows_what_a_search_finds(seed):
    sequences = random_sequences(seed)
    trie = AllowedSequences(sequences, ENDS)
    for size in range(5):
        for prefix in product(range(5), repeat=size):
            assert trie.allowed(prefix) == searched(sequences, ENDS, prefix)
            assert (prefix in trie) == (list(prefix) in sequences)
    for one in sequences:
        assert one in trie
        assert trie.allowed(one) == searched(sequences, ENDS, one)
        assert trie.allowed([*one, 0]) == trie.allowed([*one, 12]) == []
        assert [*one, 0] not in trie
    assert len(trie) == len({tuple(one) for one in sequences})
    assert trie.depth == max(map(len, sequences))
    assert trie.min_vocab_size == 13
    assert trie.eos_token_id == ENDS


@pytest.mark.parametrize("seed", range(10))
def test_lists_arrays_and_tensors_are_the_same(seed):
    sequences = random_sequences(seed)
    wide = max(map(len, sequences)) + seed % 2
    padded = np.array([one + [-1] * (wide - len(one)) for one in sequences])
    closed = [[*one, 12] if at % 2 else one for at, one in enumerate(sequences)]
    tries = [
        AllowedSequences(given, ENDS)
        for given in (sequences, padded, padded.astype(np.int32), torch.tensor(padded), closed,
                      map(tuple, sequences), [np.array(one) for one in sequences])
    ]  # fmt: skip
    assert len({(repr(trie), trie._tokens.tobytes(), trie._offsets.tobytes()) for trie in tries}) == 1
    assert tries[0].nbytes == tries[0]._tokens.nbytes + tries[0]._offsets.nbytes


def test_a_million_sequences_take_seconds_and_megabytes():
    sequences = np.random.default_rng(0).integers(3, 32_000, (1_000_000, 8), dtype=np.int32)
    start = time.process_time()
    trie = AllowedSequences(sequences, 2)
    assert time.process_time() - start < 10
    assert len(trie) == 1_000_000
    assert trie.nbytes < 80e6
    assert all(one in trie for one in sequences[::50_000])
    other = np.random.default_rng(1).integers(3, 32_000, (20, 8))
    assert not any(one in trie for one in other)


def test_one_long_sequence_among_many_short_ones_takes_no_room():
    short = [[1 + at % 50, 1 + at // 50] for at in range(2_500)]
    trie = AllowedSequences([*short, [60] * 20_000], 0)
    assert trie.nbytes < 8 * (2_500 * 3 + 21_000)
    assert trie.allowed([60] * 19_999) == [60]
    assert trie.allowed([60] * 20_000) == [0]


def test_it_is_called_only_where_the_prompt_is_known():
    trie = AllowedSequences([[4, 5], [4, 6]], 2)
    with pytest.raises(InputError, match=r"`ids` must not include a prompt.*prefix_fn\(prompt_length\)"):
        trie(0, torch.tensor([9, 9, 4]))
    after = trie.prefix_fn(2)
    assert after(0, torch.tensor([9, 9, 4])) == [5, 6]
    assert after(3, [9, 9]) == [4]
    with pytest.raises(InputError, match="`ids` must start with the 2 tokens of the prompt"):
        after(0, [9])
    with pytest.raises(InputError, match="`prompt_length` must be an integer"):
        trie.prefix_fn(-1)
    scores = torch.randn(2, 9)
    ids = torch.tensor([[8, 8, 4], [8, 8, 4]])
    theirs = PrefixConstrainedLogitsProcessor(after, 2)(ids, scores)
    assert torch.equal(theirs, AllowedSequencesLogitsProcessor(trie, 2)(ids, scores))


def test_it_is_written_and_read(tmp_path):
    trie = AllowedSequences(random_sequences(3), ENDS)
    trie.save(tmp_path / "trie.safetensors")
    again = AllowedSequences.load(tmp_path / "trie.safetensors")
    through = pickle.loads(pickle.dumps(trie))
    for other in (again, through):
        assert repr(other) == repr(trie)
        assert other.eos_token_id == ENDS
        for size in range(4):
            for prefix in product(range(5), repeat=size):
                assert other.allowed(prefix) == trie.allowed(prefix)
    assert copy.deepcopy(trie) is copy.copy(trie) is trie


def test_a_file_of_something_else_is_refused(tmp_path):
    from safetensors.numpy import load_file, save_file

    path = tmp_path / "trie.safetensors"
    path.write_text("nothing")
    with pytest.raises(InputError, match="`path` must be a file written by `save`"):
        AllowedSequences.load(path)
    AllowedSequences([[1, 2], [1, 3]], 0).save(path)
    arrays = load_file(path)
    for broken in (
        {"offsets": arrays["offsets"][:-1]},
        {"offsets": arrays["offsets"][::-1].copy()},
        {"tokens": arrays["tokens"].astype(np.float32)},
        {"tokens": arrays["tokens"] - 5},
        {"widest": arrays["widest"] * 0},
        {"widest": arrays["widest"] + 10**12},
        {"widest": arrays["widest"][:-1]},
        {"tokens": arrays["tokens"][[0, 2, 1, 3, 4]]},
        {"eos_token_id": arrays["eos_token_id"] - 10**6},
        {"more": arrays["tokens"]},
    ):
        save_file({**arrays, **broken}, path)
        with pytest.raises(InputError, match="`path` must be a file written by `save`"):
            AllowedSequences.load(path)
    with pytest.raises(FileNotFoundError):
        AllowedSequences.load(tmp_path / "none")


@pytest.mark.parametrize(
    ("sequences", "ends", "words"),
    [
        ([], 2, "`sequences` must contain at least one sequence"),
        ([[1], []], 2, "`sequences` must have at least one token each"),
        ([[1], [2]], 2, "`sequences` must have at least one token each"),
        ([[1, 2, 3]], 2, "`sequences` must not contain the end token 2 before their end"),
        ([[1, 2, 2]], 2, "`sequences` must not contain the end token 2 before their end"),
        ([[1, -1]], 2, "`sequences` must contain token ids between 0 and 2147483647, got -1"),
        ([[1, 2**31]], 2, "`sequences` must contain token ids between 0 and 2147483647, got 2147483648"),
        ([[1, 1.5]], 2, "`sequences` must contain integers"),
        (["ab"], 2, "`sequences` must contain integers"),
        ([[[1]]], 2, "`sequences` must contain integers"),
        ([1, 3], 2, "`sequences` must be sequences of token ids"),
        (7, 2, "`sequences` must be sequences of token ids"),
        (np.array([1, 3]), 2, r"`sequences` must be an array \[N, L\]"),
        (np.array([[-1, 3]]), 2, "`sequences` must be padded on the right"),
        (np.array([[3, -2]]), 2, "`sequences` must contain token ids between 0 and 2147483647, got -2"),
        (np.array([[3.0]]), 2, "`sequences` must contain integers"),
        ([[1]], None, "`eos_token_id` must be at least one token id"),
        ([[1]], [], "`eos_token_id` must be at least one token id"),
        ([[1]], -1, "`eos_token_id` must be at least one token id"),
        ([[1]], 2.5, "`eos_token_id` must be at least one token id"),
    ],
)
def test_wrong_sequences(sequences, ends, words):
    with pytest.raises(InputError, match=words):
        AllowedSequences(sequences, ends)


@pytest.mark.parametrize("prefix", ["ab", [[1]], [1.5], None, True])
def test_wrong_prefixes(prefix):
    trie = AllowedSequences([[1]], 0)
    with pytest.raises(InputError, match="`prefix` must be a sequence of token ids"):
        trie.allowed(prefix)


# ------------------------------------------------------------------- the processor
def expected(scores, tries, prefixes):
    answer = torch.full_like(scores, -torch.inf)
    for line, (trie, prefix) in enumerate(zip(tries, prefixes, strict=True)):
        kept = trie.allowed(prefix)
        answer[line, kept] = scores[line, kept]
    return answer


@pytest.mark.parametrize("seed", range(10))
def test_by_hand_it_leaves_what_is_allowed(seed):
    chance, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    sequences = random_sequences(seed)
    trie = AllowedSequences(sequences, ENDS)
    for length in range(6):
        ids = torch.randint(0, 5, (9, 2 + length), generator=chance)
        for line in range(0, 9, 2):  # of which many go on with a sequence
            one = [*rng.choice(sequences), rng.choice(ENDS)][:length]
            ids[line, 2 : 2 + len(one)] = torch.tensor(one, dtype=torch.long)
        scores = torch.randn(9, VOCABULARY + 2, generator=chance)
        answer = AllowedSequencesLogitsProcessor(trie, 2)(ids, scores)
        assert torch.equal(answer, expected(scores, [trie] * 9, ids[:, 2:].tolist()))


def test_a_token_that_no_sequence_has_leads_nowhere():
    """Not even to its neighbour, the largest that one begins with."""
    trie = AllowedSequences([[6, 1], [2, 3]], 0)
    ids = torch.tensor([[6], [7], [8], [-1], [2]])
    answer = AllowedSequencesLogitsProcessor(trie)(ids, torch.zeros(5, 9))
    assert [line.isfinite().nonzero().flatten().tolist() for line in answer] == [[1], [], [], [], [3]]


# ------------------------------------------------------------------- in the loop
def config_of(**given):
    return GenerationConfig(**{"eos_token_id": 0, "pad_token_id": 0, "max_new_tokens": 7, **given})


def request(prompt, trie, **given):
    return Request(prompt, config_of(prefix_allowed_tokens_fn=trie, **given))


def brute(model, sequences, prompt):
    """The likeliest sequences with their scores, best first; the score counts the end."""
    scored = []
    for one in {tuple(one) for one in sequences}:
        total, last = 0.0, prompt[-1]
        for at, token in enumerate([*one, 0]):
            total += float(model.after(len(prompt) + at, last).log_softmax(-1)[token])
            last = token
        scored.append((total, [*one, 0]))
    return sorted(scored, reverse=True)


@pytest.mark.parametrize("seed", range(8))
def test_beams_find_the_best_of_all_sequences(seed):
    """As many beams as there are prefixes make the search exact."""
    model = Chain.chance(VOCABULARY, seed, spread=2.0)
    sequences = random_sequences(seed, count=14)
    trie = AllowedSequences(sequences, 0)
    count = len(trie)
    prompts = [[1], [2, 3, 4]]
    session = Session(model)
    made = {"num_beams": max(2, 40), "num_return_sequences": count, "length_penalty": 0.0}
    session.admit(*(request(prompt, trie, early_stopping="never", **made) for prompt in prompts))
    done = {event.request: event for event in session.drain() if isinstance(event, Finished | Failed)}
    for number, prompt in enumerate(prompts):
        found, best = done[number].hypotheses, brute(model, sequences, prompt)
        assert sorted(one.tokens.tolist() for one in found) == sorted(tokens for _, tokens in best)
        for one, (score, _) in zip(found, best, strict=True):
            assert one.score == pytest.approx(score, abs=1e-3)


@pytest.mark.parametrize("method", [{}, {"num_beams": 4}, {"do_sample": True, "seed": 3}])
def test_brought_along_it_does_the_same(method):
    """By hand it has no prompt length: the loop provides the prompt length of each row."""
    model = Chain.chance(VOCABULARY, 4)
    trie = AllowedSequences(random_sequences(4, count=60), 0)
    given = [AllowedSequencesLogitsProcessor(trie, 7)]
    found = []
    for both in (
        [request([1, 2], trie, **method), request([3], trie, **method)],
        [Request(prompt, config_of(**method), logits_processor=given) for prompt in ([1, 2], [3])],
    ):
        session = Session(model)
        session.admit(*both)
        ends = [event for event in session.drain() if isinstance(event, Finished)]
        ends.sort(key=lambda event: event.request)
        found.append([[one.tokens.tolist() for one in event.hypotheses] for event in ends])
    assert found[0] == found[1]
    assert all(one[:-1] in trie for many in found[0] for one in many)


def test_a_row_without_a_way_on_fails_alone():
    """Its prompt's config bans what its trie needs."""
    model = Chain.chance(VOCABULARY, 5)
    trie = AllowedSequences([[4, 5], [4, 6]], 0)
    session = Session(model)
    session.admit(request([1], trie, suppress_tokens=[5, 6]), request([1], trie))
    ends = {event.request: event for event in session.drain() if isinstance(event, Finished | Failed)}
    assert isinstance(ends[0].error, RowError)
    assert ends[1].hypotheses[0].tokens.tolist() in ([4, 5, 0], [4, 6, 0])
