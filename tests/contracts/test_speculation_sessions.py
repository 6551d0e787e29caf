"""Requests with and without drafts in one session: admitted, finished, failed or cancelled meanwhile."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from descant import Failed, Finished, GenerationConfig, Request, RowError, Session
from descant.testing import check_admission, check_batch, outcomes
from descant.testing.outcome import Schedule
from tests.contracts.configs import TEXTS, tokenizer
from tests.contracts.speculation import DRAFTERS, FEW, few_words, near, request, texts
from tests.support.tiny_models import prompts

LENGTHS = (7, 12, 1, 5, 16, 3)
SEEDED = {"do_sample": True, "seed": 21, "temperature": 1.2}
OTHERS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 3},
    "banned": {"banned_phrases": [one + two for one in TEXTS[3:80:2] for two in TEXTS[3:80:3]]},
}


def mixed(tiny: Any) -> list[tuple[Request, Request]]:
    """Requests that draft, each with the same request that does not; and others, twice the same."""
    pairs, base = [], few_words(tiny)
    for at, name in enumerate((*DRAFTERS, *DRAFTERS)):
        if tiny.encoder_decoder and name == "early exit":
            continue
        text = texts(tiny, LENGTHS, seed=at)[at % len(LENGTHS)]
        options: dict[str, Any] = {**base, "max_new_tokens": 9 + 2 * (at % 5)}
        if at >= len(DRAFTERS):
            options |= {**SEEDED, "seed": 20 + at, "num_return_sequences": 1 + at % 3}
        pairs.append((request(tiny, text, options), request(tiny, text, options, name)))
    for at, options in enumerate(({}, SEEDED, *OTHERS.values())):
        more = {"tokenizer": tokenizer()} if "banned_phrases" in options else {}
        text = prompts(tiny.arch, [4 + at], 50 + at)[0]
        one = request(tiny, text, {"max_new_tokens": 10, **options}, **more)
        pairs.append((one, one))
    return pairs


def alike(plain: list[Any], guessed: list[Any], where: str) -> None:
    """Assert that two runs gave the same for every request."""
    for place, (one, two) in enumerate(zip(plain, guessed, strict=True)):
        said = f"{where}, request {place}"
        assert type(one.error) is type(two.error), f"{said}: {two.error}, without guesses {one.error}"
        assert one.tokens == two.tokens, said
        assert one.reasons == two.reasons, said
        assert one.streamed_tokens == two.streamed_tokens, said


@pytest.mark.ci_cases("t5")
@pytest.mark.parametrize(
    "name", ["llama", "t5", *(pytest.param(one, marks=pytest.mark.slow) for one in ("gpt2", "mistral"))]
)
def test_requests_with_and_without_drafts_share_a_session(name, tiny):
    model = tiny(name)
    pairs = mixed(model)
    alone = [outcomes(model.model, [plain])[0] for plain, _ in pairs]
    rng = random.Random(name)
    guesses = [0, 0]
    for turn in range(2):
        schedule = Schedule.random(rng, len(pairs)) if turn else Schedule.at_once(range(len(pairs)))
        found = outcomes(model.model, [guessing for _, guessing in pairs], schedule)
        alike(alone, found, f"schedule {turn}")
        for one in [some for outcome in found for some in outcome.hypotheses if some.speculation]:
            guesses[0] += sum(one.speculation.drafted)
            guesses[1] += sum(one.speculation.accepted)
    assert 0 < guesses[1] < guesses[0], guesses


@pytest.mark.ci_cases("draft model", "lookup")
@pytest.mark.parametrize("drafter", [*FEW, "its own draft model"])
def test_the_laws_of_requests(drafter, tiny):
    """A batch equals its rows alone, down to the places at which rows stand between steps."""
    model = tiny("llama")
    given = [
        request(model, text, {**few_words(model), **method, "max_new_tokens": 10 + 3 * at}, drafter)
        for at, (text, method) in enumerate(
            zip(texts(model, (7, 12, 1, 5)), ({}, SEEDED, {"repetition_penalty": 1.2}, SEEDED), strict=True)
        )
    ]
    check_batch(model.model, given)
    check_admission(model.model, given, schedules=3)


def impossible(after: int) -> Any:
    """A user's processor that leaves nothing to choose once so many tokens are new."""

    def process(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        # Counted where padding ends, which no prompt here holds.
        count = (input_ids != 0).sum(1, keepdim=True)
        return torch.where(count >= after, -torch.inf, scores)

    return process


@pytest.mark.parametrize("drafter", FEW)
def test_a_row_that_fails_beside_rows_that_go_on(drafter, tiny):
    """It fails at the same token, however long the draft is, and the others are unaffected."""
    model = tiny("llama")
    lines = texts(model, (7, 12, 5, 9))
    runs = []
    for name in (None, drafter):
        given = []
        for at, text in enumerate(lines):
            options = {**few_words(model), "max_new_tokens": 14, "pad_token_id": 0}
            broken = (impossible(len(text) + 3 + at),) if at in (1, 3) else ()
            given.append(request(model, text, options, name, logits_processor=broken))
        runs.append(outcomes(model.model, given))
    alike(*runs, drafter)
    assert [isinstance(one.error, RowError) for one in runs[1]] == [False, True, False, True]
    assert [len(runs[1][at].streamed_tokens[0]) for at in (1, 3)] == [4, 6]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_cancelled_requests_are_forgotten(drafter, tiny):
    model = tiny("llama")
    options = {**few_words(model), "max_new_tokens": 12}
    lines = texts(model, (7, 12, 5, 9))
    alone = [outcomes(model.model, [request(model, text, options)])[0].tokens for text in lines]
    session = Session(model.model)
    numbers = session.admit(*(request(model, text, options, drafter) for text in lines))
    found: dict[int, list[list[int]]] = {}
    for step in range(40):
        if step == 1:
            session.cancel(numbers[1])
        for event in session.step():
            assert not isinstance(event, Failed)
            if isinstance(event, Finished):
                found[event.request] = [one.tokens.tolist() for one in event.hypotheses]
        if not len(session):
            break
    assert found == {numbers[at]: alone[at] for at in (0, 2, 3)}
    assert session.rows == 0
    late = session.admit(request(model, lines[1], options, drafter))
    done = [event for event in session.drain() if isinstance(event, Finished)]
    assert [(one.request, [some.tokens.tolist() for some in one.hypotheses]) for one in done] == [
        (late[0], alone[1])
    ]


def test_draft_models_of_several_requests(tiny):
    """Each request has its own: two that share one, and one with another."""
    model = tiny("llama")
    options = {**few_words(model), "num_assistant_tokens": 4, "max_new_tokens": 14}
    config = GenerationConfig(**options, num_assistant_tokens_schedule="constant")
    plain = GenerationConfig(**{**few_words(model), "max_new_tokens": 14})
    lines, helpers = texts(model, (7, 12, 5)), [near(model.model, share) for share in (1.0, 1.0, 0.9)]
    assert helpers[0] is helpers[1]
    alone = [outcomes(model.model, [Request(text, plain)])[0] for text in lines]
    found = outcomes(
        model.model,
        [Request(text, config, assistant_model=one) for text, one in zip(lines, helpers, strict=True)],
    )
    alike(alone, found, "two draft models")
    rates = [one.hypotheses[0].speculation.acceptance_rate for one in found]
    assert rates[0] == rates[1] == 1.0 > rates[2]


def test_what_is_shared_is_looked_up_later(tiny):
    """A request drafts from the output of an earlier one, and gives the same in fewer steps."""
    model = tiny("gemma")
    options = {"max_new_tokens": 18, "min_new_tokens": 18}
    text = prompts(model.arch, [6], 3)[0]
    alone = outcomes(model.model, [request(model, text, options)])[0].tokens
    session, rates = Session(model.model), []
    for _ in range(2):
        session.admit(request(model, text, options, "suffix, shared"))
        ended = [event for event in session.drain() if isinstance(event, Finished)]
        assert [one.tokens.tolist() for one in ended[0].hypotheses] == alone
        rates.append(ended[0].hypotheses[0].speculation.saved_forwards)
    assert rates[1] > max(8, rates[0])
