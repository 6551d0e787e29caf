"""Guidance by hand: by halves of a batch, and with a model of its own as transformers 4.52.4 does it."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from descant import GenerationConfig, Request, Session
from descant.decoding.processors.guidance import ClassifierFreeGuidanceLogitsProcessor
from descant.decoding.processors.guidance import UnbatchedClassifierFreeGuidanceLogitsProcessor as Unbatched
from descant.errors import InputError
from tests.support.tiny_models import prompts


def test_the_first_half_is_with_the_prompt():
    scores = torch.tensor([[1.0, 2.0], [3.0, 3.0], [0.0, 2.5], [5.0, 1.0]])
    answer = ClassifierFreeGuidanceLogitsProcessor(2)(torch.zeros(2, 4, dtype=torch.long), scores)
    assert answer.tolist() == [[2.0, 1.5], [1.0, 5.0]]


def test_halves_must_fit_the_ids():
    with pytest.raises(InputError, match="`scores` must have 4 rows, two per row of `input_ids`"):
        ClassifierFreeGuidanceLogitsProcessor(2.0)(torch.zeros(2, 1), torch.zeros(2, 3))


# ------------------------------------------------------------------- with a model of its own
TOLERANCE = 1e-5
STEPS = 6


def texts(tiny, lengths, seed=0):
    """Prompts, padded on the left, and their mask."""
    lines = prompts(tiny.arch, lengths, seed)
    wide = max(lengths)
    ids = torch.tensor([[tiny.pad] * (wide - len(line)) + line for line in lines])
    return ids, torch.tensor([[0] * (wide - len(line)) + [1] * len(line) for line in lines])


def theirs(reference, tiny, ids, scale, negative=None, mask=None, **options):
    """The reference's sequences, and of each step its processor's input logits and output scores."""
    given = {"negative_prompt_ids": negative, "negative_prompt_attention_mask": mask}
    out = reference.generate(
        tiny.folder,
        {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        {
            "max_new_tokens": STEPS,
            "min_new_tokens": STEPS,
            "do_sample": False,
            "guidance_scale": scale,
            **{name: value for name, value in given.items() if value is not None},
            **options,
        },
        ("sequences", "scores", "logits"),
    )
    return out["sequences"], out["scores"], out["logits"]


def by_hand(processor, sequences, logits):
    """The processed scores of each step of a loop by hand that says these sequences."""
    start = sequences.shape[1] - len(logits)
    return [processor(sequences[:, : start + step], given) for step, given in enumerate(logits)]


def far(mine, other, tiny):
    """By how much the scores of two runs differ, relative to those above 1, apart from the end token.

    4.52.4 was kept from that one.
    """
    kept = torch.arange(mine[0].shape[1]) != tiny.eos
    pairs = [(one[:, kept], two[:, kept]) for one, two in zip(mine, other, strict=True)]
    return max(float(((one - two) / two.abs().clamp(min=1.0)).abs().max()) for one, two in pairs)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("scale", [-1.0, 0.0, 0.5, 1.5, 4.0])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "opt"])
def test_the_same_scores_as_the_reference(name, scale, use_cache, tiny, reference):
    small = tiny(name)
    ids, _ = texts(small, [7, 7, 7])
    negative, _ = texts(small, [4, 4, 4], seed=1)
    for unlike in (None, negative):
        sequences, scores, logits = theirs(reference, small, ids, scale, unlike, use_cache=use_cache)
        mine = by_hand(Unbatched(scale, small.model, unlike, use_cache=use_cache), sequences, logits)
        # The two libraries' networks differ in the last bits, which the scale multiplies.
        assert far(mine, scores, small) < TOLERANCE * max(1.0, abs(1 - scale))
        plain = by_hand(Unbatched(1.0, small.model), sequences, logits)
        assert far(mine, plain, small) > 0.1


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_mask_without_padding_is_as_none(name, tiny):
    small = tiny(name)
    ids, _ = texts(small, [6, 6])
    negative, mask = texts(small, [3, 3], seed=1)
    logits = [torch.zeros(2, small.vocab)] * 3
    first, second = Unbatched(2.0, small.model, negative), Unbatched(2.0, small.model, negative, mask)
    for one, other in zip(by_hand(first, ids, logits), by_hand(second, ids, logits), strict=True):
        assert torch.equal(one, other)


class _Counted:
    """A model that counts what it is fed."""

    def __init__(self, model):
        self.model, self.fed = model, []

    def __call__(self, ids, **given):
        self.fed.append(tuple(ids.shape))
        return self.model(ids, **given)


@torch.no_grad()
def test_lines_may_be_reordered_forked_and_dropped(tiny):
    """As in a beam search by hand: each line's scores are those of a processor that saw only it."""
    small = tiny("llama")
    ids, _ = texts(small, [5, 5])
    negative, mask = texts(small, [2, 4], seed=1)
    model = _Counted(small.model)
    processor = Unbatched(1.7, model, negative, mask)
    chance, whose = torch.Generator().manual_seed(3), torch.tensor([0, 1])
    for parents in ([0, 1], [1, 0, 0], [0, 1, 2], [2, 2, 1, 0], [1]):
        scores = torch.randn(len(ids), small.vocab, generator=chance)
        answer = processor(ids, scores)
        for line in range(len(ids)):
            own, its = negative[whose[line]][None], mask[whose[line]][None]
            alone = Unbatched(1.7, small.model, own, its)
            for length in range(5, ids.shape[1]):
                alone(ids[line : line + 1, :length], scores[line : line + 1])
            expected = alone(ids[line : line + 1], scores[line : line + 1])
            assert torch.allclose(answer[line], expected[0], atol=2e-5)
        new = torch.randint(3, small.vocab, (len(parents), 1), generator=chance)
        ids, whose = torch.cat((ids[parents], new), 1), whose[parents]
    # Read anew where lines have moved, one token where they have not.
    assert model.fed == [(2, 4), (2, 1), (3, 6), (3, 1), (4, 8)]


@torch.no_grad()
def test_an_object_can_be_used_again(tiny):
    """For the same prompt, another, or one that goes on where a chat stopped."""
    small = tiny("gpt2")
    ids, _ = texts(small, [4, 4])
    longer = torch.cat((ids, texts(small, [5, 5], seed=2)[0]), 1)
    negative, _ = texts(small, [3, 3], seed=1)
    processor = Unbatched(2.0, small.model, negative)
    for prompt in (ids, ids, ids[:, :3], ids[:, 1:], ids, longer):
        scores = torch.zeros(2, small.vocab)
        fresh = Unbatched(2.0, small.model, negative)
        for _ in range(3):
            expected = fresh(prompt, scores)
            assert torch.allclose(processor(prompt, scores), expected, atol=1e-5)
            assert torch.allclose(processor(prompt, scores), expected, atol=1e-5)  # asked twice
            prompt = torch.cat((prompt, expected.argmax(-1, keepdim=True)), 1)


def test_several_lines_may_share_a_negative_prompt(tiny):
    small = tiny("llama")
    ids, _ = texts(small, [4, 4, 4, 4])
    negative, _ = texts(small, [3, 3], seed=1)
    scores = torch.zeros(4, small.vocab)
    answer = Unbatched(2.0, small.model, negative)(ids, scores)
    assert torch.allclose(answer[0], answer[1], atol=1e-6)
    assert torch.allclose(answer[2], answer[3], atol=1e-6)
    assert not torch.allclose(answer[1], answer[2], atol=0.1)
    with pytest.raises(InputError, match="`input_ids` must have as many rows as `unconditional_ids`, 2"):
        Unbatched(2.0, small.model, negative)(ids[:3], scores[:3])


def test_any_model_will_do_and_keeps_no_gradient():
    """One that takes no positions and gives no cache."""
    weight = torch.randn(9, 9, requires_grad=True)
    masks = []

    def model(ids, attention_mask, use_cache, past_key_values):
        assert past_key_values is None
        masks.append(attention_mask.tolist())
        return SimpleNamespace(logits=weight[ids])

    negative, mask = torch.tensor([[0, 5]]), torch.tensor([[0, 1]])
    processor = Unbatched(3.0, model, negative, mask)
    scores = torch.randn(1, 9)
    answer = processor(torch.tensor([[1, 2]]), scores)
    plain, own = weight[5].log_softmax(-1), scores.log_softmax(-1)
    assert torch.allclose(answer, plain + 3 * (own - plain), atol=1e-5)
    assert not answer.requires_grad
    processor(torch.tensor([[1, 2, 7]]), scores)
    assert masks == [[[0, 1]], [[0, 1, 1]]]


def test_what_is_ruled_out_stays_so():
    def model(ids, **given):
        return SimpleNamespace(logits=torch.tensor([[[0.0, -torch.inf, 1.0, 0.5]]]))

    scores = torch.tensor([[-torch.inf, -torch.inf, 1.0, 2.0]])
    answer = Unbatched(2.0, model)(torch.tensor([[1]]), scores)
    assert answer.isneginf().tolist() == [[True, True, False, False]]
    assert answer[0, 2:].isfinite().all()


def test_the_loop_has_its_own(tiny):
    small = tiny("llama")
    session = Session(small.model)
    given = Unbatched(2.0, small.model)
    session.admit(Request([4, 5], GenerationConfig(max_new_tokens=2), logits_processor=[given]))
    [event] = session.drain()
    assert isinstance(event.error.__cause__, InputError)
    assert re.search(r"for direct calls.*set guidance_scale", str(event.error))
