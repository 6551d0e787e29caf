"""Guidance against a reference that reads both texts again for every hypothesis at every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import descant
from descant import ConfigError, GenerationConfig, InputError, Request, Session
from tests.support.tiny_models import Tiny, pad, prompts

NEW = 8
NEAR = {"rtol": 0.0, "atol": 5e-4}
NAMES = ("llama", "gpt2")
LENGTHS = (7, 2, 12)
SCALES = (1.5, 3.0, 0.0, -1.0, 0.5)


# ------------------------------------------------------------------------ the reference
@torch.no_grad()
def law(
    tiny: Tiny, prompt: Sequence[int], negative: Sequence[int] | None, new: Sequence[int], scale: float
) -> Tensor:
    """The scores after a prompt and new tokens [V], by two full forwards."""
    negative = prompt[-1:] if negative is None else negative
    given, without = (
        tiny.model(torch.tensor([[*one, *new]])).logits[0, -1].log_softmax(-1) for one in (prompt, negative)
    )
    return without + scale * (given - without)


def greedy(
    tiny: Tiny, prompt: Sequence[int], negative: Sequence[int] | None, scale: float, count: int = NEW
) -> list[int]:
    new: list[int] = []
    for _ in range(count):
        new.append(int(law(tiny, prompt, negative, new, scale).argmax()))
    return new


def rows_of(tiny: Tiny, seed: int = 70) -> list[list[int]]:
    return prompts(tiny.arch, LENGTHS, seed)


def negatives(tiny: Tiny, lengths: Sequence[int] = (3, 9, 1)) -> list[list[int]]:
    """Shorter, longer and much shorter than their prompts."""
    return prompts(tiny.arch, lengths, 71)


def call(tiny: Tiny, rows: list[list[int]], without: list[list[int]] | None = None, **fields: Any) -> Any:
    ids, mask = pad(rows, tiny.arch.pad, "left")
    more = {}
    if without is not None:
        names = ("negative_prompt_ids", "negative_prompt_attention_mask")
        more = dict(zip(names, pad(without, tiny.arch.pad, "left"), strict=True))
    found = descant.generate(
        tiny.model,
        ids,
        attention_mask=mask,
        **more,
        **{"max_new_tokens": NEW, "eos_token_id": None, **fields},
    )
    new = (found.sequences if isinstance(found, dict) else found)[:, ids.shape[1] :]
    return new.tolist(), found


BOTH = pytest.mark.parametrize("given", [False, True], ids=["without", "with a negative prompt"])


def each(tiny: Tiny, given: bool) -> list[list[int] | None]:
    return [*negatives(tiny)] if given else [None] * len(LENGTHS)


# ------------------------------------------------------------------------ tokens
@BOTH
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", NAMES)
def test_greedy(tiny, name, scale, given):
    model, rows = tiny(name), rows_of(tiny(name))
    found, _ = call(model, rows, negatives(model) if given else None, guidance_scale=scale)
    assert found == [
        greedy(model, row, negative, scale) for row, negative in zip(rows, each(model, given), strict=True)
    ]


def test_unconditional_rows_belong_to_no_request(tiny, monkeypatch):
    """Side inputs of a request, such as images, do not reach its unconditional row."""
    model = tiny("llama")
    session = Session(model.model)
    config = GenerationConfig(max_new_tokens=2, guidance_scale=1.5)
    numbers = session.admit(*(Request(row, config) for row in rows_of(model)))
    (table,) = session._tables
    fed, forward = [], table.model.inner.forward

    def spy(rows, *arguments):
        fed.append(rows.request.tolist())
        return forward(rows, *arguments)

    monkeypatch.setattr(table.model.inner, "forward", spy)
    session.step()
    requests = fed[0]
    assert sorted(request for request in requests if request >= 0) == numbers
    assert len({request for request in requests if request < 0}) == len(numbers)


@pytest.mark.ci_cases(
    "llama-1.5-with a negative prompt",
    "llama--1.0-without",
    "gpt2-1.5-without",
    "gpt2--1.0-with a negative prompt",
)
@BOTH
@pytest.mark.parametrize("scale", [1.5, -1.0])
@pytest.mark.parametrize("name", NAMES)
def test_beams(tiny, name, scale, given):
    """Beam search by hand on both branches, without ends: the same hypotheses with the same scores."""
    model, rows = tiny(name), rows_of(tiny(name))
    found, record = call(
        model, rows, negatives(model) if given else None, guidance_scale=scale, num_beams=3,
        num_return_sequences=3, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    for line, (row, negative) in enumerate(zip(rows, each(model, given), strict=True)):
        beams: list[tuple[float, list[int]]] = [(0.0, [])]
        for _ in range(NEW):
            options = []
            for total, new in beams:
                shares = law(model, row, negative, new, scale).log_softmax(-1)
                options += [(total + share, [*new, token]) for token, share in enumerate(shares.tolist())]
            beams = sorted(options, key=lambda one: -one[0])[:3]
        assert found[3 * line : 3 * line + 3] == [new for _, new in beams]
        scores = [total / NEW for total, _ in beams]
        assert record.sequences_scores[3 * line : 3 * line + 3].tolist() == pytest.approx(scores, abs=2e-4)


@BOTH
def test_the_record(tiny, given):
    """Scores are guided, logits and raw log-probabilities are the network's own after the prompt."""
    model, rows = tiny("llama"), rows_of(tiny("llama"))
    found, record = call(
        model, rows, negatives(model) if given else None, guidance_scale=1.7, do_sample=True, top_k=0,
        temperature=2.0, seed=3, logprobs=1, return_dict_in_generate=True, output_scores=True,
        output_logits=True, output_hidden_states=True,
    )  # fmt: skip
    wide = max(LENGTHS)
    for line, (row, negative) in enumerate(zip(rows, each(model, given), strict=True)):
        with torch.no_grad():
            own = model.model(torch.tensor([[*row, *found[line]]]), output_hidden_states=True)
        for at, token in enumerate(found[line]):
            guided = law(model, row, negative, found[line][:at], 1.7) / 2.0
            torch.testing.assert_close(record.scores[at][line], guided, **NEAR)
            plain = own.logits[0, len(row) + at - 1]
            torch.testing.assert_close(record.logits[at][line], plain, **NEAR)
            logs = record.logprobs[line]
            assert float(logs.raw[at]) == pytest.approx(float(plain.log_softmax(-1)[token]), abs=1e-3)
            assert float(logs.processed[at]) == pytest.approx(float(guided.log_softmax(-1)[token]), abs=1e-3)
            for layer, states in enumerate(record.hidden_states[at]):
                assert states.shape[0] == len(rows)
                there = slice(0, len(row)) if at == 0 else slice(len(row) + at - 1, len(row) + at)
                here = states[line, wide - len(row) :] if at == 0 else states[line]
                torch.testing.assert_close(here, own.hidden_states[layer][0, there], **NEAR)


def test_contrastive_search_ranks_what_is_guided(tiny):
    model, row = tiny("llama"), rows_of(tiny("llama"))[0]
    negative = negatives(model)[0]
    found, _ = call(model, [row], [negative], guidance_scale=1.5, penalty_alpha=0.6, top_k=4)
    new: list[int] = []
    for _ in range(NEW):
        probs, tokens = law(model, row, negative, new, 1.5).softmax(-1).topk(4)
        worth = []
        for prob, token in zip(probs.tolist(), tokens.tolist(), strict=True):
            with torch.no_grad():
                states = model.model(
                    torch.tensor([[*row, *new, token]]), output_hidden_states=True
                ).hidden_states[-1][0]
            alike = torch.cosine_similarity(states[:-1], states[-1:], dim=-1).max()
            worth.append((0.4 * prob - 0.6 * float(alike), token))
        new.append(max(worth)[1])
    assert found == [new]


def test_a_longer_negative_prompt_needs_positions_too(tiny):
    """The twin's place in the table of positions counts as well as the row's own."""
    gpt2 = tiny("gpt2")
    row, long = prompts(gpt2.arch, (4, 90), 73)
    found, _ = call(gpt2, [row], [long], guidance_scale=1.5, max_new_tokens=7)
    assert found == [greedy(gpt2, row, long, 1.5, 7)]
    with pytest.raises((ConfigError, InputError), match="96 positions"):
        call(gpt2, [row], [long], guidance_scale=1.5, max_new_tokens=8)


# ------------------------------------------------------------------------ refusals
def test_an_encoder_has_no_guidance(tiny):
    t5 = tiny("t5")
    with pytest.raises(ConfigError, match="`guidance_scale` is not supported for a model with an encoder"):
        descant.generate(t5.model, torch.tensor(rows_of(t5)[:1]), guidance_scale=2.0)


PAIR, MASKED = torch.tensor([[3, 4]]), "negative_prompt_attention_mask"


@pytest.mark.parametrize(
    ("ids", "fields", "message"),
    [
        (PAIR, {"guidance_scale": None}, "`negative_prompt_ids` has no use without `guidance_scale`"),
        (PAIR, {"guidance_scale": 1.0}, "`negative_prompt_ids` has no use without `guidance_scale`"),
        (None, {MASKED: torch.ones(1, 2)}, f"`{MASKED}` has no use without `negative_prompt_ids`"),
        ([[3, 4]], {}, r"`negative_prompt_ids` must be \[batch, length\]"),
        (torch.tensor([3, 4]), {}, "`negative_prompt_ids` must be"),
        (torch.tensor([[3], [4]]), {}, "one row for each of the 1 prompts"),
        (torch.tensor([[3, 500]]), {}, "must hold ids from 0 to 96"),
        (torch.tensor([[3, -1]]), {}, "must hold ids from 0 to 96"),
        (PAIR, {MASKED: torch.zeros(1, 2)}, "`negative_prompt_ids` must hold ids"),
        (PAIR, {MASKED: torch.ones(1, 3)}, f"`{MASKED}` must have the shape"),
    ],
)
def test_negative_prompts_that_are_none(tiny, ids, fields, message):
    llama = tiny("llama")
    given = {
        "guidance_scale": 2.0,
        "max_new_tokens": 3,
        **({} if ids is None else {"negative_prompt_ids": ids}),
    }
    with pytest.raises(InputError, match=message):
        descant.generate(llama.model, torch.tensor(rows_of(llama)[:1]), **{**given, **fields})


def test_embeddings_need_a_negative_prompt(tiny):
    llama = tiny("llama")
    row, negative = rows_of(llama)[0], negatives(llama)[0]
    with torch.no_grad():
        embeddings = llama.model.get_input_embeddings()(torch.tensor([row]))
    shared = {"guidance_scale": 1.5, "max_new_tokens": NEW, "eos_token_id": None}
    with pytest.raises(InputError, match="`negative_prompt_ids` must be given"):
        descant.generate(llama.model, inputs_embeds=embeddings, **shared)
    found = descant.generate(
        llama.model, inputs_embeds=embeddings, negative_prompt_ids=torch.tensor([negative]), **shared
    )
    assert found.tolist() == [greedy(llama, row, negative, 1.5)]
