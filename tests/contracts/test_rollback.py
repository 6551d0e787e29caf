"""Models whose state cannot be cut take back tokens all the same: drafts, banned phrases, forced tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import descant
from descant import GenerationConfig, Request
from descant.core.records import Proposal
from descant.core.rows import Rows
from descant.core.sampling_noise import SamplingNoise
from descant.decoding.speculative.draft_model import AssistantDrafter
from descant.decoding.speculative.lookup import PromptLookup, SuffixLookup
from descant.errors import ConfigError
from descant.kv_cache.stores.recurrent_state import RecurrentStateCache
from descant.models.model_adapter import as_model
from descant.models.transformers_model import TransformersModel
from descant.testing import (
    check_admission,
    check_batch,
    check_drafter,
    check_drafts,
    check_schedule,
    outcomes,
)
from tests.contracts.configs import TEXTS, tokenizer
from tests.contracts.speculation import near
from tools.sweep.catalogue import entries
from tools.sweep.subject import Subject
from tools.sweep.trial import subject_of

# Models that read several tokens after their state.
CONTINUING = (
    "BailingHybridForCausalLM", "BambaForCausalLM", "FalconH1ForCausalLM", "GraniteMoeHybridForCausalLM",
    "InklingForCausalLM", "Inkling2ForCausalLM", "KimiLinearForCausalLM", "Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM", "Lfm3ForCausalLM", "Mamba2ForCausalLM", "MiniMaxForCausalLM",
    "NemotronHForCausalLM", "OlmoHybridForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM", "RwkvForCausalLM", "xLSTMForCausalLM", "Zamba2ForCausalLM", "ZayaForCausalLM",
)  # fmt: skip
# Models that continue a state one token at a time, and among them those that also read a text at once
# differently.
BY_ONE = (
    "FalconMambaForCausalLM", "JambaForCausalLM", "MambaForCausalLM", "RecurrentGemmaForCausalLM",
    "ZambaForCausalLM",
)  # fmt: skip
READ_DIFFERENTLY = (
    "BltForCausalLM",
    "CpmAntForCausalLM",
    "DeepseekV32ForCausalLM",
    "MoshiForCausalLM",
    "XLNetLMHeadModel",
)
# In CI: linear attention, both scans of Mamba in hybrid layers, and a state without attention.
SHOWN = ("Qwen3NextForCausalLM", "FalconH1ForCausalLM", "Mamba2ForCausalLM", "JambaForCausalLM")
FEW = ("FalconH1ForCausalLM",)  # for laws that take long
WORDS = (34, 57, 80, 91, 60)  # so few that a lookup often succeeds
ALWAYS = {"num_assistant_tokens_schedule": "constant"}


def _each(names: Sequence[str], shown: Sequence[str] = SHOWN) -> list[Any]:
    return [pytest.param(name, marks=() if name in shown else pytest.mark.slow) for name in names]


@cache
def _subject(name: str) -> Subject:
    return subject_of(next(entry for entry in entries() if entry.name == name))


def _fields(name: str, **fields: Any) -> dict[str, Any]:
    size = as_model(_subject(name).model).traits.vocab_size
    return {"suppress_tokens": [token for token in range(size) if token not in WORDS], **fields}


def _prompt(length: int, seed: int) -> list[int]:
    drawn = torch.randint(len(WORDS), (length,), generator=torch.Generator().manual_seed(seed))
    return [WORDS[index] for index in drawn.tolist()]


METHODS: tuple[dict[str, Any], ...] = (
    {},
    {"do_sample": True, "seed": 4, "temperature": 1.2, "num_return_sequences": 2},
    {"repetition_penalty": 1.3, "no_repeat_ngram_size": 4},
    {"do_sample": True, "seed": 5, "top_p": 0.9, "mirostat_tau": 2.0},
)


def _requests(name: str, count: int, **more: Any) -> list[Request]:
    """Requests of ragged prompts that differ in method and length."""
    lengths = (9, 5, 14, 7)
    return [
        Request(
            _prompt(lengths[at % 4], at) * 2,
            GenerationConfig(
                **_fields(name), **METHODS[at % len(METHODS)], **more, max_new_tokens=9 + at % 5
            ),
        )
        for at in range(count)
    ]


def _logits(model: TransformersModel, cuts: Sequence[int]) -> Tensor:
    """The last logits of a text that is fed in parts of these sizes [V]."""
    store = RecurrentStateCache(model.traits.cache_argument)
    store.extend(1)
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(30, min(model.traits.vocab_size, 100), (1, sum(cuts)), generator=generator)
    zero, cached, logits = torch.zeros(1, dtype=torch.long), torch.tensor([0]), torch.empty(0)
    for size in cuts:
        length = cached + size
        rows = Rows(text[:, : int(length)], length, cached, zero, torch.tensor([cuts[0]]), zero, zero)
        logits = model.forward(rows, Proposal(), store).logits[0, -1]
        store.commit(None, length)
        cached = length
    return logits


@pytest.mark.parametrize("name", _each((*CONTINUING, *BY_ONE, *READ_DIFFERENTLY)))
def test_several_tokens_after_a_state_are_as_one_by_one(name: str) -> None:
    """So are those of models whose own forward reads them as another text, which the trait names."""
    model = as_model(_subject(name).model)
    by_itself = TransformersModel(model.model, traits=replace(model.traits, continues_by_one=False))
    differs = False
    for prefix, size in ((6, 2), (6, 5), (14, 6)):
        expected = _logits(model, (prefix, *[1] * size))
        assert float((_logits(model, (prefix, size)) - expected).norm() / expected.norm()) < 1e-5
        differs |= float((_logits(by_itself, (prefix, size)) - expected).norm() / expected.norm()) > 1e-4
    assert differs == (name not in CONTINUING) == model.traits.continues_by_one
    assert model.traits.reads_again == (name not in READ_DIFFERENTLY)


# A forward of several tokens clamps time steps in these two; the engine feeds a prompt without drafts.
@pytest.mark.parametrize("name", _each(sorted({*CONTINUING} - {"NemotronHForCausalLM", "Zamba2ForCausalLM"})))
def test_drafts_at_once_equal_one_by_one(name: str) -> None:
    model = as_model(_subject(name).model)
    requests = [Request(_prompt(size, size)) for size in (9, 5, 7, 5)]
    check_drafts(_subject(name).model, requests, lambda: RecurrentStateCache(model.traits.cache_argument))


@pytest.mark.parametrize("name", _each(CONTINUING, FEW))
@pytest.mark.parametrize("drafter", ["lookup", "suffix", "draft model"])
def test_the_law_of_drafters(name: str, drafter: str) -> None:
    model = _subject(name).model
    size = as_model(model).traits.vocab_size
    noise = SamplingNoise()

    def draft_model() -> AssistantDrafter:
        noise.num_rows = 2000
        near_model = as_model(near(model, 0.97))
        return AssistantDrafter(near_model, near_model.new_cache(), noise, vocabulary=size)

    make: Any = {
        "lookup": PromptLookup, "suffix": lambda: SuffixLookup(shared=False), "draft model": draft_model,
    }[drafter]  # fmt: skip
    check_drafter(model, make, _requests(name, 4), sizes=(4,))


@pytest.mark.parametrize("name", _each(CONTINUING, FEW))
def test_crowds_with_drafts(name: str) -> None:
    """Ragged requests with and without drafts, beams among them: in any batch, order and schedule."""
    model = _subject(name).model
    requests = _requests(name, 6, prompt_lookup_num_tokens=4, **ALWAYS)
    requests += _requests(name, 2)
    beams = GenerationConfig(**_fields(name), num_beams=3, max_new_tokens=8)
    requests.append(Request(_prompt(6, 40), beams))
    check_batch(model, requests)
    check_admission(model, requests, schedules=3)
    check_schedule(model, requests, schedules=3)


@pytest.mark.parametrize("name", _each(CONTINUING))
def test_sixteen_rows_with_drafts(name: str) -> None:
    prompts = [_prompt(6 + at % 3, at) * 2 for at in range(16)]
    plain = GenerationConfig(**_fields(name), max_new_tokens=16)
    drafting = plain.replace(prompt_lookup_num_tokens=5, **ALWAYS)
    model = _subject(name).model
    expected = outcomes(model, [Request(prompt, plain) for prompt in prompts])
    actual = outcomes(model, [Request(prompt, drafting) for prompt in prompts])
    assert [one.tokens for one in actual] == [one.tokens for one in expected]


@pytest.mark.parametrize(
    "name", _each((*CONTINUING, *BY_ONE, "XLNetLMHeadModel"), (*FEW, "JambaForCausalLM"))
)
def test_banned_phrases(name: str) -> None:
    """The tokens are those of rows that are read from their start at every step."""
    model = _subject(name).model
    if not as_model(model).traits.reads_again:
        with pytest.raises(ConfigError, match="`banned_phrases` takes tokens back, so it needs a model that"):
            descant.generate(model, torch.tensor([[34]]), banned_phrases=["ab"], tokenizer=tokenizer())
        return
    size = as_model(model).traits.vocab_size
    words = [token for token in range(34, 58) if token < size]
    fields: dict[str, Any] = {
        "suppress_tokens": [token for token in range(size) if token not in words],
        "max_new_tokens": 20,
        "banned_phrases": [TEXTS[one] + TEXTS[two] for one in words for two in words[(one % 3) :: 3]],
    }
    prompts = torch.tensor([words[:9], words[9:18]])
    for method in ({}, {"do_sample": True, "seed": 8}):
        found = {
            use_cache: descant.generate(
                model, prompts, **fields, **method, use_cache=use_cache, tokenizer=tokenizer()
            )
            for use_cache in (True, False)
        }
        assert found[True].tolist() == found[False].tolist()
        free = {key: value for key, value in fields.items() if key != "banned_phrases"}
        assert descant.generate(model, prompts, **free, **method).tolist() != found[True].tolist()


@pytest.mark.parametrize("name", _each(CONTINUING))
def test_forced_tokens_of_a_grammar(name: str) -> None:
    model = _subject(name).model
    prompts = torch.tensor([_prompt(7, seed) for seed in range(3)])
    fields: dict[str, Any] = {"eos_token_id": 2, "max_new_tokens": 12, "return_dict_in_generate": True}
    grammars = [{"choice": ["abcdefgh", "abcdxyz", "ponmlk"], "drafts": drafts} for drafts in (True, False)]
    found = [
        descant.generate(model, prompts, **fields, grammar=grammar, tokenizer=tokenizer())
        for grammar in grammars
    ]
    assert found[0].sequences.tolist() == found[1].sequences.tolist()
    assert sum(one.saved_forwards for one in found[0].speculation) > 6
    assert found[1].speculation is None


@pytest.mark.parametrize("name", _each(CONTINUING, (*FEW, "Mamba2ForCausalLM")))
def test_as_many_forwards_are_saved_as_on_keys_and_values(name: str) -> None:
    """Along the same text the same drafts are accepted; the prompts repeat nothing, so they draft nothing."""
    phrases = ([34, 57, 80, 91, 60], [42, 43, 44], [50, 34, 57, 80, 52])
    texts = [
        [row, 61, 62, 63, *(token for at in range(9) for token in phrases[at * (row + 1) % 3])]
        for row in range(64, 67)
    ]
    reports = []
    for one in (name, "LlamaForCausalLM"):
        output = descant.generate(
            _subject(one).model,
            torch.tensor([text[:4] for text in texts]),
            prefix_allowed_tokens_fn=lambda row, ids: [texts[row][min(len(ids), len(texts[row]) - 1)]],
            max_new_tokens=24,
            prompt_lookup_num_tokens=4,
            return_dict_in_generate=True,
            **ALWAYS,
        )
        assert output.sequences.tolist() == [text[:28] for text in texts]
        reports.append(output.speculation)
    assert reports[0] == reports[1]
    assert all(report.saved_forwards > 4 for report in reports[0])
