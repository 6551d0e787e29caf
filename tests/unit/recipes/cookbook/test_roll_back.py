"""Roll back: the output instead of a loop, the events meanwhile, and a real loop that ends."""

from __future__ import annotations

import pytest
import torch

from descant import ConfigError, GenerationConfig, InputError, Request, generate, stream
from descant.parts import LogitsProcessor
from descant.recipes.cookbook.roll_back import RollBack
from descant.recipes.recipe import Recipe
from descant.testing import outcomes
from tests.contracts.configs import tokenizer
from tests.support.markov_model import Chain


def chain(*wishes: str) -> Chain:
    """A model of a few tokens: "123" means that 2 is most likely after 1, then 3."""
    logits = torch.full((8, 8), -20.0)
    for wish in wishes:
        last, *wanted = map(int, wish)
        logits[last, wanted] = -torch.arange(len(wanted), dtype=torch.float)
    return Chain(logits)


def ask(recipe: Recipe | None = None, prompt: tuple[int, ...] = (0,), **given) -> Request:
    config = GenerationConfig(**{"max_new_tokens": 8, "eos_token_id": None, **given})
    return Request(list(prompt), config, recipe=recipe)


def output_of(model, recipe: Recipe | None, **given) -> list[int]:
    [found] = outcomes(model, [ask(recipe, **given)])
    assert found.error is None, found.error
    assert found.streamed_tokens == dict(enumerate(found.tokens))
    return found.tokens[0]


def back(**arguments) -> Recipe:
    return Recipe.from_object(RollBack)(**arguments)


LOOP = chain("01", "123", "214", "35", "45", "56", "67", "7765")


# ------------------------------------------------------------------------ output instead of a loop


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            {"period": 2, "repeats": 2, "most": 1},
            [1, 2, 4, 5, 6, 7, 7, 7],
        ),  # the second 1 2 goes, 1 is barred
        ({"period": 2, "repeats": 3, "most": 1}, [1, 2, 4, 5, 6, 7, 7, 7]),  # later, to the same place
        ({"period": 2, "repeats": 2, "most": 0}, [1, 2, 1, 2, 1, 2, 1, 2]),
        ({"period": 1, "repeats": 2}, [1, 2, 1, 2, 1, 2, 1, 2]),  # too long a run to be seen
        ({"period": 2, "repeats": 4}, [1, 2, 4, 5, 6, 7, 7, 7]),  # 7 7 7 is not four times
        ({"period": 1, "repeats": 2, "most": 9}, [1, 2, 1, 2, 1, 2, 1, 2]),
        ({"period": 2, "repeats": 3, "most": 2}, [1, 2, 4, 5, 6, 7, 6, 7]),  # and then out of 7 7 7
        ({"period": 5, "repeats": 2, "most": 9}, None),
    ],
)
def test_the_output_instead_of_a_loop(arguments, expected):
    found = output_of(LOOP, back(**arguments))
    assert expected is None or found == expected


def reference(model: Chain, length: int, period: int, repeats: int, most: int) -> list[int]:
    """The same by restarting the text, with the bans after each prefix."""
    text: list[int] = []
    barred: dict[tuple[int, ...], set[int]] = {}
    while len(text) < length:
        scores = model.after(torch.tensor([[1 + len(text)]]), torch.tensor([[text[-1] if text else 0]]))[
            0, 0
        ].clone()
        scores[list(barred.get(tuple(text), ()))] = -torch.inf
        text.append(int(scores.argmax()))
        for run in range(1, period + 1):
            tail = text[-run * repeats :]
            if most and len(tail) == run * repeats and tail == tail[:run] * repeats:
                start = len(text) - run * (repeats - 1)
                barred.setdefault(tuple(text[:start]), set()).add(text[start])
                del text[start:]
                most -= 1
                break
    return text


@pytest.mark.ci_cases("6-3", "3-2", "1-2")
@pytest.mark.parametrize(("period", "repeats"), [(1, 2), (3, 2), (6, 2), (3, 3), (6, 3)])
def test_it_is_what_a_text_written_anew_would_be(period, repeats):
    left = 0
    for seed in range(12):
        model = Chain.chance(20, seed, positions=1)
        expected = reference(model, 24, period, repeats, 10)
        assert (
            output_of(model, back(period=period, repeats=repeats, most=10), max_new_tokens=24) == expected
        ), seed
        left += expected != output_of(model, None, max_new_tokens=24)
    assert left >= 2  # most of these models loop by themselves


def test_the_prompt_is_no_part_of_a_loop():
    model = chain("12", "21")
    kept = output_of(model, back(period=2, repeats=3, most=4), prompt=(1, 2, 1, 2, 1), max_new_tokens=4)
    assert kept == [2, 1, 2, 1]


# ------------------------------------------------------------------------ events meanwhile
def event_tokens(most: int, new: int) -> list[tuple[int, ...]]:
    """What each event of a stream brings."""
    given = {"eos_token_id": None, "max_new_tokens": new, "period": 2, "repeats": 3, "most": most}
    return [event.token_ids for event in stream(LOOP, torch.tensor([[0]]), recipe=RollBack, **given)]


def test_no_emitted_token_is_retracted():
    """While 1 2 1 2 may be a loop only its first 1 2 is emitted; then the text continues differently."""
    assert event_tokens(most=1, new=6) == [(1,), (2,), (4,), (5,), (6,), (7,)]
    assert event_tokens(most=0, new=6) == [(1,), (2,), (1,), (2,), (1,), (2,)]


def test_what_only_might_have_gone_comes_with_the_end():
    assert event_tokens(most=1, new=5) == [(1,), (2,), (1, 2, 1)]
    assert event_tokens(most=1, new=4) == [(1,), (2,), (1, 2)]


# ------------------------------------------------------------------------ beside others
def test_a_phrase_ban_beside_it():
    """Both keep notes by the same name, each for its own rows."""
    words = tokenizer()
    model = Chain.chance(len(words), 5, positions=1)
    requests = [
        Request(
            [3],
            GenerationConfig(max_new_tokens=16, eos_token_id=None, banned_phrases=["a", "t"]),
            tokenizer=words,
        ),
        ask(back(period=12, repeats=2), prompt=(3,), max_new_tokens=40),
        ask(None, prompt=(3,), max_new_tokens=40),
    ]
    alone = [outcomes(model, [one])[0].tokens for one in requests]
    assert [one.tokens for one in outcomes(model, requests)] == alone
    assert alone[1] != alone[2]


class Stateful(LogitsProcessor):
    state = {"x": 0.0}  # noqa: RUF012

    def process(self, context, scores):
        return scores

    def advance(self, context, before, after, tokens):
        return {"x": context.state("x")[:, 0]}


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"num_beams": 2}, ConfigError, "num_beams"),
        ({"logits_processor": [Stateful()]}, InputError, "state"),
        ({"period": 0}, InputError, "`period` must be an integer between 1"),
        ({"repeats": 1}, InputError, "`repeats`"),
        ({"most": -1}, InputError, "`most`"),
        ({"period": 2.5}, InputError, "`period`"),
    ],
)
def test_what_cannot_be_is_refused(given, error, match):
    with pytest.raises(error, match=match):
        generate(LOOP, torch.tensor([[0]]), max_new_tokens=4, recipe=RollBack, **given)


# ------------------------------------------------------------------------ a real loop
