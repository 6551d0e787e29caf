"""Laws under grammars: a row's tokens depend on no other row, no draft and no admission time."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jsonschema
import pytest
import torch

import descant
from descant import GenerationConfig, Request
from descant.core.sampling_noise import SamplingNoise
from descant.decoding.grammars.backend import MatcherPool
from descant.decoding.processors.grammar import GRAMMAR_PARAM, GrammarLogitsProcessor
from descant.decoding.speculative.draft_model import AssistantDrafter
from descant.decoding.speculative.lookup import GrammarDrafter, PromptLookup
from descant.engine.planning.planner import as_model
from descant.models.loading.tiny_llama import toy
from descant.testing import check_admission, check_batch, check_drafter, check_processor
from tests.support.grammar_texts import BACKENDS, compiled
from tests.support.json_tokenizer import tokenizer
from tests.support.schema_cases import schemas

EOS = 2
PROMPTS = ([5, 9, 40], [7, 7, 8, 60, 61], [30], [80, 81, 82, 83])
METHODS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "seed": 3, "temperature": 1.2, "min_p": 0.02},
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 3, "do_sample": True, "seed": 9},
    "diverse beams": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "constrained beams": {"num_beams": 4, "force_words_ids": [[92]]},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "low-memory contrastive": {"penalty_alpha": 0.6, "top_k": 4, "low_memory": True},
    "guidance": {"guidance_scale": 1.6},
    "DoLa": {"dola_layers": "low"},
    "lookup": {"prompt_lookup_num_tokens": 4},
    "suffix": {"suffix_lookup_num_tokens": 4},
    "early exit": {"assistant_early_exit": 1, "num_assistant_tokens": 3},
    "backtracking": {"banned_phrases": ["ab", "12"]},
    "healing": {"token_healing": True},
    "stop strings": {"stop_strings": ["zzz"], "stop_regex": "yyy"},
    "watermark": {
        "do_sample": True,
        "seed": 4,
        "watermarking_config": {"hashing_key": 7},
    },
    "penalties": {
        "repetition_penalty": 1.5,
        "do_sample": True,
        "seed": 8,
        "top_k": 3,
        "presence_penalty": 1.0,
    },
}


@cache
def model() -> Any:
    return toy(vocab_size=len(tokenizer()), seed=1)


def grammars(backend: str, count: int = 16) -> list[dict[str, Any]]:
    """Grammars of every kind."""
    own: list[dict[str, Any]] = [
        {"regex": "[a-f]{3,9}(12)?"},
        {"choice": ["abc", "abd", "name", "true story"]},
        {"grammar": 'root ::= "(" root ")" | "x" | "yz"'},
        {"json": True},
        {
            "tools": [
                {"type": "function", "function": {"name": name, "parameters": schema}}
                for name, schema in zip(("now", "get"), schemas(2, plain=True), strict=True)
            ],
            "tool_choice": "required",
        },
    ]
    own += [{"json_schema": schema} for schema in schemas(count - len(own), plain=True)]
    return [{**one, "backend": backend} for one in own]


def request(grammar: dict[str, Any], index: int = 0, **config: Any) -> Request:
    settings = {"max_new_tokens": 24 + index, "eos_token_id": EOS, "pad_token_id": 0, "grammar": grammar}
    settings |= config
    if not config.keys() & {"num_beams", "penalty_alpha", "banned_phrases"} and grammar.get("drafts", True):
        settings["num_assistant_tokens_schedule"] = "constant"  # the law compares what is fed, drafts too
    return Request(PROMPTS[index % len(PROMPTS)], GenerationConfig(**settings), tokenizer=tokenizer())


@pytest.mark.parametrize("backend", BACKENDS)
def test_sixteen_grammars_in_a_ragged_batch(backend):
    kinds = [METHODS[name] for name in ("greedy", "sampling", "beams", "lookup", "contrastive", "DoLa")]
    requests = [request(one, at, **kinds[at % len(kinds)]) for at, one in enumerate(grammars(backend))]
    check_batch(model(), requests)


@pytest.mark.parametrize("backend", BACKENDS)
def test_admitted_late_equals_admitted_first(backend):
    kinds = [METHODS[name] for name in ("greedy", "sampling", "beams", "suffix")]
    requests = [request(one, at, **kinds[at % len(kinds)]) for at, one in enumerate(grammars(backend, 8))]
    check_admission(model(), requests, schedules=3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", METHODS)
def test_every_method_ends_with_a_text_of_its_grammar(backend, name):
    schema = {
        "type": "object",
        "properties": {
            "na": {"type": "integer", "minimum": 0, "maximum": 99},
            "b": {"enum": ["ab}", "true"]},
        },
        "required": ["na", "b"],
        "additionalProperties": False,
    }
    chosen = request({"json_schema": schema, "backend": backend}, 1, max_new_tokens=48, **METHODS[name])
    session = descant.Session(model())
    session.admit(chosen, request({"regex": "[a-z]{30}", "backend": backend}), chosen)
    results = [event for event in session.drain() if isinstance(event, descant.Finished)]
    texts = []
    for finished in results:
        if finished.request == 1:
            continue
        for one in finished.hypotheses:
            assert one.reason == "eos"
            texts.append(tokenizer().decode(one.tokens.tolist(), skip_special_tokens=True))
    assert len(texts) >= 2
    for text in texts:
        jsonschema.validate(json.loads(text[text.index("{") :]), schema)


@pytest.mark.parametrize("backend", BACKENDS)
def test_drafts_change_nothing(backend):
    """Forced tokens, alone and beside each other drafter, leave greedy and seeded rows as they are."""
    requests = [
        request({**one, "drafts": False}, at, **METHODS["sampling" if at % 2 else "greedy"])
        for at, one in enumerate(grammars(backend, 7)[1::2])
    ]
    network = as_model(toy(vocab_size=len(tokenizer()), seed=5))
    drafters = (
        GrammarDrafter,
        lambda: GrammarDrafter(PromptLookup()),
        lambda: GrammarDrafter(
            AssistantDrafter(network, network.new_cache(), SamplingNoise(), vocabulary=len(tokenizer()))
        ),
    )
    for make in drafters:
        check_drafter(model(), make, requests, sizes=(4,))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_line_depends_on_its_own_text(backend):
    pools = [
        {GRAMMAR_PARAM: MatcherPool(compiled(tokenizer(), backend, **spec), [EOS])}
        for spec in ({"regex": "[a-z ]*"}, {"json": True}, {"choice": ["ab", "a"]})
    ]
    check_processor(GrammarLogitsProcessor.make_unbound(), pools, vocabulary=len(tokenizer()) + 5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("drafts", [False, True])
def test_unseeded_sampling_follows_the_exact_law(backend, drafts):
    """Chi-square of sampled texts against their probabilities, with forced tokens and lookups as drafts."""
    choices = ["aba", "abb", "ba", "a12", "12"]
    processor = GrammarLogitsProcessor({"choice": choices, "backend": backend}, tokenizer(), EOS)
    expected = _exact_law(processor, torch.tensor(PROMPTS[1]))
    count = 3000
    config = GenerationConfig(
        do_sample=True, max_new_tokens=6, eos_token_id=EOS, pad_token_id=0, num_return_sequences=count,
        grammar={"choice": choices, "backend": backend, "drafts": drafts},
        **({"prompt_lookup_num_tokens": 2} if drafts else {}),
    )  # fmt: skip
    torch.manual_seed(11)
    ids = torch.tensor([PROMPTS[1]])
    out = descant.generate(model(), ids, generation_config=config, tokenizer=tokenizer())
    counts: dict[tuple[int, ...], int] = {}
    for row in out[:, ids.shape[1] :].tolist():
        text = tuple(row[: row.index(EOS) + 1])
        counts[text] = counts.get(text, 0) + 1
    assert set(counts) <= set(expected)
    frequent = {text: share * count for text, share in expected.items() if share * count >= 5}
    chi = sum((counts.get(text, 0) - mean) ** 2 / mean for text, mean in frequent.items())
    degrees = max(len(frequent) - 1, 1)
    assert len(frequent) >= 3
    assert chi < degrees + 5 * (2 * degrees) ** 0.5 + 5


def _exact_law(processor: GrammarLogitsProcessor, prompt: torch.Tensor) -> dict[tuple[int, ...], float]:
    """The probability of every text, by expanding all that is permitted."""
    law: dict[tuple[int, ...], float] = {}
    processor.prompt_length = len(prompt)
    open_texts: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while open_texts:
        text, share = open_texts.pop()
        ids = torch.cat((prompt, torch.tensor(text, dtype=torch.long)))[None]
        with torch.no_grad():
            logits = model()(ids).logits[:, -1].float()
        probs = processor(ids, logits).softmax(-1)[0]
        for token in probs.nonzero().flatten().tolist():
            grown = (*text, token), share * float(probs[token])
            if token == EOS:
                law[grown[0]] = grown[1]
            else:
                open_texts.append(grown)
    assert abs(sum(law.values()) - 1) < 1e-4
    return law
