"""SmolLM2-135M continues from cached prompts, in memory or from disk, with the same output."""

from __future__ import annotations

import pytest
import torch

import descant
from descant.models.compat.hf_caches.dynamic import DynamicCache
from tests.reference.real.prompts import PROMPTS
from tests.support import tiny_models

SMOL = "smollm2"
RULES = "You are a careful assistant. " + " ".join(f"Rule {n}: be brief, kind and exact." for n in range(6))


@pytest.fixture(scope="module")
def talk(real):
    """The model, and prompts that all begin with the same rules."""
    model = real(SMOL)
    texts = [f"{RULES}\n\n{prompt}" for prompt in PROMPTS[:3]]
    tokens = [model.tokens(text) for text in texts]
    shared = next(place for place, some in enumerate(zip(*tokens, strict=False)) if len(set(some)) > 1)
    return model, tokens, torch.tensor(tokens[0][:shared])


METHODS = {
    "greedy": {"max_new_tokens": 5},
    "beams": {"num_beams": 3, "max_new_tokens": 4},
    "sampling": {"do_sample": True, "seed": 1, "top_p": 0.9, "max_new_tokens": 5},
    "lookup": {"prompt_lookup_num_tokens": 5, "max_new_tokens": 8},
}
SLOW = pytest.mark.slow
CASES = [
    pytest.param("paged", "greedy", marks=SLOW),
    ("paged", "beams"),
    pytest.param("paged", "sampling", marks=SLOW),
    ("paged", "lookup"),
    ("dynamic", "greedy"),
]


@pytest.mark.parametrize(("kind", "method"), CASES)
def test_continuations_of_one_prefix_equal_cold_calls(kind, method, talk):
    model, tokens, shared = talk
    method = METHODS[method]
    ids, mask = tiny_models.pad(tokens, model.pad, "left")
    cache = descant.prefill(model.model, shared, cache=kind)
    found = descant.generate(model.model, ids, attention_mask=mask, past_key_values=cache, **method)
    for line, text in enumerate(tokens):
        cold = descant.generate(model.model, torch.tensor([text]), **method)[0, len(text) :]
        assert found[line, ids.shape[1] :][: len(cold)].tolist() == cold.tolist()


def test_text_is_read_and_saved(talk, tmp_path):
    model, tokens, _ = talk
    cache = descant.prefill(model.model, RULES, tokenizer=model.tokenizer, chunk=64)
    cache.save(tmp_path / "rules.safetensors")
    back = descant.load_cache(tmp_path / "rules.safetensors", model.model)
    held = back.tokens[0]
    text = next(some for some in tokens if some[: len(held)] == held.tolist())
    call = {"max_new_tokens": 6}
    cold = descant.generate(model.model, torch.tensor([text]), **call)
    assert torch.equal(
        descant.generate(model.model, torch.tensor([text]), past_key_values=back, **call), cold
    )


def test_a_conversation_on_one_cache(real):
    model, cache = real(SMOL), DynamicCache()
    turns = [{"role": "user", "content": "Name three colours."}]
    for question in ("And three animals?", "Which of them is blue?", None):
        ids = model.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt")
        ids = ids if isinstance(ids, torch.Tensor) else ids["input_ids"]
        # The template may change a turn: the cache keeps the common prefix.
        held = cache.tokens[0] if cache.lengths.numel() else ids[0, :0]
        alike = int((ids[0, : len(held)] == held[: ids.shape[1]]).long().cumprod(0).sum())
        if alike < len(held):
            cache.crop(alike)
        cold = descant.generate(model.model, ids, max_new_tokens=8)
        assert torch.equal(descant.generate(model.model, ids, past_key_values=cache, max_new_tokens=8), cold)
        said = model.tokenizer.decode(cold[0, ids.shape[1] :], skip_special_tokens=True)
        turns += [{"role": "assistant", "content": said}, {"role": "user", "content": question}]
