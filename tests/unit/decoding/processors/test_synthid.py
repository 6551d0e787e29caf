"""SynthID's processor against a version that plays the rounds token by token, and by its own laws."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from descant.config.watermarking_config import SynthIDTextWatermarkingConfig
from descant.core.context import Context
from descant.decoding.watermark.keys import PublicKeyWarning
from descant.decoding.watermark.synthid import (
    SynthIDTextWatermarkLogitsProcessor,
    get_tournament,
    sampling_table,
)
from descant.errors import ConfigError, InputError
from tests.unit.decoding.processors.reference import chance_scores, context, softmax, spoil

WORD = 2**64
LOWEST = torch.finfo(torch.float32).min


def settings(**given):
    known = {"ngram_len": 3, "keys": (91, -7, 2**40 + 5, 65_530), "sampling_table_seed": 5, **given}
    return SynthIDTextWatermarkingConfig(**known)


def make_processor(**given):
    known = settings(**given)
    return SynthIDTextWatermarkLogitsProcessor(**known.to_dict(), device="cpu")


# -------------------------------------------------------------------------- the slow version
def slow(row, prompt, line, known):
    """The law after the rounds in float64, or None where the line stays as it is."""
    width, new = known.ngram_len - 1, row[prompt:]
    padded = [0] * width + new
    contexts = [padded[at : at + width] for at in range(len(new) + 1)]
    first = width if known.skip_first_ngram_calls else 0
    if len(new) < first or contexts[-1] in contexts[:-1][first:][-known.context_history_size :]:
        return None
    law = softmax([1.0] * len(line) if known.debug_mode else line)
    table = sampling_table(known.sampling_table_size, known.sampling_table_seed).tolist()
    for key in known.keys:
        coins = [table[hashed([*contexts[-1], token, key]) % len(table)] for token in range(len(line))]
        share = sum(p for p, coin in zip(law, coins, strict=True) if coin)
        law = [p * (1 + coin - share) for p, coin in zip(law, coins, strict=True)]
    return law


def hashed(numbers):
    value = 1
    for one in numbers:
        value = ((value + one) * 6364136223846793005 + 1) % WORD
    return value - WORD if value >= WORD // 2 else value


def same(answer, line, law):
    """Whether an answer is the law's logarithms, or, without a law, the line itself."""
    if law is None:
        return answer.tolist() == line
    return np.allclose(answer.double().exp().numpy(), law, rtol=1e-4, atol=1e-6)


KINDS = [
    settings(),
    settings(ngram_len=2, sampling_table_size=64),
    settings(skip_first_ngram_calls=True, context_history_size=2),
    settings(keys=(4,), sampling_table_size=99),
    settings(ngram_len=6, debug_mode=True),
]


def possible(rng, vocabulary):
    """A line of scores that leaves something to choose."""
    line = chance_scores(rng, vocabulary)
    return line if max(line) > -math.inf else possible(rng, vocabulary)


def test_every_line_by_its_own_settings():
    rng, marked, kept = random.Random(3), 0, 0
    for _ in range(40):
        kinds = [rng.choice(KINDS) for _ in range(6)]
        rows = [[rng.randrange(3) for _ in range(rng.randint(1, 12))] for _ in kinds]
        prompts = [rng.randint(0, len(row)) for row in rows]
        lines = [possible(rng, 17) for _ in kinds]
        given = context(rng, rows, prompts, [{"watermark": kind} for kind in kinds])
        answers = SynthIDTextWatermarkLogitsProcessor.make_unbound().process(given, torch.tensor(lines))
        for answer, row, prompt, line, kind in zip(answers, rows, prompts, lines, kinds, strict=True):
            law = slow(row, prompt, line, kind)
            assert same(answer, [1.0] * len(line) if kind.debug_mode else line, law)
            marked, kept = marked + (law is not None), kept + (law is None)
    assert min(marked, kept) > 30


@pytest.mark.parametrize("size", [2**16, 1000])
@pytest.mark.parametrize("kept", [None, 1, 40])
def test_wide_vocabularies(size, kept):
    """Few tokens left, each line alone, or hashed token by token: the law is that of the slow version."""
    rng, draw, size_of = random.Random(size), torch.Generator().manual_seed(size), 5000
    scores = 3 * torch.randn(4, size_of, generator=draw)
    if kept is not None:
        scores = scores.masked_fill(scores < scores.topk(kept).values[:, -1:], -torch.inf)
    known, rows = settings(sampling_table_size=size), [[7, 8], [7, 8, 9], [5, 6, 5, 6], [1]]
    before = scores.clone()
    given = context(rng, rows, [0, 1, 0, 1], [{"watermark": known}] * 4)
    answers = SynthIDTextWatermarkLogitsProcessor.make_unbound().process(given, scores)
    assert torch.equal(scores, before)
    for answer, row, prompt, line in zip(answers, rows, [0, 1, 0, 1], scores.tolist(), strict=True):
        law = slow(row, prompt, line, known)
        assert same(answer, line, law)
        assert (law is None) == (row == [5, 6, 5, 6])
        if law is not None:
            assert answer.isfinite().all()
            assert (answer[scores[0] == -torch.inf] <= 0).all()


def test_over_all_keys_the_law_is_what_it_was():
    """Each coin is a one under as many keys as the table has ones: on average nothing is preferred."""
    table_size, line = 8, torch.tensor([[0.3, -1.0, 2.0, -torch.inf, 0.0]])
    keys = [(first, second) for first in range(table_size) for second in range(table_size)]
    laws = []
    for both in keys:
        processor = make_processor(keys=both, sampling_table_size=table_size)
        laws.append(processor(torch.tensor([[4, 1]]), line).softmax(1))
    assert torch.stack(laws).mean(0).numpy() == pytest.approx(line.softmax(1).numpy(), abs=1e-6)
    assert max(float((law - line.softmax(1)).abs().max()) for law in laws) > 0.1


def test_a_certain_token_stays_certain():
    line = torch.full((1, 30), -torch.inf)
    line[0, 3] = 1.0
    answer = make_processor()(torch.tensor([[1]]), line)
    assert answer[0, 3] == pytest.approx(0.0, abs=1e-6)
    assert (answer[0, [0, 29]] == LOWEST).all()


@pytest.mark.parametrize("vocabulary", [30, 5000])
def test_broken_lines_leave_the_others_unchanged(vocabulary):
    """A line without a possible token, or with no numbers, must not become one with even chances."""
    rng, scores = random.Random(6), torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(1))
    scores[1] = -torch.inf
    processor, ids = make_processor(), torch.tensor([[1], [2], [3], [4]])
    whole = processor(ids, scores)
    assert not whole[1].max().isfinite()
    broken, at = spoil(rng, scores)
    answer = make_processor()(ids, broken)
    assert answer[at].isnan().any()
    rest = [line for line in range(4) if line not in (1, at)]
    assert torch.equal(answer[rest], whole[rest])


# ----------------------------------------------------------------------------------- by hand
def test_by_hand_a_text_goes_on_while_it_grows_by_a_token():
    processor, line = make_processor(), torch.randn(1, 30, generator=torch.Generator().manual_seed(2))
    ids = torch.tensor([[11, 12, 13]])
    outputs = []
    for token in (5, 6, 7):
        outputs.append(processor(ids, line))
        ids = torch.cat((ids, torch.tensor([[token]])), 1)
    wanted = [slow([11, 12, 13, 5, 6, 7][: 3 + step], 3, line[0].tolist(), settings()) for step in range(3)]
    assert all(same(found[0], line[0].tolist(), law) for found, law in zip(outputs, wanted, strict=True))
    assert not torch.equal(outputs[0], outputs[1])

    again = processor(torch.tensor([[11, 12, 13]]), line)  # shorter: another text
    assert torch.equal(again, outputs[0])
    other = processor(torch.tensor([[11, 12, 13, 5]] * 2), line.expand(2, -1))  # another batch
    assert torch.equal(other, outputs[0].expand(2, -1))
    processor(torch.tensor([[11, 12, 13]]), line)
    jumped = processor(torch.tensor([[11, 12, 13, 5, 6]]), line)
    assert torch.equal(jumped, outputs[0])


def test_by_hand_and_in_the_loop_are_one():
    """A processor that was called by hand follows the rows like a fresh one."""
    processor, ids = make_processor(), torch.tensor([[3, 4, 5]])
    line = torch.randn(1, 30, generator=torch.Generator().manual_seed(2))
    processor(torch.tensor([[9, 9, 9, 9]]), line)
    given = Context.standalone(ids, {"watermark": settings(), "prompt_length": 1})
    assert torch.equal(processor.process(given, line), make_processor().process(given, line))


def test_half_precision():
    line = torch.randn(2, 40, generator=torch.Generator().manual_seed(2))
    answer = make_processor()(torch.tensor([[1], [2]]), line.bfloat16())
    assert answer.dtype == torch.bfloat16
    exact = make_processor()(torch.tensor([[1], [2]]), line)
    assert (answer.float().exp() - exact.exp()).abs().max() < 0.02


def test_attributes_are_the_documented_ones():
    processor = make_processor(skip_first_ngram_calls=True, context_history_size=9)
    assert (processor.ngram_len, processor.context_history_size) == (3, 9)
    assert processor.keys.tolist() == [91, -7, 2**40 + 5, 65_530]
    assert processor.skip_first_ngram_calls
    assert not processor.debug_mode
    assert processor.sampling_table.shape == (2**16,)
    assert torch.equal(processor.sampling_table, get_tournament(settings()).sampling_table.long())


def test_a_public_key_is_warned_of():
    with pytest.warns(PublicKeyWarning, match="public"):
        make_processor(keys=(654, 400, 836))


def test_keys_may_be_a_tensor():
    processor = SynthIDTextWatermarkLogitsProcessor(3, torch.tensor([5, 6]), 64, 0, 10, "cpu")
    assert processor.watermark.keys == (5, 6)


# ------------------------------------------------------------------------------------ errors
def test_wrong_arguments_are_refused():
    with pytest.raises(ConfigError, match="ngram_len"):
        make_processor(ngram_len=1)
    with pytest.raises(ConfigError, match="keys"):
        make_processor(keys=())
    with pytest.raises(ConfigError, match="sampling_table_size"):
        make_processor(sampling_table_size=0)
    processor = make_processor()
    with pytest.raises(InputError, match="input_ids"):
        processor(torch.tensor([1, 2]), torch.zeros(1, 9))
    for ask in (processor.compute_g_values, processor.compute_context_repetition_mask):
        with pytest.raises(InputError, match=r"at least 3 tokens"):
            ask(torch.tensor([[1, 2]]))
        with pytest.raises(InputError, match="batch, length"):
            ask(torch.tensor([1, 2, 3]))
    with pytest.raises(InputError, match="batch, length"):
        processor.compute_eos_token_mask(torch.tensor([1, 2, 3]), 2)
    for shape in ((2, 3), (1, 2, 4)):
        with pytest.raises(InputError, match=r"ngrams.*3\]"):
            processor.compute_ngram_keys(torch.ones(shape, dtype=torch.long))
    with pytest.raises(InputError, match="vocab_size"):
        processor.expected_mean_g_value(0)


def test_hashes_of_ngrams_are_those_of_pythons_integers():
    processor, known = make_processor(), settings()
    ids = torch.tensor([[5, 300_000, 7, 7, 2], [0, 1, 2**40, 3, 4]])
    ones = torch.ones(2, dtype=torch.long)
    assert processor.accumulate_hash(ones, ids).tolist() == [hashed(row) for row in ids.tolist()]
    assert processor.accumulate_hash(ones, ids[:, :2], multiplier=7, increment=-2).tolist() == [
        ((1 + first) * 7 - 2 + second) * 7 - 2 for first, second in ids[:, :2].tolist()
    ]
    ngrams = ids.unfold(1, known.ngram_len, 1)
    keys = processor.compute_ngram_keys(ngrams)
    assert keys.tolist() == [
        [[hashed([*one, key]) for key in known.keys] for one in row] for row in ngrams.tolist()
    ]
    assert torch.equal(processor.sample_g_values(keys), processor.compute_g_values(ids))


# -------------------------------------------------------------------------------------- rows
