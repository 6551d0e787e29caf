"""The support of tokens, and the log-probabilities of a rollout in a training forward."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

import descant
from descant import (
    Finished,
    GenerationConfig,
    InputError,
    Request,
    Session,
    UnsupportedModel,
    WatermarkingConfig,
    replay_logprobs,
)
from tests.support.byte_tokenizer import tokenizer as byte_tokenizer
from tests.support.tiny_models import prompts

RECORD = {"logprobs": 0, "logprobs_support": True}
SAMPLE = {"do_sample": True, "seed": 3}
METHODS = {
    "temperature": {**SAMPLE, "temperature": 1.3},
    "top-k": {**SAMPLE, "top_k": 8},
    "top-p": {**SAMPLE, "top_p": 0.8, "temperature": 0.7},
    "min-p": {**SAMPLE, "min_p": 0.3},
    "typical": {**SAMPLE, "typical_p": 0.7},
    "penalties": {
        **SAMPLE, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2, "top_p": 0.9,
    },
    "bans": {**SAMPLE, "no_repeat_ngram_size": 2, "bad_words_ids": [[7]], "top_k": 20},
    "grammar": {**SAMPLE, "grammar": {"regex": "[a-z]{1,30}"}, "eos_token_id": 2},
    "watermark": {**SAMPLE, "watermarking_config": WatermarkingConfig(bias=2.0, hashing_key=7), "top_k": 40},
    "drafts": {**SAMPLE, "top_p": 0.9, "prompt_lookup_num_tokens": 3},
    "xtc": {**SAMPLE, "xtc_probability": 0.5, "xtc_threshold": 0.02, "top_k": 20},
    "mirostat": {**SAMPLE, "mirostat_tau": 3.0},
    "adaptive-p": {**SAMPLE, "adaptive_p_target": 0.3},
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "repetition_penalty": 1.2},
    "several": {**SAMPLE, "top_p": 0.8, "num_return_sequences": 3},
}  # fmt: skip


def rollout(model, prompt, fields, tokenizer=None):
    config = GenerationConfig(**{"eos_token_id": None, "max_new_tokens": 24, **RECORD, **fields})
    request = Request(prompt, config, tokenizer=tokenizer)
    session = Session(model)
    session.admit(request)
    [finished] = [event for event in session.drain() if isinstance(event, Finished)]
    return request, finished.hypotheses


def ratio(logprobs, others):
    """The largest distance of the ratio of two probabilities of a token from 1."""
    return float((logprobs.detach() - others).exp().sub(1).abs().max())


@pytest.mark.parametrize("name", METHODS)
def test_a_training_forward_has_the_probabilities_of_the_rollout(tiny, name):
    subject = tiny("llama")
    [prompt] = prompts(subject.arch, [12], 5)
    tokenizer = byte_tokenizer() if "grammar" in METHODS[name] else None
    request, sequences = rollout(subject.model, prompt, METHODS[name], tokenizer)
    for one in sequences:
        support = one.logprobs.support
        assert len(support.offsets) == len(one.tokens) + 1
        assert support.mask(97)[torch.arange(len(one.tokens)), one.tokens].all()
        for chunk in (128, 5, 1):
            found = replay_logprobs(subject.model, request, one.tokens, support, chunk=chunk)
            # Adaptive-p divides by a spread of probabilities, which makes rounding larger.
            assert ratio(found, one.logprobs.processed) < (5e-5 if name == "adaptive-p" else 1e-5)
    assert all(parameter.grad is None for parameter in subject.model.parameters())


def capped():
    """A model that caps its logits, which is no part of its output embeddings."""
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, final_logit_softcapping=1.5, attn_implementation="eager",
    )  # fmt: skip
    return transformers.Gemma2ForCausalLM(config).eval()


@pytest.mark.parametrize("name", ["gpt2", "mistral", "capped"])
def test_other_models(tiny, name):
    model = capped() if name == "capped" else tiny(name).model
    [prompt] = prompts(tiny("llama").arch, [9], 5)
    request, [one] = rollout(model, prompt, METHODS["top-p"])
    found = replay_logprobs(model, request, one.tokens, one.logprobs.support, chunk=7)
    assert ratio(found, one.logprobs.processed) < 1e-5


@pytest.mark.parametrize("fields", [METHODS["top-p"], METHODS["penalties"], METHODS["min-p"]])
def test_the_support_is_what_the_processors_leave(tiny, fields):
    """Of several rows at once, which end at different steps."""
    subject = tiny("llama")
    ids = torch.tensor(prompts(subject.arch, [12, 12], 6))
    out = descant.generate(
        subject.model, ids, max_new_tokens=20, return_dict_in_generate=True, output_scores=True,
        output_logits=True, num_return_sequences=2, **RECORD, **fields,
    )  # fmt: skip
    for row, one in enumerate(out.logprobs):
        count = len(one.raw)
        scores = torch.stack([step[row] for step in out.scores[:count]])
        mask = scores > -torch.inf
        assert torch.equal(one.support.mask(97), mask)
        raw = torch.stack([step[row] for step in out.logits[:count]]).masked_fill(~mask, -torch.inf)
        own = raw.log_softmax(-1).gather(1, out.sequences[row, 12 : 12 + count, None])[:, 0]
        assert torch.allclose(one.support.logprobs, own, atol=1e-5)


def test_requests_without_it_have_none_beside_one_that_has(tiny):
    subject = tiny("llama")
    given = prompts(subject.arch, [12, 7, 9], 6)
    fields = [{**METHODS["top-p"], "logprobs": 1}, {**METHODS["top-p"], **RECORD}, METHODS["top-k"]]
    session = Session(subject.model)
    found = {}
    for prompt, one in zip(given, fields, strict=True):
        session.admit(Request(prompt, GenerationConfig(max_new_tokens=9, eos_token_id=None, **one)))
        found |= {event.request: event for event in session.step() if isinstance(event, Finished)}
    found |= {event.request: event for event in session.drain() if isinstance(event, Finished)}
    assert found[0].hypotheses[0].logprobs.support is None
    assert found[2].hypotheses[0].logprobs is None
    support = found[1].hypotheses[0].logprobs.support
    _, [alone] = rollout(subject.model, given[1], {**fields[1], "max_new_tokens": 9})
    assert torch.equal(support.token_ids, alone.logprobs.support.token_ids)
    assert torch.equal(support.offsets, alone.logprobs.support.offsets)


def test_gradients_are_those_of_a_masked_softmax(tiny):
    subject = tiny("llama")
    model = copy.deepcopy(subject.model)
    [prompt] = prompts(subject.arch, [12], 5)
    request, [one] = rollout(model, prompt, METHODS["top-p"])
    found = []
    for chunk in (128, 6):
        model.zero_grad()
        replay_logprobs(model, request, one.tokens, one.logprobs.support, chunk=chunk).sum().backward()
        found.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    model.zero_grad()
    ids = torch.cat((torch.tensor(prompt), one.tokens))
    logits = model(ids[None, :-1]).logits[0, len(prompt) - 1 :] / 0.7
    masked = logits.masked_fill(~one.logprobs.support.mask(97), -torch.inf)
    masked.log_softmax(-1).gather(1, one.tokens[:, None]).sum().backward()
    for name, parameter in model.named_parameters():
        for gradients in found:
            assert torch.allclose(gradients[name], parameter.grad, atol=1e-4), name


def test_the_support_outlives_an_update(tiny):
    """After it the filters alone would leave other tokens, not always the chosen one."""
    subject = tiny("llama")
    model = copy.deepcopy(subject.model)
    [prompt] = prompts(subject.arch, [12], 5)
    request, [one] = rollout(model, prompt, METHODS["top-k"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    kept = replay_logprobs(model, request, one.tokens, one.logprobs.support)
    filtered = replay_logprobs(model, request, one.tokens)
    ids = torch.cat((torch.tensor(prompt), one.tokens))
    logits = model(ids[None, :-1]).logits[0, len(prompt) - 1 :]
    masked = logits.masked_fill(~one.logprobs.support.mask(97), -torch.inf)
    expected = masked.log_softmax(-1).gather(1, one.tokens[:, None])[:, 0]
    assert torch.allclose(kept, expected, atol=1e-5)
    assert bool(filtered.isinf().any())


def test_what_cannot_be_replayed_is_refused(tiny):
    model, tokens = tiny("llama").model, torch.tensor([5, 6])
    synthid = descant.SynthIDTextWatermarkingConfig(ngram_len=3, keys=[5, 6])
    for fields, name in (
        ({"guidance_scale": 1.5}, "generation_config"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "generation_config"),
        ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}, "generation_config"),
        ({**SAMPLE, "watermarking_config": synthid}, "watermarking_config"),
    ):
        with pytest.raises(InputError, match=name):
            replay_logprobs(model, Request([5, 6], GenerationConfig(max_new_tokens=2, **fields)), tokens)
    request = Request([5, 6], GenerationConfig(max_new_tokens=2))
    for arguments, name in (
        ({"chunk": 0}, "chunk"),
        ({"tokens": torch.zeros(0, dtype=torch.long)}, "tokens"),
        ({"support": descant.Support(torch.zeros(1), torch.tensor([0, 1]), torch.zeros(1))}, "support"),
    ):
        with pytest.raises(InputError, match=name):
            replay_logprobs(model, request, **{"tokens": tokens, **arguments})
    with pytest.raises(UnsupportedModel):
        replay_logprobs(tiny("t5").model, request, tokens)
    with pytest.raises(descant.ConfigError, match="logprobs"):
        descant.generate(model, torch.tensor([[5, 6]]), logprobs_support=True)
