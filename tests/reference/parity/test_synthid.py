"""SynthID-Text is that of the reference: g-values, masks, hashes, scores step by step, and sampled tokens."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

import descant
from descant.decoding.watermark.synthid import (
    SynthIDTextWatermarkDetector,
    SynthIDTextWatermarkLogitsProcessor,
)
from tests.reference.parity import compare
from tests.reference.parity.compare import Call
from tests.reference.parity.subjects import STORIES, five, ragged, seeds, subject

KEYS = [91, -7, 2**40 + 5, 12_345_678_901, 65_536, 8, 2**62, 3, 77]
NEW = 20
# Table sizes: a power of two, odd, even, tiny, and so large that its coins are not laid out.
SIZES = (2**16, 999, 1000, 2, 2**23)
# How a processor may be set beside its keys.
KINDS = {
    "plain": {},
    "bigrams": {"ngram_len": 2},
    "skipping": {"skip_first_ngram_calls": True},
    "debug": {"debug_mode": True},
    "short memory": {"context_history_size": 3, "ngram_len": 3},
    "long n-grams": {"ngram_len": 13},
    "skipping, short memory": {"skip_first_ngram_calls": True, "context_history_size": 2, "ngram_len": 3},
}


def arguments(**given):
    """The documented arguments of a processor."""
    return {
        "ngram_len": 5,
        "keys": KEYS,
        "sampling_table_size": 2**16,
        "sampling_table_seed": 3,
        "context_history_size": 1024,
        "device": "cpu",
        **given,
    }


def few_sorts(rng, shape, sorts):
    """Ids of so many sorts, so that contexts come again."""
    return torch.tensor([[rng.randrange(sorts) for _ in range(shape[1])] for _ in range(shape[0])])


@pytest.mark.parametrize("size", SIZES)
def test_methods(size, reference):
    given, rng = arguments(sampling_table_size=size, sampling_table_seed=size), random.Random(size)
    ours = SynthIDTextWatermarkLogitsProcessor(**given)
    ids, wide = few_sorts(rng, (3, 60), 4), few_sorts(rng, (2, 30), 260_000)
    ngrams = wide.unfold(1, 5, 1)
    hashes = torch.tensor([[1, -5], [2**61, 0]])
    numbers = torch.tensor([[[3, -4], [5, 0]], [[1, 1], [2**40, 7]]])
    g = torch.randint(0, 2, (3, 50, 4), generator=torch.Generator().manual_seed(1))
    scores = torch.randn(3, 50, generator=torch.Generator().manual_seed(2)).masked_fill(g[:, :, 0] > 0, -9e9)
    scores[1, :40] = -torch.inf
    questions = [
        ("compute_g_values", {"input_ids": ids}),
        ("compute_g_values", {"input_ids": wide}),
        ("compute_ngram_keys", {"ngrams": ngrams}),
        ("sample_g_values", {"ngram_keys": ours.compute_ngram_keys(ngrams)}),
        ("compute_context_repetition_mask", {"input_ids": ids}),
        ("compute_eos_token_mask", {"input_ids": ids, "eos_token_id": 3}),
        ("compute_eos_token_mask", {"input_ids": ids, "eos_token_id": 4}),
        ("accumulate_hash", {"current_hash": hashes, "data": numbers}),
        ("accumulate_hash", {"current_hash": hashes, "data": numbers, "multiplier": 77, "increment": -2}),
        ("update_scores", {"scores": scores, "g_values": g}),
    ]
    theirs = reference.ask("synthid", arguments=given, questions=questions)
    assert torch.equal(ours.sampling_table, theirs["table"])
    for (name, keywords), wanted in zip(questions, theirs["answers"], strict=True):
        found = getattr(ours, name)(**keywords)
        assert found.dtype == wanted.dtype, name
        assert torch.equal(found, wanted), name
    repeats = ~theirs["answers"][4]
    assert repeats.any()
    assert not repeats.all()


def test_expected_mean_g_value(reference):
    questions = [
        ("expected_mean_g_value", {"vocab_size": size, "coinflip_prob": chance})
        for size in (1, 2, 50_000)
        for chance in (0.0, 0.3, 0.5)
    ]
    ours = SynthIDTextWatermarkLogitsProcessor(**arguments())
    theirs = reference.ask("synthid", arguments=arguments(), questions=questions)["answers"]
    assert [ours.expected_mean_g_value(**given) for _, given in questions] == pytest.approx(theirs, abs=1e-12)
    assert ours.expected_mean_g_value(2) == ours.expected_mean_g_value(vocab_size=2, coinflip_prob=0.5)


@pytest.mark.parametrize("history", [1, 2, 5, 1024])
def test_context_repetition_has_the_same_history(history, reference):
    given, rng = arguments(context_history_size=history, ngram_len=3), random.Random(history)
    ids = few_sorts(rng, (4, 120), 4)
    questions = [("compute_context_repetition_mask", {"input_ids": ids})]
    wanted = reference.ask("synthid", arguments=given, questions=questions)["answers"][0]
    ours = SynthIDTextWatermarkLogitsProcessor(**given).compute_context_repetition_mask(ids)
    assert torch.equal(ours, wanted)
    assert 0 < int(ours.sum()) < ours.numel()


@pytest.mark.parametrize("end", [2, 50])
def test_detector_calls_the_module_with_the_same_inputs(end, reference):
    texts = few_sorts(random.Random(end), (5, 80), 9)
    texts[:, 0] = 1  # an end token in front is padding here, and the end of the text there
    theirs = reference.ask("synthid", arguments=arguments(ngram_len=3), texts=texts, end=end)["asked"]
    processor = SynthIDTextWatermarkLogitsProcessor(**arguments(ngram_len=3))
    detector = SynthIDTextWatermarkDetector(
        lambda *asked: asked, processor, SimpleNamespace(eos_token_id=end)
    )
    for found, wanted in zip(detector(texts), theirs, strict=True):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)


def steps(rng, vocabulary, sorts, kept=None, count=30, lines=3):
    """The calls of a text step by step: ids that grow by a token, and scores."""
    draw, ids, calls = torch.Generator().manual_seed(vocabulary), few_sorts(rng, (lines, 4), sorts), []
    for _ in range(count):
        scores = 3 * torch.randn(lines, vocabulary, generator=draw)
        if kept is not None:
            scores = scores.masked_fill(scores < scores.topk(kept).values[:, -1:], -torch.inf)
        calls.append({"input_ids": ids, "scores": scores})
        ids = torch.cat((ids, few_sorts(rng, (lines, 1), sorts)), 1)
    return calls


TRIED = [(kind, size) for kind in KINDS for size in SIZES if size in (2**16, 999) or kind == "plain"]


@pytest.mark.parametrize(("kind", "size"), TRIED)
def test_scores_step_by_step(kind, size, reference):
    given, rng = arguments(sampling_table_size=size, **KINDS[kind]), random.Random(f"{kind} {size}")
    calls = steps(rng, vocabulary=211, sorts=2)
    theirs = reference.ask("call", name="SynthIDTextWatermarkLogitsProcessor", arguments=given, calls=calls)
    ours = SynthIDTextWatermarkLogitsProcessor(**given)
    kept = 0
    for step, (one, wanted) in enumerate(zip(calls, theirs, strict=True)):
        before = one["scores"].clone()
        found = ours(**one)
        assert torch.equal(found, wanted), step
        assert torch.equal(one["scores"], before), "the scores were changed in place"
        kept += int((wanted == (torch.ones_like(before) if ours.debug_mode else before)).all(1).sum())
    assert kept > 0, "no context came again"


@pytest.mark.parametrize("size", [2**16, 2**12, 1000])
def test_scores_of_a_wide_vocabulary(size, reference):
    """Lines so long that each is reckoned by itself, some of them wider than the table."""
    given = arguments(sampling_table_size=size, ngram_len=3)
    calls = steps(random.Random(size), vocabulary=9000, sorts=2, count=8)
    theirs = reference.ask("call", name="SynthIDTextWatermarkLogitsProcessor", arguments=given, calls=calls)
    ours = SynthIDTextWatermarkLogitsProcessor(**given)
    changed = 0
    for step, (one, wanted) in enumerate(zip(calls, theirs, strict=True)):
        assert torch.equal(ours(**one), wanted), step
        changed += int((wanted != one["scores"]).any(1).sum())
    assert 0 < changed < 8 * 3


@pytest.mark.parametrize("size", [2**16, 1000])
def test_scores_where_few_tokens_are_left(size, reference):
    """Only what is left is reckoned with, in another order of sums: the law is the same but for rounding."""
    given = arguments(sampling_table_size=size, ngram_len=3)
    calls = steps(random.Random(size), vocabulary=9000, sorts=3, kept=50, count=14)
    theirs = reference.ask("call", name="SynthIDTextWatermarkLogitsProcessor", arguments=given, calls=calls)
    ours, lowest = SynthIDTextWatermarkLogitsProcessor(**given), torch.finfo(torch.float32).min
    marked = 0
    for one, wanted in zip(calls, theirs, strict=True):
        found = ours(**one)
        assert (found.exp() - wanted.exp()).abs().max() < 1e-6
        likely = wanted.exp() > 1e-2
        assert (found - wanted)[likely].abs().max() < 1e-5
        gone = one["scores"] == -torch.inf
        assert torch.equal(found[gone], wanted[gone])
        marked += int((found == lowest).any(1).sum())
    assert 0 < marked < 14 * 3, "some contexts must come again, and some not"


# --------------------------------------------------------------------------------- generate
def marked_by(**given):
    return {"watermarking_config": {"ngram_len": 3, "keys": KEYS, "context_history_size": 1024, **given}}


SAMPLING = {
    "defaults": {},
    "no filter": {"top_k": 0},
    "top_p and temperature": {"temperature": 0.7, "top_p": 0.9},
    "normalised": {"renormalize_logits": True},
}
# The reference hashes the whole vocabulary of a real model in every step, so that one has few turns.
MODELS = [(name, setting) for name in ("llama", "gpt2", "t5") for setting in SAMPLING]
MODELS += [(STORIES, "defaults"), (STORIES, "no filter")]


@pytest.mark.parametrize("seed", seeds(1, 6))
@pytest.mark.parametrize(("name", "setting"), MODELS)
def test_tokens_of_padded_rows(name, setting, seed, tiny, reference):
    model = subject(name, tiny)
    given = {"do_sample": True, "max_new_tokens": NEW, **SAMPLING[setting], **marked_by()}
    compare.batched(reference, Call(model, given, seed=seed, full=False), ragged(model, seed))


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("kind", [*KINDS.values(), {"sampling_table_size": 999}], ids=str)
def test_tokens_of_every_kind(kind, copies, tiny, reference):
    model = tiny("llama")
    given = {"do_sample": True, "max_new_tokens": NEW, "num_return_sequences": copies, **marked_by(**kind)}
    answers = compare.batched(reference, Call(model, given, seed=7, full=False), five(model, 1))
    assert any(len({tuple(tokens) for tokens in answer.tokens}) == copies for answer in answers)


def test_greedy_tokens_of_rows_alone(tiny, reference):
    model = tiny("llama")
    compare.alone(reference, Call(model, {"max_new_tokens": NEW, **marked_by()}), ragged(model))


def test_a_processor_brought_along_marks_like_the_config(tiny):
    model, settings = tiny("llama"), arguments(ngram_len=3, sampling_table_seed=0)
    found = []
    for given in (marked_by(), {"logits_processor": [SynthIDTextWatermarkLogitsProcessor(**settings)]}):
        torch.manual_seed(3)
        sampled = {"do_sample": True, "top_k": 0, "max_new_tokens": NEW, **given}
        found.append(descant.generate(model.model, **ragged(model).inputs, **sampled))
    assert torch.equal(*found)
