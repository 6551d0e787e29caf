"""Constrained beams against brute force over every sequence of a model with a tiny vocabulary."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

import descant
from descant import ConfigError, ConstraintError, GenerationConfig, InputError
from descant.decoding.constraints import DisjunctiveConstraint, PhrasalConstraint
from tests.unit.decoding.constraints.own import Often

SETS, PART = 300, 30  # random sets of constraints, with few beams
EXACT = 60  # and with as many beams as there are sequences
PROMPT = (1, 3, 2)
END = 0

Phrases = list[list[int]]


@dataclass(frozen=True)
class Small:
    """A model of few tokens, and its scores after every possible prefix."""

    model: Any
    vocabulary: int

    @torch.no_grad()
    def shares(self, prefixes: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """The log-probabilities after prompts of one length, by a forward of all of it [N, V]."""
        return self.model(torch.tensor([[*PROMPT, *one] for one in prefixes])).logits[:, -1].log_softmax(-1)

    @cache  # noqa: B019 - needed for all tests
    def table(self, longest: int) -> dict[tuple[int, ...], list[float]]:
        """The log-probabilities after every prefix without an end."""
        plain = [token for token in range(self.vocabulary) if token != END]
        found = {}
        for length in range(longest):
            prefixes = list(itertools.product(plain, repeat=length))
            found |= dict(zip(prefixes, self.shares(prefixes).tolist(), strict=True))
        return found

    @cache  # noqa: B019
    def sequences(self, longest: int) -> list[tuple[tuple[int, ...], float]]:
        """Every sequence that ends by itself or by the limit, with its log-probability."""
        sums, found = {(): 0.0}, []
        table = self.table(longest)
        for length in range(1, longest + 1):
            ahead = {}
            for prefix, total in sums.items():
                for token in range(self.vocabulary):
                    value = total + table[prefix][token]
                    if token == END or length == longest:
                        found.append(((*prefix, token), value))
                    else:
                        ahead[*prefix, token] = value
            sums = ahead
        return found

    def score(self, new: Sequence[int], penalty: float) -> float:
        """What a sequence is worth, by plain forwards."""
        with torch.no_grad():
            said = self.model(torch.tensor([[*PROMPT, *new]])).logits[0].log_softmax(-1)
        total = sum(float(said[len(PROMPT) - 1 + at, token]) for at, token in enumerate(new))
        return total / len(new) ** penalty


@cache
def small(vocabulary: int, seed: int = 0) -> Small:
    """A Llama of one layer and so many tokens, of which 0 ends."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
        bos_token_id=None, eos_token_id=END, pad_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.6)
    model.generation_config.eos_token_id = END
    model.generation_config.pad_token_id = END
    return Small(model, vocabulary)


# ------------------------------------------------------------------------ what a text meets, looked up again
def holds(text: Sequence[int], phrases: Phrases) -> bool:
    """Whether one of the phrases stands in a text."""
    return any(
        list(text[at : at + len(phrase)]) == phrase
        for phrase in phrases
        for at in range(len(text) - len(phrase) + 1)
    )


def unmet(
    text: Sequence[int], demands: list[Phrases], ordered: bool = False, gap: int = 0
) -> tuple[int, ...]:
    """The places of the demands that a text, read from its beginning, does not meet."""
    if not ordered and not gap:
        return tuple(place for place, phrases in enumerate(demands) if not holds(text, phrases))
    left, start, end = list(range(len(demands))), 0, 1
    while left and end <= len(text):
        seen = list(text[start:end])
        here = [
            place
            for place in (left[:1] if ordered else left)
            if any(len(seen) >= len(one) and seen[len(seen) - len(one) :] == one for one in demands[place])
        ]
        if here:
            left.remove(here[0])
            start = end + gap
            end = start
        end += 1
    return tuple(left)


@dataclass(frozen=True)
class Set:
    """A random set of constraints, for the test and for a call."""

    demands: list[Phrases]
    fields: dict[str, Any]

    @property
    def ordered(self) -> bool:
        return bool(self.fields.get("ordered_constraints"))

    @property
    def gap(self) -> int:
        return int(self.fields.get("constraint_gap", 0))

    def unmet(self, text: Sequence[int]) -> tuple[int, ...]:
        """The places of those that a text does not meet."""
        return unmet(text, self.demands, self.ordered, self.gap)


def chance(number: int, vocabulary: int, longest: int) -> Set:
    """One to three constraints, which may overlap, be alike or too long; as objects or forced words."""
    rng = random.Random(f"set {number}")
    tokens = [token for token in range(vocabulary) if token != END]

    def phrase() -> list[int]:
        return [rng.choice(tokens) for _ in range(rng.choice((1, 1, 2, 2, 3, longest)))]

    demands: list[Phrases] = []
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        if rng.random() < 0.6:
            demands.append([phrase()])
            continue
        some: Phrases = []
        for one in (phrase() for _ in range(rng.randint(2, 3))):
            if not any(one[: len(other)] == other[: len(one)] for other in some):
                some.append(one)
        demands.append(some)
    made = [
        PhrasalConstraint(one[0]) if len(one) == 1 and rng.random() < 0.9 else DisjunctiveConstraint(one)
        for one in demands
    ]
    fields: dict[str, Any] = {"constraints": made}
    if rng.random() < 0.3:
        words = [one[0] if len(one) == 1 else one for one in demands]
        cut = rng.randint(0, len(words) - 1)
        fields = {"constraints": made[:cut] or None, "force_words_ids": words[cut:]}
    if rng.random() < 0.3:
        fields["ordered_constraints"] = True
    if rng.random() < 0.3:
        fields["constraint_gap"] = rng.randint(1, 2)
    return Set(demands, fields)


def generated(model: Small, **fields: Any) -> Any:
    return descant.generate(
        model.model,
        torch.tensor([PROMPT]),
        return_dict_in_generate=True,
        output_scores=True,
        **fields,
    )


def bodies(found: Any) -> list[list[int]]:
    """The new tokens of every sequence, up to and with its end."""
    return [_body(line) for line in found.sequences[:, len(PROMPT) :].tolist()]


def _body(new: list[int]) -> list[int]:
    return new[: new.index(END) + 1] if END in new else new


# ------------------------------------------------------------------------ random sets
@pytest.mark.ci_cases("0", "150")
@pytest.mark.parametrize("first", range(0, SETS, PART))
def test_results_meet_their_constraints_or_say_which_not(first):
    vocabulary = 6
    model = small(vocabulary)
    for number in range(first, first + PART):
        rng = random.Random(f"call {number}")
        longest = rng.choice((3, 4, 5))
        given = chance(number, vocabulary, longest)
        penalty, beams = rng.choice((0.0, 1.0, 2.0)), rng.choice((2, 3, 5))
        count = rng.randint(1, beams)
        found = generated(
            model, **given.fields, num_beams=beams, num_return_sequences=count, length_penalty=penalty,
            early_stopping=rng.choice((True, False, "never")), max_new_tokens=longest,
        )  # fmt: skip
        texts = bodies(found)
        where = f"set {number}: {given}, {beams} beams, {texts}"
        assert [given.unmet(text) for text in texts] == list(found.unmet_constraints), where
        assert len({tuple(text) for text in texts}) == count, f"{where} has one twice"
        scores = found.sequences_scores.tolist()
        for text, score in zip(texts, scores, strict=True):
            assert score == pytest.approx(model.score(text, penalty), abs=1e-4), where
        # Those that meet all stand before those that do not, and each of the two best first.
        kinds = [bool(one) for one in found.unmet_constraints]
        assert kinds == sorted(kinds), where
        best = max(
            (
                total / len(text) ** penalty
                for text, total in model.sequences(longest)
                if not given.unmet(text)
            ),
            default=None,
        )
        if best is None:
            assert all(found.unmet_constraints), where
        elif not kinds[0]:
            assert scores[0] <= best + 1e-4, where
            assert scores[0] == max(score for score, kind in zip(scores, kinds, strict=True) if not kind), (
                where
            )


@pytest.mark.ci_cases("1.0-False", "0.0-never")
@pytest.mark.parametrize("early", [False, "never"])
@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_beams_for_every_sequence_find_the_best(penalty, early):
    """As many beams as sequences: what is returned is the brute force's own list."""
    longest, model = 4, small(5, seed=3)
    every = model.sequences(longest)
    impossible = 0
    for number in range(1000, 1000 + EXACT // 2):
        given = chance(number, 5, longest)
        found = generated(
            model, **given.fields, num_beams=len(every), num_return_sequences=4,
            length_penalty=penalty, early_stopping=early, max_new_tokens=longest,
        )  # fmt: skip
        good = sorted((-total / len(text) ** penalty, text) for text, total in every if not given.unmet(text))
        expected = good[:4]
        impossible += not expected
        texts = [tuple(one) for one in bodies(found)]
        where = f"set {number}: {given}"
        assert texts[: len(expected)] == [text for _, text in expected], where
        for score, (loss, _) in zip(found.sequences_scores.tolist(), expected, strict=False):
            assert score == pytest.approx(-loss, abs=1e-4), where
        assert all(found.unmet_constraints[len(expected) :]), where
        assert not any(found.unmet_constraints[: len(expected)]), where
    assert 0 < impossible < EXACT // 4


def test_groups_meet_their_constraints_too():
    model, longest = small(6), 5
    for number in range(2000, 2040):
        given = chance(number, 6, longest)
        found = generated(
            model, **given.fields, num_beams=4, num_beam_groups=2, diversity_penalty=1.0,
            num_return_sequences=4, max_new_tokens=longest,
        )  # fmt: skip
        assert [given.unmet(text) for text in bodies(found)] == list(found.unmet_constraints), given


# ------------------------------------------------------------------------ faces of the API


@pytest.mark.parametrize("token", [2, 4])
@pytest.mark.parametrize("beams", [3, 400])
def test_a_constraint_of_the_users_own(token, beams):
    model, longest = small(5, seed=3), 4
    asked = Often(token, 2)
    found = generated(
        model, constraints=[asked, PhrasalConstraint([2])], num_beams=beams, max_new_tokens=longest
    )
    text = bodies(found)[0]
    missing = tuple(place for place, met in enumerate((text.count(token) >= 2, 2 in text)) if not met)
    assert found.unmet_constraints == (missing,)
    assert asked.count == 0  # theirs is never touched
    if beams == 400:
        good = [
            (total / len(one), one)
            for one, total in model.sequences(longest)
            if one.count(token) >= 2 and 2 in one
        ]
        assert (found.sequences_scores[0].item(), tuple(text)) == (
            pytest.approx(max(good)[0], abs=1e-4),
            max(good)[1],
        )


def test_without_a_record_what_is_unmet_is_an_error():
    model = small(6).model
    asked = {
        "constraints": [PhrasalConstraint([2]), PhrasalConstraint([3, 3, 3, 4]), PhrasalConstraint([5, 4, 1])]
    }
    with pytest.raises(
        ConstraintError, match=r"prompt 0 .* got \d tokens without number (0, )?1, 2: "
    ) as caught:
        descant.generate(model, torch.tensor([PROMPT]), **asked, num_beams=4, max_new_tokens=2)
    assert caught.value.unmet[-2:] == (1, 2)
    assert caught.value.request == 0
    found = generated(small(6), **asked, num_beams=4, max_new_tokens=2)
    assert found.unmet_constraints[0] == caught.value.unmet
    # In a batch it is the row that cannot.
    short = GenerationConfig(constraints=[PhrasalConstraint([2])], num_beams=4, max_new_tokens=3)
    long = short.replace(constraints=[PhrasalConstraint([2, 3, 4, 5])])
    with pytest.raises(ConstraintError, match=r"prompt 1 .* without number 0: ") as caught:
        descant.generate(model, torch.tensor([PROMPT, PROMPT]), generation_config=[short, long])
    assert caught.value.request == 1
    assert caught.value.unmet == (0,)


def test_only_new_tokens_count():
    found = generated(
        small(6), force_words_ids=[[1, 3]], num_beams=4, max_new_tokens=4
    )  # as the prompt begins
    assert holds(bodies(found)[0], [[1, 3]])


def test_unknown_tokens_are_refused():
    with pytest.raises(
        InputError, match="`constraints` must advance by tokens below the vocabulary size 6, got 9"
    ):
        generated(small(6), constraints=[PhrasalConstraint([2, 9])], num_beams=2, max_new_tokens=4)
    with pytest.raises(ConfigError, match="`force_words_ids` must name tokens below 6"):
        generated(small(6), force_words_ids=[[2, 9]], num_beams=2, max_new_tokens=4)
