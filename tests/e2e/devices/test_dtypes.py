"""Models in half precision: the same tokens as transformers' own generate, scores in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import descant
from tests.support import pretrained
from tests.support.tiny_models import Tiny, pad, prompts

Models = Callable[..., Tiny]

HALVES = [torch.bfloat16, torch.float16]


def half(tiny: Models, name: str, dtype: torch.dtype, attention: str = "sdpa") -> tuple[Tiny, Any]:
    one = tiny(name)
    auto = transformers.AutoModelForSeq2SeqLM if one.encoder_decoder else transformers.AutoModelForCausalLM
    return one, auto.from_pretrained(one.folder, dtype=dtype, attn_implementation=attention).eval()


def batch(one: Tiny, lengths: tuple[int, ...]) -> dict[str, Tensor]:
    ids, mask = pad(prompts(one.arch, lengths, 7), one.pad, "right" if one.encoder_decoder else "left")
    return {"input_ids": ids, "attention_mask": mask}


def both(model: Any, given: dict[str, Tensor], **how: Any) -> tuple[Any, Any]:
    """Our record of a call and theirs, both with the same chance."""
    how = {"max_new_tokens": 10, "return_dict_in_generate": True, "output_scores": True, **how}
    torch.manual_seed(0)
    theirs = model.generate(**given, **how)
    torch.manual_seed(0)
    return descant.generate(model, **given, **how), theirs


def ties(ours: Any, theirs: Any, width: int, dtype: torch.dtype) -> int:
    """How many rows differ, checked to do so first where their two choices score alike within rounding."""
    count = 0
    for row, (mine, other) in enumerate(zip(ours.sequences, theirs.sequences, strict=True)):
        new = [line[width:].tolist() for line in (mine, other)]
        place = next((at for at, (a, b) in enumerate(zip(*new, strict=False)) if a != b), None)
        if place is None:
            continue
        scores = theirs.scores[place][row]
        gap = float(scores[new[1][place]] - scores[new[0][place]])
        assert gap <= 8 * torch.finfo(dtype).eps * float(scores.abs().max()), (row, place, gap)
        count += 1
    return count


NAMES = ["llama", "mistral", "gpt2", "t5", "bart"]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_equal_their_own(tiny: Models, name: str, attention: str, dtype: torch.dtype) -> None:
    """Prompts of one length are computed alike to the last bit."""
    one, model = half(tiny, name, dtype, attention)
    for how in ({"do_sample": False}, {"do_sample": True, "top_k": 20}):
        ours, theirs = both(model, batch(one, (9, 9, 9)), output_logits=True, **how)
        assert ours.sequences.tolist() == theirs.sequences.tolist()
        assert {block.dtype for block in (*ours.scores, *ours.logits)} == {torch.float32}
        assert torch.equal(ours.logits[0], theirs.logits[0])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", NAMES)
def test_a_ragged_batch_differs_from_theirs_by_rounding_at_most(
    tiny: Models, name: str, attention: str, dtype: torch.dtype
) -> None:
    one, model = half(tiny, name, dtype, attention)
    given = batch(one, (5, 9, 3, 9))
    width = 1 if one.encoder_decoder else given["input_ids"].shape[1]
    ours, theirs = both(model, given, do_sample=False)
    assert ties(ours, theirs, width, dtype) <= 1
    drawn, _ = both(model, given, do_sample=True, top_k=20)
    assert {block.dtype for block in drawn.scores} == {torch.float32}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_beams_score_as_their_own(tiny: Models, name: str, dtype: torch.dtype) -> None:
    """One prompt at a time, for theirs lets the prompts of a batch end each other.

    They prefill a row for each beam and we one for all: where two beams are as good, rounding decides.
    """
    one, model = half(tiny, name, dtype)
    equal = 0
    for length in (5, 9, 3):
        ours, theirs = both(model, batch(one, (length,)), num_beams=3, do_sample=False)
        assert ours.sequences_scores.dtype == torch.float32
        torch.testing.assert_close(ours.sequences_scores, theirs.sequences_scores, rtol=0.02, atol=0.02)
        equal += ours.sequences.tolist() == theirs.sequences.tolist()
    assert equal >= 2


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_ragged_beams_run_and_score_as_alone(tiny: Models, dtype: torch.dtype, attention: str) -> None:
    """Rounding depends on the batch, so scores are close and not equal."""
    one, model = half(tiny, "mistral", dtype, attention)
    lengths = (5, 9, 3, 7)
    rows = prompts(one.arch, lengths, 7)
    how = {"num_beams": 3, "max_new_tokens": 10, "return_dict_in_generate": True, "output_scores": True}
    together = descant.generate(model, **batch(one, lengths), **how).sequences_scores
    alone = [
        descant.generate(model, torch.tensor([row]), attention_mask=torch.ones(1, len(row)), **how)
        for row in rows
    ]
    torch.testing.assert_close(
        together, torch.cat([one.sequences_scores for one in alone]), rtol=0.05, atol=0.05
    )


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_caches_are_kept_in_the_models_dtype(tiny: Models, name: str, dtype: torch.dtype) -> None:
    one, model = half(tiny, name, dtype)
    session = descant.Session(model)
    config = descant.GenerationConfig(max_new_tokens=4)
    if one.encoder_decoder:
        session.admit(descant.Request([one.arch.start], config, {"input_ids": torch.tensor([5, 6, 7])}))
        session.step()
        memory = session.model.encoder._cross_cache
        assert {block.dtype for block in memory._keys.values()} == {dtype}
    else:
        session.admit(descant.Request([5, 6, 7], config), descant.Request([8, 9], config))
        session.step()
    cache = session._tables.default.cache
    assert {block.dtype for store in (cache._keys, cache._values) for block in store.values()} == {dtype}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_mask_shown_to_eager_attention_is_in_the_models_dtype(
    tiny: Models, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, model = half(tiny, "llama", dtype, "eager")
    shown: list[Tensor] = []
    forward = model.forward

    def spy(*args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        shown.extend([] if mask is None else [mask])
        return forward(*args, **kwargs)

    session = descant.Session(model)
    monkeypatch.setattr(model, "forward", spy)
    config = descant.GenerationConfig(max_new_tokens=4, eos_token_id=None)
    session.admit(*(descant.Request(row, config) for row in prompts(one.arch, (3, 6), 2)))
    list(session.drain())
    assert shown
    assert {mask.dtype for mask in shown} == {dtype}
    assert all(bool(mask.isfinite().all()) for mask in shown)  # -inf would make NaN of a row without keys


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_embeddings_given_in_half_precision(tiny: Models, dtype: torch.dtype) -> None:
    one, model = half(tiny, "llama", dtype)
    given = batch(one, (6, 6))
    embeds = model.get_input_embeddings()(given["input_ids"])
    found = descant.generate(model, inputs_embeds=embeds, max_new_tokens=6)
    assert torch.equal(found, descant.generate(model, **given, max_new_tokens=6)[:, 6:])


def test_a_pretrained_model_in_bfloat16() -> None:
    folder = pretrained.folder("stories15m")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = ["Once upon a time", "The little dog wanted to", "Lily"]
    rows = [tokenizer(text)["input_ids"] for text in texts]
    ids, mask = pad(rows, 0, "left")
    how = {"max_new_tokens": 24, "pad_token_id": 0}
    how |= {"return_dict_in_generate": True, "output_scores": True}
    ours, theirs = both(model, {"input_ids": ids, "attention_mask": mask}, do_sample=False, **how)
    assert ties(ours, theirs, ids.shape[1], torch.bfloat16) <= 1
    level = {
        "input_ids": torch.tensor([rows[1], rows[1]]),
        "attention_mask": torch.ones(2, len(rows[1])).long(),
    }
    for more in ({"do_sample": False}, {"do_sample": True, "top_k": 40}):
        ours, theirs = both(model, level, **how, **more)
        assert torch.equal(ours.sequences, theirs.sequences)
    one = {name: value[:1] for name, value in level.items()}
    ours, theirs = both(model, one, num_beams=4, do_sample=False, **how)
    torch.testing.assert_close(ours.sequences_scores, theirs.sequences_scores, rtol=0.02, atol=0.02)
