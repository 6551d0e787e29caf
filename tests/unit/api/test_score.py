"""score() and its relatives: the log-likelihoods of a plain forward, whatever is read at the same time."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import transformers

import descant
from descant import GenerationConfig, InputError, PrefixCache, ScoringLimits, UnsupportedModel
from tests.support import pretrained
from tests.support.byte_tokenizer import tokenizer as byte_tokenizer
from tests.support.tiny_models import prompts

LENGTHS = (1, 9, 30, 64, 9, 5)
CONTINUATION_LENGTHS = (1, 3, 1, 12, 70)


def forward(model, ids):
    """The log-probabilities of every position [L, V], by the model alone."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float().log_softmax(-1)


def expected(logprobs, start, tokens):
    """The log-probabilities of tokens after `start` others, and whether all are the best."""
    lines = logprobs[start - 1 : start - 1 + len(tokens)]
    ids = torch.tensor(tokens)
    return lines.gather(1, ids[:, None])[:, 0], bool((lines.argmax(-1) == ids).all())


def check(model, prompt, continuation, found):
    own, is_greedy = expected(forward(model, [*prompt, *continuation]), len(prompt), continuation)
    assert isinstance(found, descant.TextScore)
    assert found.tokens.tolist() == list(continuation)
    assert torch.allclose(found.logprobs, own, atol=2e-5)
    assert found.is_greedy == is_greedy
    assert found.total == pytest.approx(float(own.sum()), abs=1e-4)
    assert found.perplexity == pytest.approx(float((-own.mean()).exp()), rel=1e-4)


def cases(arch):
    """Prompts, two of them equal, and continuations of each, some of one token and two equal."""
    given = prompts(arch, LENGTHS, 3)
    given[4] = list(given[1])
    ends = [prompts(arch, CONTINUATION_LENGTHS[: 1 + at % 5], 10 + at) for at in range(len(given))]
    ends[3].append(list(ends[3][1]))
    return given, ends


def greedy(model, prompt, count):
    return descant.generate(model, torch.tensor([prompt]), max_new_tokens=count, eos_token_id=None)[
        0, len(prompt) :
    ].tolist()


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "gpt-neox"])
def test_they_equal_a_plain_forward_with_any_limits(tiny, name):
    subject = tiny(name)
    given, ends = cases(subject.arch)
    ends[0].append(greedy(subject.model, given[0], 4))
    limits = [None, ScoringLimits(rows=1), ScoringLimits(rows=3, tokens=50), ScoringLimits(rows=200)]
    prefixes = PrefixCache(block=4)
    for limit, cache in itertools.product(limits, [None, prefixes]):
        found = descant.score(subject.model, given, ends, limits=limit, prefix_cache=cache)
        assert list(map(len, found)) == list(map(len, ends))
        for prompt, continuations, row in zip(given, ends, found, strict=True):
            for continuation, one in zip(continuations, row, strict=True):
                check(subject.model, prompt, continuation, one)
    assert found[0][-1].is_greedy
    assert prefixes.report().tokens_found > 100


@pytest.mark.parametrize("kind", ["Mamba", "Rwkv", "Bloom"])
def test_they_equal_a_plain_forward_of_other_kinds(kind):
    """A state that is continued token by token, and positions by a bias."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2}
    extra = {"Mamba": {"state_size": 4}, "Rwkv": {"attention_hidden_size": 32}, "Bloom": {"n_head": 4}}[kind]
    made = getattr(transformers, f"{kind}Config")(**sizes, **extra, bos_token_id=1, eos_token_id=2)
    model = getattr(transformers, f"{kind}ForCausalLM")(made).eval()
    given = [torch.randint(5, 97, (size,)).tolist() for size in (2, 20, 7)]
    ends = [[[5, 6, 7], [8]], [[9, 10, 11, 12, 13]], [[14], [15]]]
    for prompt, continuations, row in zip(given, ends, descant.score(model, given, ends), strict=True):
        for continuation, one in zip(continuations, row, strict=True):
            check(model, prompt, continuation, one)


def test_any_order_has_the_same_scores_and_reads_each_prompt_once(tiny):
    subject = tiny("llama")
    given, ends = cases(subject.arch)
    fed = []

    def count(module, args, kwargs):
        fed.append(kwargs["input_ids"].numel())

    hook = subject.model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        found = descant.score(subject.model, given, ends)
    finally:
        hook.remove()
    distinct = {tuple(prompt) for prompt in given}
    pairs = {(tuple(p), tuple(c)) for p, each in zip(given, ends, strict=True) for c in each}
    # Prompts are packed. Continuations may be padded to the longest; the last token of each is never fed.
    assert fed[0] == sum(map(len, distinct))
    lengths = [len(one) - 1 for _, one in pairs]
    assert sum(lengths) <= sum(fed[1:]) <= len(pairs) * max(lengths)
    order = list(range(len(given)))
    random.Random(1).shuffle(order)
    moved = descant.score(subject.model, [given[at] for at in order], [ends[at][::-1] for at in order])
    for at, row in zip(order, moved, strict=True):
        for one, other in zip(found[at], reversed(row), strict=True):
            assert torch.allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_a_config_scores_its_distribution(tiny):
    """The processors of sampling, penalties and guidance."""
    subject = tiny("llama")
    [prompt] = prompts(subject.arch, [12], 5)
    continuation = [*greedy(subject.model, prompt, 3), 40, 41]
    ids = [*prompt, *continuation]
    with torch.no_grad():
        logits = subject.model(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1]
    penalty = descant.RepetitionPenaltyLogitsProcessor(1.4)
    penalised = torch.cat(
        [penalty(torch.tensor([ids[: len(prompt) + at]]), line[None]) for at, line in enumerate(logits)]
    )
    top = logits.topk(30).values[:, -1:]
    # Guidance away from the prompt's last token alone.
    cond = logits.log_softmax(-1)
    uncond = forward(subject.model, ids[len(prompt) - 1 :])[:-1]
    expected_scores = {
        (("guidance_scale", 1.5),): uncond + 1.5 * (cond - uncond),
        (("do_sample", True), ("temperature", 0.6)): logits / 0.6,
        (("repetition_penalty", 1.4),): penalised,
        (("do_sample", True), ("top_k", 30)): logits.masked_fill(logits < top, -torch.inf),
    }
    for fields, scores in expected_scores.items():
        [[found]] = descant.score(
            subject.model, [prompt], [[continuation]], generation_config=GenerationConfig(**dict(fields))
        )
        own = scores.log_softmax(-1).gather(1, torch.tensor(continuation)[:, None])[:, 0]
        assert torch.allclose(found.logprobs, own, atol=2e-5), fields
        assert found.is_greedy == bool((scores.argmax(-1) == torch.tensor(continuation)).all())


def test_texts_are_cut_with_their_prompt(tiny):
    subject, tokenizer = tiny("llama"), byte_tokenizer()
    whole = tokenizer("the universe").input_ids
    start = tokenizer("the").input_ids
    assert whole[: len(start)] == start
    for prompt, continuation in (("the", " universe"), ("the ", "universe")):
        [[found]] = descant.score(subject.model, [prompt], [[continuation]], tokenizer=tokenizer)
        assert found.tokens.tolist() == whole[len(start) :]
    with pytest.raises(InputError, match="new token"):
        descant.score(subject.model, ["They walk"], [["ing home"]], tokenizer=pretrained.tokenizer("smollm2"))
    with pytest.raises(InputError, match="tokenizer"):
        descant.score(subject.model, ["the"], [[" x"]])


@pytest.mark.parametrize(("window", "stride"), [(None, None), (20, None), (20, 7), (20, 1), (500, 3)])
def test_documents_are_scored_in_windows(tiny, window, stride):
    subject = tiny("llama")
    documents = prompts(subject.arch, [2, 21, 22, 60], 8)
    found = descant.score_documents(subject.model, documents, window=window, stride=stride)
    for ids, one in zip(documents, found, strict=True):
        size = window or 256
        lines = []
        for start in range(1, len(ids), stride or size):
            end = min(start + (stride or size), len(ids))
            first = max(0, end - 1 - size)
            own, _ = expected(forward(subject.model, ids[first:end]), start - first, ids[start:end])
            lines.append(own)
        assert torch.allclose(one.logprobs, torch.cat(lines), atol=2e-5)
        assert one.tokens.tolist() == ids[1:]


def test_texts_of_documents_follow_a_prefix_token(tiny):
    subject, tokenizer = tiny("llama"), byte_tokenizer()
    ids = tokenizer("the universe", add_special_tokens=False).input_ids
    for prefix in (None, 7):
        [found] = descant.score_documents(
            subject.model, ["the universe"], tokenizer=tokenizer, prefix_token=prefix
        )
        first = tokenizer.bos_token_id if prefix is None else prefix
        [[own]] = descant.score(subject.model, [[first]], [[ids]])
        assert torch.equal(found.logprobs, own.logprobs)


def test_labels_have_the_probabilities_of_their_spellings(tiny):
    subject, tokenizer = tiny("llama"), byte_tokenizer()
    given = prompts(subject.arch, [6, 11], 9)
    labels = [["the", " the"], "http", [40, 41]]
    flat = [tokenizer(text, add_special_tokens=False).input_ids for text in ("the", " the", "http")]

    def likelihoods(rows):
        scored = descant.score(subject.model, rows, [[*flat, [40, 41]]] * len(rows))
        totals = torch.tensor([[one.total for one in row] for row in scored]).exp()
        by_label = torch.stack((totals[:, 0] + totals[:, 1], totals[:, 2], totals[:, 3]), 1)
        return by_label / by_label.sum(1, keepdim=True)

    plain = descant.label_probabilities(subject.model, given, labels, tokenizer=tokenizer)
    assert torch.allclose(plain, likelihoods(given), rtol=1e-4)
    empty = prompts(subject.arch, [2, 3], 12)
    ratio = likelihoods(given) / likelihoods(empty).mean(0)
    calibrated = descant.label_probabilities(
        subject.model, given, labels, calibration_prompts=empty, tokenizer=tokenizer
    )
    assert torch.allclose(calibrated, ratio / ratio.sum(1, keepdim=True), rtol=1e-4)
    # A prompt without content says nothing about the labels.
    even = descant.label_probabilities(
        subject.model, empty[:1], labels, calibration_prompts=empty[:1], tokenizer=tokenizer
    )
    assert torch.allclose(even, torch.full((1, 3), 1 / 3), atol=1e-5)


def test_what_cannot_be_scored_is_refused(tiny):
    model = tiny("llama").model
    for prompts_given, continuations, name in (
        ([[5]], [], "continuations"),
        ([[5]], [[]], "continuations"),
        ([[5]], [[[]]], "continuations"),
        ([[5]], [[[97]]], "continuations"),
        ([[]], [[[5]]], "prompts"),
        ([[-1]], [[[5]]], "prompts"),
        ([[5.5]], [[[5]]], "prompts"),
        ([[5]], ["text"], "continuations"),
    ):
        with pytest.raises(InputError, match=name):
            descant.score(model, prompts_given, continuations)
    with pytest.raises(InputError, match="room"):
        descant.score(tiny("gpt2").model, [[5] * 255], [[[6] * 20]])
    with pytest.raises(UnsupportedModel, match="decoder-only"):
        descant.score(tiny("t5").model, [[5]], [[[6]]])
    with pytest.raises(InputError, match="stride"):
        descant.score_documents(model, [[5, 6, 7]], window=4, stride=5)
    with pytest.raises(InputError, match="documents"):
        descant.score_documents(model, [[5]])
    with pytest.raises(InputError, match="labels"):
        descant.label_probabilities(model, [[5]], [])
    with pytest.raises(InputError, match="rows"):
        ScoringLimits(rows=0)
    assert descant.score(model, [], []) == []
