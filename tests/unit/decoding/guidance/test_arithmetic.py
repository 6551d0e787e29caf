"""Logit arithmetic between models: against the reference, by identities, by the laws, by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import descant
from descant import ConfigError, ContrastiveDecoding, DExperts, GenerationConfig, ProxyTuning
from descant.kv_cache.row_views import MultiModelCache
from descant.kv_cache.stores.dense import DenseStore
from descant.testing import check_admission, check_batch, check_drafts, check_seed
from tests.support.tiny_models import prompts
from tests.unit.decoding.guidance.pairs import (
    CASES,
    EOS,
    Formula,
    arch,
    case,
    contrasted,
    logits_of,
    made,
    new_tokens,
    reference,
    requests,
    shifted,
)


@pytest.mark.ci_cases(
    "contrastive",
    "contrastive-beta",
    "contrastive-windowed",
    "contrastive-of-a-recurrent",
    "proxy-mixed",
    "dexperts",
    "encoders-mixed",
)
@pytest.mark.parametrize("name", CASES)
def test_greedy_equals_the_reference(name):
    kind, whole, formula, models = case(name)
    texts = prompts(arch(kind, 0), (5, 9, 2, 12, 7), 17)
    found = new_tokens(whole, texts, kind, max_new_tokens=14)
    encodes = arch(kind, 0).encoder_decoder
    expected = [
        reference(
            models, formula, [EOS] if encodes else text, 14, source=torch.tensor(text) if encodes else None
        )
        for text in texts
    ]
    assert found == expected
    assert found != new_tokens(models[0], texts, kind, max_new_tokens=14), "the others must matter"
    assert name not in ("contrastive-recurrent", "proxy", "dexperts") or len({len(one) for one in found}) > 2


def test_greedy_with_processors_equals_the_reference():
    kind, whole, formula, models = case("proxy")
    texts = prompts(arch(kind, 0), (5, 9, 2), 18)
    ruled = {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2}
    own = [descant.RepetitionPenaltyLogitsProcessor(1.4), descant.NoRepeatNGramLogitsProcessor(2)]
    found = new_tokens(whole, texts, kind, max_new_tokens=14, **ruled)
    assert found == [reference(models, formula, text, 14, processors=own) for text in texts]
    assert found != new_tokens(whole, texts, kind, max_new_tokens=14)


class Rescored(transformers.LogitsProcessor):
    """For transformers' own beams: the log-probabilities of the whole, every model run without a cache."""

    def __init__(self, models: Sequence[Any], formula: Formula) -> None:
        self._models, self._formula = models, formula

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        lines = [self._formula(*logits_of(self._models, line, None)) for line in input_ids.tolist()]
        return torch.stack(lines).log_softmax(-1).float()


@pytest.mark.ci_cases("dexperts", "contrastive-recurrent")
@pytest.mark.parametrize("name", ["contrastive", "contrastive-recurrent", "proxy-mixed", "dexperts"])
def test_beams_equal_those_of_transformers(name):
    kind, whole, formula, models = case(name)
    texts = prompts(arch(kind, 0), (5, 9, 2), 19)
    options = {"num_beams": 3, "max_new_tokens": 10, "length_penalty": 0.7}
    found = new_tokens(whole, texts, kind, **options)
    for text, mine in zip(texts, found, strict=True):
        ids = torch.tensor([text])
        theirs = models[0].generate(
            ids,
            attention_mask=torch.ones_like(ids),
            logits_processor=[Rescored(models, formula)],
            do_sample=False,
            **options,
        )
        line = theirs[0, len(text) :].tolist()
        assert mine == (line[: line.index(EOS) + 1] if EOS in line else line)


# ------------------------------------------------------------------------ identities
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "seed": 7, "temperature": 1.3, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "min_new_tokens": 3},
    "ruled": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "suppress_tokens": [5, 6]},
}


@pytest.mark.parametrize("way", WAYS)
def test_what_cancels_out_leaves_one_model(way):
    """base + tuned - base is the tuned model, by way of both and their caches."""
    base, tuned, other = made("gpt2", 1), made("llama", 0), made("llama", 3)
    texts = prompts(arch("llama", 0), (4, 8, 1), 20)
    options = {"max_new_tokens": 12, **WAYS[way]}
    alone = new_tokens(tuned, texts, "llama", **options)
    assert new_tokens(ProxyTuning(base, tuned, base), texts, "llama", **options) == alone
    assert new_tokens(ProxyTuning(tuned, base, other, alpha=0), texts, "llama", **options) == alone
    assert new_tokens(ProxyTuning(tuned, other, other, alpha=9), texts, "llama", **options) == alone
    assert new_tokens(ContrastiveDecoding(tuned, other, 0, beta=0), texts, "llama", **options) == alone
    assert new_tokens(DExperts(tuned, other, base), texts, "llama", **options) != alone


def test_the_expert_alone_is_plausible_at_one():
    expert, amateur = made("llama", 0), made("llama", 3)
    texts = prompts(arch("llama", 0), (4, 8, 1), 21)
    alone = new_tokens(expert, texts, "llama", max_new_tokens=12)
    assert new_tokens(ContrastiveDecoding(expert, amateur, 1), texts, "llama", max_new_tokens=12) == alone
    assert new_tokens(ContrastiveDecoding(expert, amateur, 0.1), texts, "llama", max_new_tokens=12) != alone


def test_the_base_stands_in_for_a_missing_expert():
    base, other = made("llama", 0), made("llama", 3)
    texts = prompts(arch("llama", 0), (4, 8, 1), 22)
    found = new_tokens(DExperts(base, None, other, 1.5), texts, "llama", max_new_tokens=12)
    assert found == [reference([base, other], contrasted(0, 1.5), text, 12) for text in texts]
    found = new_tokens(DExperts(base, other, None, 0.5), texts, "llama", max_new_tokens=12)
    mean = lambda one, two: (one.double() + two.double()) / 2  # noqa: E731
    assert found == [reference([base, other], mean, text, 12) for text in texts]


def test_one_inside_another():
    models = [made("llama", 0), made("gpt2", 1), made("llama", 3), made("llama", 5)]
    whole = ProxyTuning(ContrastiveDecoding(*models[:2], 0.01, beta=0.5), *models[2:], alpha=0.3)
    inner = contrasted(0.01, 0.5)
    formula = lambda *logits: shifted(0.3)(inner(*logits[:2]), *logits[2:])  # noqa: E731
    texts = prompts(arch("llama", 0), (4, 8, 1), 23)
    found = new_tokens(whole, texts, "llama", max_new_tokens=12)
    assert found == [reference(models, formula, text, 12) for text in texts]


# ------------------------------------------------------------------------ other methods around it
def test_guidance_around_models_equals_the_reference():
    """Classifier-free guidance of the whole: every model has twin rows."""
    _, whole, formula, models = case("proxy-mixed")
    texts = prompts(arch("llama", 0), (5, 9, 2), 30)
    found = new_tokens(whole, texts, "llama", max_new_tokens=10, guidance_scale=1.7)
    expected = []
    for text in texts:
        sequence: list[int] = []
        while len(sequence) < 10 and EOS not in sequence:
            given, without = (
                formula(*logits_of(models, [*before, *sequence], None)).log_softmax(-1)
                for before in (text, text[-1:])
            )
            sequence.append(int((without + 1.7 * (given - without)).argmax()))
        expected.append(sequence)
    assert found == expected
    assert found != new_tokens(whole, texts, "llama", max_new_tokens=10)


def test_contrastive_search_over_models():
    """Likelihood of the whole, degeneration by the first model's states."""
    _, whole, _, models = case("proxy")
    texts = prompts(arch("llama", 0), (4, 8, 1), 31)
    options = {"max_new_tokens": 10, "penalty_alpha": 0.6, "top_k": 4}
    alone = new_tokens(models[0], texts, "llama", **options)
    assert new_tokens(ProxyTuning(*models, alpha=0), texts, "llama", **options) == alone
    assert new_tokens(whole, texts, "llama", **options) != alone


def test_several_models_have_no_layers():
    _, whole, _, _ = case("proxy")
    with pytest.raises(ConfigError, match="dola_layers"):
        new_tokens(whole, prompts(arch("llama", 0), (4,), 32), "llama", dola_layers="low")


# ------------------------------------------------------------------------ laws
METHODS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "seed": 11, "temperature": 1.3, "num_return_sequences": 2},
    "beam-3": {"num_beams": 3, "num_return_sequences": 2},
    "ruled": {"repetition_penalty": 1.3, "min_new_tokens": 4, "suppress_tokens": [7, 8]},
}


def of_method(kind: str, method: str, count: int) -> list[descant.Request]:
    given = METHODS[method]
    own = [{"seed": given["seed"] + at} if "seed" in given else {} for at in range(count)]
    configs = [GenerationConfig(**{**given, **one}, max_new_tokens=8 + 2 * at) for at, one in enumerate(own)]
    return requests(kind, configs)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("contrastive", "greedy"),
        ("contrastive-recurrent", "beam-3"),
        ("proxy-mixed", "sampling"),
        ("encoders-mixed", "ruled"),
    ],
)
def test_the_laws_of_requests(name, method):
    kind, whole, _, _ = case(name)
    check_batch(whole, of_method(kind, method, 4))
    check_admission(whole, of_method(kind, method, 3), schedules=3)
    if method == "sampling":
        check_seed(whole, of_method(kind, method, 3), schedules=2)


@pytest.mark.parametrize("name", ["proxy", "dexperts", "encoders-mixed"])
def test_drafts_at_once_equal_one_by_one(name):
    kind, whole, _, models = case(name)
    count = len(models)
    check_drafts(
        whole, of_method(kind, "greedy", 4), lambda: MultiModelCache([DenseStore() for _ in range(count)])
    )


# ------------------------------------------------------------------------ numbers by hand
def test_contrast_by_hand():
    expert, amateur = torch.tensor([0.5, 0.3, 0.15, 0.05]).log(), torch.tensor([0.4, 0.1, 0.1, 0.4]).log()
    one, two = object(), object()
    found = ContrastiveDecoding(one, two, 0.25).combine([expert + 3, amateur - 2]).exp().tolist()
    assert found == pytest.approx([1.25, 3.0, 1.5, 0.0])
    flat = amateur.exp().sqrt() / amateur.exp().sqrt().sum()
    found = ContrastiveDecoding(one, two, 0.25, amateur_temperature=2.0).combine([expert, amateur]).exp()
    assert found[:3].tolist() == pytest.approx((expert.exp() / flat)[:3].tolist())
    found = ContrastiveDecoding(one, two, 0.25, beta=2.0).combine([expert, amateur]).exp().tolist()
    assert found == pytest.approx([0.5**3 / 0.4**2, 0.3**3 / 0.1**2, 0.15**3 / 0.1**2, 0.0])


def test_nucleus_of_the_base_by_hand():
    base = torch.tensor([[0.1, 0.5, 0.15, 0.25]]).log()
    up, down = torch.tensor([[4.0, 1.0, 9.0, 0.0]]), torch.tensor([[0.0, 1.0, 0.0, 2.0]])
    models = object(), object(), object()
    whole = DExperts(*models, 0.5, top_p=0.8).combine([base, up, down])
    assert whole.exp().tolist()[0] == pytest.approx([0.0, 0.5, 0.15 * math.exp(4.5), 0.25 / math.e])
    tight = DExperts(*models, 0.5, top_p=0.5).combine([base, up, down])
    assert tight.isfinite().tolist() == [[False, True, False, False]]
    loose = DExperts(*models, 0.5).combine([base, up, down])
    assert loose.isfinite().all()


@pytest.mark.parametrize("alpha", [0.0, 0.1])
@pytest.mark.parametrize("beta", [None, 0.5])
def test_what_is_ruled_out_stays_ruled_out(alpha, beta):
    low = -math.inf
    expert, amateur = torch.tensor([1.0, 0.5, low, low]), torch.tensor([1.0, 0.2, low, 0.0])
    found = ContrastiveDecoding(object(), object(), alpha, beta).combine([expert, amateur])
    assert found.tolist()[2:] == [low, low]
    assert found[:2].isfinite().all()
    found = ProxyTuning(object(), object(), object()).combine([expert, amateur, expert])
    assert found.tolist()[2:] == [low, low]
    assert found[:2].isfinite().all()
    found = ProxyTuning(object(), object(), object()).combine([amateur, expert, expert])
    assert found.tolist() == amateur.tolist(), "what both rule out is no reason to move"


# ------------------------------------------------------------------------ pretrained
