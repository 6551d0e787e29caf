"""The laws of watermarks: what they leave unchanged, and which rows they apply to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from descant import GenerationConfig, Request, generate
from descant.config.watermarking_config import (
    GumbelWatermarkingConfig,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from descant.core.context import Context
from descant.decoding.processors.filters import TopPLogitsWarper
from descant.decoding.watermark.green_list import WatermarkLogitsProcessor
from descant.decoding.watermark.gumbel import GumbelWatermarkLogitsProcessor
from descant.decoding.watermark.synthid import SynthIDTextWatermarkLogitsProcessor
from descant.testing import check_admission, check_batch, check_processor, check_seed, outcomes
from tests.contracts.draws import BOUND, Drawn, drawn, exact, fit, fits
from tests.contracts.settings import Setting
from tests.contracts.speculation import RECORDS, few_words, inputs, seen
from tests.contracts.speculation import drafted as guessing
from tests.contracts.test_speculation_law import changed
from tests.support.tiny_models import Tiny, prompts

PROCESSORS: dict[str, Any] = {
    "green list": WatermarkLogitsProcessor,
    "synthid": SynthIDTextWatermarkLogitsProcessor,
    "gumbel": GumbelWatermarkLogitsProcessor,
}
GREEN = WatermarkingConfig(hashing_key=1299709, bias=3.0)
SELF = WatermarkingConfig(0.4, 2.5, 104729, "selfhash", 3)
COINS = SynthIDTextWatermarkingConfig(3, (31, 41, 59, 26, 53))
LOTS = GumbelWatermarkingConfig(271828, 2)

# Requests that share a session: every mark, under other methods, and some that have none.
MIXED: tuple[dict[str, Any], ...] = (
    {"watermarking_config": GREEN},
    {},
    {"watermarking_config": GREEN, "do_sample": True, "seed": 21, "top_k": 30},
    {"watermarking_config": SELF},
    {"watermarking_config": SELF, "num_beams": 3, "num_return_sequences": 2},
    {"watermarking_config": COINS, "do_sample": True, "seed": 22, "temperature": 1.5},
    {
        "watermarking_config": replace(COINS, keys=(9, 8), context_history_size=2),
        "do_sample": True,
        "seed": 23,
    },
    {"watermarking_config": LOTS, "do_sample": True, "seed": 24, "num_return_sequences": 3},
    {"watermarking_config": replace(LOTS, nonce=5), "do_sample": True, "seed": 25, "top_p": 0.9},
    {"do_sample": True, "seed": 26},
    {"watermarking_config": replace(GREEN, hashing_key=7), "num_beams": 2},
    {"watermarking_config": replace(LOTS, key=3, context_width=1), "do_sample": True, "seed": 27},
)


# ------------------------------------------------------------------- non-distortion
DRAWS, KEYS = 200_000, 400
SURE = 0.001


def keyed(name: str, rng: np.random.Generator) -> Any:
    """A config with a random key."""
    key = int(rng.integers(1, 2**40))
    if name == "gumbel":
        return GumbelWatermarkingConfig(key, int(rng.integers(1, 6)), nonce=int(rng.integers(16)))
    if name == "synthid":
        keys = tuple(rng.integers(0, 2**31, 6).tolist())
        return SynthIDTextWatermarkingConfig(int(rng.integers(2, 6)), keys)
    return WatermarkingConfig(hashing_key=key)


def steep(size: int, power: float) -> Tensor:
    """Tokens whose chances fall as a power of their rank, in no order."""
    law = torch.arange(1, size + 1, dtype=torch.float64) ** -power
    order = torch.randperm(size, generator=torch.Generator().manual_seed(size))
    return (law / law.sum())[order].log().float()


LAWS: dict[str, Callable[[], Tensor]] = {
    "uneven": lambda: torch.tensor([0.04, 0.24, 0.0, 0.12, 0.30, 0.12, 0.02, 0.10, 0.05, 0.01]).log(),
    "peaked": lambda: torch.tensor([0.004, 0.01, 0.95, 0.02, 0.001, 0.01, 0.005]).log(),
    "cut": lambda: TopPLogitsWarper(0.8)(torch.zeros(1, 1).long(), steep(40, 1.1)[None])[0],
}


def counted(name: str, scores: Tensor, draws: int) -> np.ndarray:
    """How often each token is drawn through a mark, each time after another context, under many keys."""
    rng, chance = np.random.default_rng(7), torch.Generator().manual_seed(8)
    counts, each = np.zeros(len(scores), dtype=int), draws // KEYS
    for _ in range(KEYS):
        ids = torch.from_numpy(rng.integers(0, 2**15, (each, 8)))
        marks = np.full(each, None)
        marks[:] = keyed(name, rng)
        there = Context(ids, torch.full((each,), 8), torch.full((each,), 2), {"watermark": marks})
        marked = PROCESSORS[name].make_unbound().process(there, scores.expand(each, -1))
        assert not torch.equal(marked, scores.expand(each, -1))
        noise = torch.empty(marked.shape).exponential_(generator=chance)
        counts += np.bincount((marked.softmax(-1) / noise).argmax(-1).numpy(), minlength=len(scores))
    assert counts.sum() == draws
    return counts


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", PROCESSORS)
def test_a_mark_leaves_the_law_or_does_not(name, law):
    """SynthID and Gumbel keep every token's chances over all keys; the green list does not, and it shows."""
    scores = LAWS[law]()
    # A tenth shows the green list; a permutation for each context takes its time.
    draws = DRAWS // 10 if name == "green list" else DRAWS
    p = fit(counted(name, scores, draws), scores.double().softmax(-1).numpy())
    print(f"{name}, {law}: p {p:.3g} of {draws} draws under {KEYS} keys")
    assert (p > SURE) == (name != "green list")


# ------------------------------------------------------------------- rows
def requests(tiny: Tiny, marks: Sequence[Mapping[str, Any]] = MIXED, new: int = 9) -> list[Request]:
    """A request for each, whose prompts differ."""
    texts = prompts(tiny.arch, [(5, 9, 1, 7)[at % 4] for at in range(len(marks))], 3)
    made = []
    for at, (given, text) in enumerate(zip(marks, texts, strict=True)):
        config = GenerationConfig(**given, min_new_tokens=new - 3, max_new_tokens=new + at % 3)
        source = {"input_ids": torch.tensor(text)} if tiny.encoder_decoder else {}
        made.append(Request([tiny.arch.start] if source else text, config, source))
    return made


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_batch_of_marks_is_as_many_calls(tiny, name):
    """Marked rows beside rows with other keys, other marks and none, in any order."""
    check_batch(tiny(name).model, requests(tiny(name)))


def test_a_marked_row_may_come_at_any_time(tiny):
    check_admission(tiny("llama").model, requests(tiny("llama"), MIXED[::2]), schedules=3)


def test_a_seed_is_a_marked_requests_own(tiny):
    drawn = [given for given in MIXED if "seed" in given]
    check_seed(tiny("llama").model, requests(tiny("llama"), drawn, 12), schedules=2)


def test_a_mark_can_be_seen(tiny):
    """The laws above would also hold without any watermark."""
    marked = [given for given in MIXED if "watermarking_config" in given]
    plain = [{name: one for name, one in given.items() if name != "watermarking_config"} for given in marked]
    other = [{**given, "watermarking_config": another(given["watermarking_config"])} for given in marked]
    found = [
        [one.tokens for one in outcomes(tiny("llama").model, requests(tiny("llama"), given, 16))]
        for given in (marked, plain, other)
    ]
    for with_mark, without, with_another in zip(*found, strict=True):
        assert with_mark != without
        assert with_mark != with_another


def another(settings: Any) -> Any:
    """The same mark with another key."""
    key = {"green list": {"hashing_key": 5}, "synthid": {"keys": (5, 55, 555)}, "gumbel": {"key": 5}}
    return replace(settings, **key[settings.scheme])


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_line_is_marked_by_itself(name):
    """In any batch, and with batched drafts as one by one."""
    settings = {
        "green list": [GREEN, SELF, replace(GREEN, greenlist_ratio=0.6, context_width=2)],
        "synthid": [COINS, replace(COINS, keys=(4,), ngram_len=2, context_history_size=1)],
        "gumbel": [LOTS, replace(LOTS, nonce=2, context_width=1)],
    }
    marks = [{"watermark": one, "processor_seed": 3 + at} for at, one in enumerate(settings[name])]
    check_processor(PROCESSORS[name].make_unbound(), marks)


# ------------------------------------------------------------------- nonces
@pytest.mark.parametrize("nonce", [None, 4])
def test_sequences_of_a_prompt_differ_by_their_nonce(tiny, nonce):
    """Where all have one nonce, what follows the same tokens is the same; where each draws its own, not."""
    model, text = tiny("llama").model, torch.tensor(prompts(tiny("llama").arch, [6], 1))
    asked = {"do_sample": True, "top_k": 3, "max_new_tokens": 6, "min_new_tokens": 6}
    asked["watermarking_config"] = replace(LOTS, context_width=1, nonce=nonce)
    torch.manual_seed(3)
    together = generate(model, text, num_return_sequences=40, **asked)[:, 6:]
    apart = generate(model, text.expand(40, -1), **asked)[:, 6:]
    for found in (together, apart):
        follows: dict[int, set[int]] = {}
        for first, second, *_ in found.tolist():
            follows.setdefault(first, set()).add(second)
        assert len(follows) > 1
        assert (max(map(len, follows.values())) == 1) == (nonce is not None)
    assert len({str(line) for line in together.tolist()}) > (2 if nonce is not None else 8)


def test_the_same_seed_is_the_same_text(tiny):
    model, text = tiny("llama").model, torch.tensor(prompts(tiny("llama").arch, [6], 1) * 6)
    asked = {"do_sample": True, "min_new_tokens": 12, "watermarking_config": LOTS, "temperature": 2.0}
    seeds = [1, 2, 1, 3, 4, 5]
    found = generate(model, text, seed=seeds, **asked).tolist()
    assert found[0] == found[2]
    assert len({str(line) for line in found}) == 5
    assert generate(model, text, seed=seeds, **asked).tolist() == found
    torch.manual_seed(6)
    drawn = generate(model, text, **asked).tolist()
    assert len({str(line) for line in drawn}) == 6
    torch.manual_seed(6)
    assert generate(model, text, **asked).tolist() == drawn


# ------------------------------------------------------------------- speculation
SPOKEN: dict[str, dict[str, Any]] = {
    "lefthash": {"watermarking_config": GREEN},
    "selfhash": {"watermarking_config": SELF},
    "green list, drawn": {"watermarking_config": GREEN, "do_sample": True, "seed": 4},
    "synthid": {"watermarking_config": COINS, "do_sample": True, "seed": 5, "num_return_sequences": 2},
    "gumbel": {"watermarking_config": LOTS, "do_sample": True, "seed": 6, "num_return_sequences": 3},
    "gumbel, one nonce": {"watermarking_config": replace(LOTS, nonce=1), "do_sample": True, "seed": 7},
}


@pytest.mark.parametrize("drafter", ["lookup", "suffix", "draft model"])
@pytest.mark.parametrize("name", SPOKEN)
def test_drafts_leave_marked_tokens_as_they_were(tiny, name, drafter):
    """Greedy and seeded rows give the same with drafts, some accepted and some rejected."""
    subject = tiny("llama")
    options = {**few_words(subject), **SPOKEN[name], "max_new_tokens": 24}
    drafts = guessing(subject.model, drafter)
    plain, guessed = (
        generate(subject.model, **inputs(subject), **options, **RECORDS, **more) for more in ({}, drafts)
    )
    assert guessed.sequences.tolist() == plain.sequences.tolist()
    # The law and not its logarithm: a round of SynthID takes what is left of 1, and rounds.
    for one, other in zip(plain.scores, guessed.scores, strict=True):
        torch.testing.assert_close(other.softmax(-1), one.softmax(-1), rtol=1e-4, atol=1e-5)
    seen(guessed).check()


WINDOWS: dict[str, Setting] = {
    "synthid, draft model": Setting({"watermarking_config": COINS}, "draft model"),
    "synthid, lookup": Setting({"watermarking_config": COINS, "temperature": 0.8}, "lookup"),
    "synthid, weighted": Setting({"watermarking_config": replace(COINS, ngram_len=2)}, "weighted", 4),
    "green list, certain": Setting({"watermarking_config": GREEN}, "certain"),
    "selfhash, draft model": Setting({"watermarking_config": SELF, "top_k": 6}, "draft model"),
    "gumbel, draft model": Setting(
        {"watermarking_config": replace(LOTS, context_width=1, nonce=3)}, "draft model"
    ),
    "gumbel, weighted": Setting({"watermarking_config": replace(LOTS, nonce=8)}, "weighted"),
}


def p_of(found: Drawn, law: Tensor) -> float:
    told = fits(found.counts, law)
    shown = ", ".join(f"{place} {p:.3g}" for place, p in told.items())
    print(f"{sum(map(len, found.windows))} draws, {found.right} of {found.tried} guesses, p {shown}")
    return min(told.values())


@pytest.mark.parametrize("name", WINDOWS)
def test_drafts_leave_the_law_of_a_mark_as_it_was(name):
    """Rows without a seed: under one key every window of tokens comes as often as without drafts."""
    torch.manual_seed(11)
    (found,) = drawn([WINDOWS[name]], 20_000)
    assert p_of(found, exact(WINDOWS[name])) > BOUND
    assert 0 < found.right < found.tried


def test_so_does_the_law_over_all_nonces():
    torch.manual_seed(12)
    settings = replace(LOTS, context_width=1, nonces=3)
    (found,) = drawn([Setting({"watermarking_config": settings}, "draft model")], 20_000)
    laws = [
        exact(Setting({"watermarking_config": replace(settings, nonce=nonce)}, "none")) for nonce in range(3)
    ]
    assert p_of(found, sum(laws) / 3) > BOUND
    assert p_of(found, laws[0]) < BOUND


@pytest.mark.parametrize("name", ["synthid, draft model", "green list, certain"])
def test_a_mark_at_the_first_place_of_a_run_alone_is_found(name):
    torch.manual_seed(13)
    with changed(lambda logits, scores: torch.cat((scores[:, :1], logits[:, 1:]), 1)):
        (found,) = drawn([WINDOWS[name]], 5_000)
    assert p_of(found, exact(WINDOWS[name])) < BOUND


# ------------------------------------------------------------------- beams
@torch.no_grad()
def searched(tiny: Tiny, text: list[int], settings: Any, beams: int, new: int) -> list[list[int]]:
    """The beams' new tokens, the best first, by a search that recomputes everything for every beam."""
    processor, held = PROCESSORS[settings.scheme].make_unbound(), [(0.0, list(text))]
    for _ in range(new):
        longer = []
        for total, ids in held:
            scores = tiny.model(torch.tensor([ids])).logits[:, -1].log_softmax(-1)
            scores[0, tiny.eos] = -torch.inf
            marks = np.full(1, None)
            marks[0] = settings
            there = Context(
                torch.tensor([ids]), torch.tensor([len(ids)]), torch.tensor([len(text)]), {"watermark": marks}
            )
            best = processor.process(there, scores)[0].topk(beams)
            pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
            longer += [(total + score, [*ids, token]) for score, token in pairs]
        held = sorted(longer, key=lambda one: -one[0])[:beams]
    return [ids[len(text) :] for _, ids in held]


@pytest.mark.ci_cases("4-selfhash", "2-synthid", "2-lefthash")
@pytest.mark.parametrize("settings", [GREEN, SELF, COINS], ids=["lefthash", "selfhash", "synthid"])
@pytest.mark.parametrize("beams", [2, 4])
def test_a_mark_follows_its_beams(tiny, settings, beams):
    subject, crossed = tiny("llama"), False
    for text in prompts(subject.arch, [6, 3, 11], 5):
        asked = {"num_beams": beams, "num_return_sequences": beams, "max_new_tokens": 10}
        record = generate(
            subject.model, torch.tensor([text]), **asked, watermarking_config=settings,
            suppress_tokens=[subject.eos], return_dict_in_generate=True,
        )  # fmt: skip
        found = record.sequences[:, len(text) :].tolist()
        assert found == searched(subject, text, settings, beams, 10)
        plain = generate(subject.model, torch.tensor([text]), **asked, suppress_tokens=[subject.eos])
        assert found != plain[:, len(text) :].tolist()
        crossed |= bool((record.beam_indices.sort(-1).values != record.beam_indices).any())
    assert crossed  # or no beam ever took another's place
