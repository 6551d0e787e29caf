"""Every documented field that calls for a processor acts in generate() as the reference's does.

Each alone and all of them together, under greedy search, sampling, beams and beam sampling. The reference's
processors count the padding of a batch, so rows run alone there, and under sampling, where a batch shares
its noise, on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch

from descant.config.generation_config import FIELDS
from tests.reference.parity import compare
from tests.reference.parity.compare import Batch, Call
from tests.reference.parity.own import allowed_by_any
from tests.reference.parity.subjects import TINY, ragged, seeds
from tests.support import tiny_models
from tests.support.tiny_models import Tiny

NEW = 12
SHOWN = ("llama", "t5")  # in CI: one decoder-only model and one encoder-decoder
MODELS = [*SHOWN, *(pytest.param(n, marks=pytest.mark.slow) for n in TINY if n not in SHOWN)]
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 1.3},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "beam sampling": {"do_sample": True, "num_beams": 3, "temperature": 1.3},
}
DRAWN = ("sampling", "beam sampling")
SALTS = list(range(40))


@dataclass(frozen=True)
class Plain:
    """The plain output of a model, from which the tokens to ban or to favour are taken."""

    model: Tiny
    rows: list[list[int]]  # the new tokens of each row under greedy search

    def words(self, size: int) -> list[list[int]]:
        """What stands at the second place of each row, in so many tokens."""
        return sorted({tuple(row[1 : 1 + size]) for row in self.rows if len(row) > 1 + size})  # type: ignore[arg-type]

    def tokens(self, place: int) -> list[int]:
        return sorted({row[place] for row in self.rows if len(row) > place} - {self.model.eos})


def _bias(plain: Plain) -> dict[str, Any]:
    heads = {(token,): 2.5 for token in plain.words(1)[0]}
    pairs = {tuple(word): -4.0 for word in plain.words(2)}
    return {"sequence_bias": {**heads, **pairs, (5, 6, 7): 9.0}}


def _bad_words(plain: Plain) -> dict[str, Any]:
    words = [plain.tokens(0)[:1], *plain.words(2), *plain.words(3), [plain.model.eos]]
    return {"bad_words_ids": [list(word) for word in words]}


# The options of each field, from the output without it, so that they have an effect.
RULES: dict[str, Callable[[Plain], dict[str, Any]]] = {
    "min_length": lambda plain: {"min_length": 13},
    "min_new_tokens": lambda plain: {"min_new_tokens": 9},
    "repetition_penalty": lambda plain: {"repetition_penalty": 1.4},
    "encoder_repetition_penalty": lambda plain: {"encoder_repetition_penalty": 1.6},
    "no_repeat_ngram_size": lambda plain: {"no_repeat_ngram_size": 1},
    "encoder_no_repeat_ngram_size": lambda plain: {"encoder_no_repeat_ngram_size": 1},
    "sequence_bias": _bias,
    "bad_words_ids": _bad_words,
    "prefix_allowed_tokens_fn": lambda plain: {},  # a function: see Own
    "forced_bos_token_id": lambda plain: {"forced_bos_token_id": 33},
    "forced_eos_token_id": lambda plain: {"forced_eos_token_id": 5, "max_new_tokens": 5},
    "remove_invalid_values": lambda plain: {"remove_invalid_values": True, **_bad_words(plain)},
    "exponential_decay_length_penalty": lambda plain: {"exponential_decay_length_penalty": (3, 1.2)},
    "renormalize_logits": lambda plain: {"renormalize_logits": True, "suppress_tokens": plain.tokens(1)},
    "suppress_tokens": lambda plain: {"suppress_tokens": plain.tokens(1)},
    "begin_suppress_tokens": lambda plain: {"begin_suppress_tokens": plain.tokens(0)},
}
SAMPLERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 6},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "typical_p": {"typical_p": 0.6},
    "epsilon_cutoff": {"epsilon_cutoff": 0.03},
    "eta_cutoff": {"eta_cutoff": 0.2},
}
PAIRS = {
    "bigrams": {"no_repeat_ngram_size": 2},
    "trigrams": {"no_repeat_ngram_size": 3, "repetition_penalty": 0.4},
    "bigrams of the encoder": {"encoder_no_repeat_ngram_size": 2, "repetition_penalty": 0.4},
    "invited": {"repetition_penalty": 0.6},
    "several forced ends": {"forced_eos_token_id": [7, 8], "max_new_tokens": 3, "min_new_tokens": 3},
    "forced and begun": {"forced_bos_token_id": 33, "begin_suppress_tokens": [33, 40, 41]},
    "decay below one": {"exponential_decay_length_penalty": (1, 0.8)},
    "several ends": {"eos_token_id": [2, 7, 30, 31], "exponential_decay_length_penalty": (0, 1.05)},
}  # fmt: skip


def together(plain: Plain, mode: str) -> dict[str, Any]:
    """Every field at once; those of sampling where there is any.

    The end token is raised only where nothing forbids it: the reference makes NaN of what is ruled out. Left
    out are the encoder's penalty under beams, of which the reference misses most, and, where beams are drawn,
    forced tokens, which leave nothing but ties to draw from.
    """
    model = plain.model
    rules = {
        "min_length": 4,
        "min_new_tokens": 5,
        "repetition_penalty": 1.15,
        "encoder_repetition_penalty": 1.2,
        "no_repeat_ngram_size": 2,
        "encoder_no_repeat_ngram_size": 3,
        "sequence_bias": {(20,): 1.5, (21, 22): -2.0, tuple(plain.rows[0][:1]): 0.5},
        "bad_words_ids": [[40, 41], plain.tokens(1)[:1]],
        "forced_bos_token_id": plain.tokens(0)[0],
        "forced_eos_token_id": model.eos,
        "remove_invalid_values": True,
        "exponential_decay_length_penalty": (6, 1.01),
        "renormalize_logits": True,
        "suppress_tokens": [50, 51, 52],
        "begin_suppress_tokens": [60, 61],
    }
    warm = {
        "temperature": 1.2, "top_k": 30, "top_p": 0.97, "min_p": 0.002, "typical_p": 0.97,
        "epsilon_cutoff": 3e-4, "eta_cutoff": 3e-4,
    }  # fmt: skip
    left_out = {
        "beams": {"encoder_repetition_penalty"},
        "beam sampling": {"encoder_repetition_penalty", "forced_bos_token_id", "forced_eos_token_id"},
    }.get(mode, set())
    return {
        name: value
        for name, value in {**rules, **(warm if mode in DRAWN else {})}.items()
        if name not in left_out
    }


@dataclass(frozen=True)
class Own(Call):
    """A call with a prefix function, which each side makes for itself."""

    prefix: tuple[Any, ...] = ()

    def ours(self, prompts: Batch) -> dict[str, Any]:
        arguments = {**self.arguments, "prefix_allowed_tokens_fn": allowed_by_any(*self.prefix)}
        return Call(self.subject, arguments, self.seed, self.full).ours(prompts)

    def theirs(self, reference: Any, prompts: Batch) -> dict[str, Any]:
        return Call.theirs(self, _With(reference, {"prefix": self.prefix}), prompts)


@dataclass(frozen=True)
class Whole(Call):
    """A call with the encoder's penalty; the reference gets it as an object that sees every beam's source."""

    def theirs(self, reference: Any, prompts: Batch) -> dict[str, Any]:
        arguments = dict(self.arguments)
        source = prompts.inputs["input_ids"].expand(self.beams, -1)
        given = {"penalty": arguments.pop("encoder_repetition_penalty"), "encoder_input_ids": source}
        objects = {"logits_processor": [("EncoderRepetitionPenaltyLogitsProcessor", given)]}
        return Call(self.subject, arguments, self.seed, self.full, objects).theirs(reference, prompts)


@dataclass(frozen=True)
class _With:
    """The reference with a user's own objects."""

    reference: Any
    more: Mapping[str, Any]

    def generate(self, model, inputs, arguments, want, *, seed, objects):
        return self.reference.ask(
            "generate_own", model=str(model), inputs=dict(inputs), arguments=dict(arguments), want=want,
            seed=seed, objects=dict(objects), **self.more,
        )  # fmt: skip


def run(reference: Any, call: Call, mode: str, prompts: Batch) -> list[compare.Answer]:
    """Compare in the way that suits the mode; see `compare`."""
    how = compare.alone if mode in DRAWN or isinstance(call, Own) else compare.by_row
    return how(reference, call, prompts)


def three(model: Tiny, seed: int = 0) -> Batch:
    """Rows of different length, the last of them a single token."""
    *others, last = ragged(model, seed).rows[:3]
    return compare.batch(model, [*others, last[:1]])


def plain_of(model: Tiny, seed: int = 0) -> Plain:
    prompts = three(model, seed)
    call = Call(model, {"max_new_tokens": NEW}, full=False)
    ours = call.ours(prompts)
    return Plain(model, [compare.read(call, ours, prompts, i).tokens[0] for i in range(len(prompts.rows))])


def acts(call: Call, without: Mapping[str, Any], answers: list[compare.Answer], prompts: Batch) -> bool:
    """Whether the scores of a call differ from those of the same call without its options."""
    bare = Call(call.subject, without, call.seed)
    for i, answer in enumerate(answers):
        single = prompts.only(i)
        other = compare.read(bare, bare.ours(single), single, 0)
        if other.tokens != answer.tokens:
            return True
        if any(not torch.equal(a, b) for a, b in zip(other.scores, answer.scores, strict=False)):
            return True
    return False


def test_every_documented_field_is_here(tiny):
    documented = {
        "min_length", "min_new_tokens", "temperature", "repetition_penalty", "encoder_repetition_penalty",
        "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size", "sequence_bias", "bad_words_ids", "prefix_allowed_tokens_fn",
        "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
        "exponential_decay_length_penalty", "renormalize_logits", "suppress_tokens", "begin_suppress_tokens",
    }  # fmt: skip
    assert documented <= set(FIELDS)
    assert {*RULES, *SAMPLERS} == documented
    everything = together(Plain(tiny("llama"), [[20, 21], [22, 23]]), "sampling")
    assert {*everything, "prefix_allowed_tokens_fn"} == documented


@pytest.mark.parametrize("mode", ["greedy", "sampling", "beams"])
@pytest.mark.parametrize("option", RULES)
@pytest.mark.parametrize("name", MODELS)
def test_rule(name, option, mode, tiny, reference):
    model = tiny(name)
    prompts = three(model)
    given = RULES[option](plain_of(model))
    base = {"max_new_tokens": NEW, **MODES[mode]}
    arguments = {**base, **given}
    seed = 21 if mode in DRAWN else None
    call = Call(model, arguments, seed=seed)
    if option == "prefix_allowed_tokens_fn":
        call = Own(model, arguments, seed=seed, prefix=(SALTS, model.vocab))
    if option == "encoder_repetition_penalty" and mode == "beams":
        call = Whole(model, arguments)
    answers = run(reference, call, mode, prompts)
    without = {**base, **{k: v for k, v in given.items() if k not in (option, "bad_words_ids")}}
    assert acts(call, without, answers, prompts), "the option changes nothing here"


@pytest.mark.parametrize("mode", DRAWN)
@pytest.mark.parametrize("option", SAMPLERS)
@pytest.mark.parametrize("name", MODELS)
def test_sampler(name, option, mode, tiny, reference):
    model = tiny(name)
    prompts = three(model)
    base = {"max_new_tokens": NEW, **MODES[mode]}
    call = Call(model, {**base, **SAMPLERS[option]}, seed=22)
    answers = run(reference, call, mode, prompts)
    assert acts(call, base, answers, prompts), "the option changes nothing here"


def pairs() -> Iterator[Any]:
    """Every pair on every model in every mode; in CI each on one model."""
    for at, options in enumerate(PAIRS):
        for mode, name in product(("greedy", "sampling", "beams"), TINY):
            # Several forced ends are an exact tie, in which beams may choose either.
            if (options, mode) != ("several forced ends", "beams"):
                marks = () if name == SHOWN[at % 2] else pytest.mark.slow
                yield pytest.param(name, options, mode, marks=marks)


@pytest.mark.parametrize(("name", "options", "mode"), list(pairs()))
def test_pairs(name, options, mode, tiny, reference):
    model = tiny(name)
    arguments = {"max_new_tokens": NEW, **MODES[mode], **PAIRS[options]}
    # Without the scores the margin is not needed.
    call = Call(model, arguments, seed=23 if mode in DRAWN else None, full=options != "several forced ends")
    run(reference, call, mode, three(model))


@pytest.mark.parametrize("seed", seeds(1, 5))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_all_together(name, mode, seed, tiny, reference):
    """In the documented order: another one gives other scores."""
    model = tiny(name)
    prompts = three(model, seed)
    given = together(plain_of(model, seed), mode)
    arguments = {"max_new_tokens": NEW, **MODES[mode], **given}
    prefix = (SALTS, model.vocab, [model.eos, given.get("forced_bos_token_id", 70)])
    answers = run(reference, Own(model, arguments, seed=24 + seed, prefix=prefix), mode, prompts)
    assert any(len(answer.tokens[0]) > 5 for answer in answers), "too short for the later rules to act"


@pytest.fixture(scope="module")
def broken(tiny, tmp_path_factory) -> Callable[[str], Tiny]:
    """A tiny model whose logits of two tokens are infinite or not a number."""

    def get(name: str) -> Tiny:
        sound = tiny(name)
        folder = tmp_path_factory.mktemp(name)
        tiny_models.build(name, folder)
        model = tiny_models.load(name, folder)
        output = model.model.get_output_embeddings().weight
        with torch.no_grad():
            output[90] = torch.inf
            output[91] = torch.nan
        model.model.save_pretrained(folder)
        for file in ("config.json", "generation_config.json"):  # as the reference reads them
            (folder / file).write_text((sound.folder / file).read_text())
        return model

    return get


@pytest.mark.parametrize("mode", ["greedy", "sampling"])
@pytest.mark.parametrize("name", ["llama", "bart"])
def test_a_model_with_invalid_logits(name, mode, broken, reference):
    """Not under beams, where the log-softmax has made NaN of every score before."""
    model = broken(name)
    arguments = {"max_new_tokens": NEW, **MODES[mode], "remove_invalid_values": True}
    run(reference, Call(model, arguments, seed=25, full=False), mode, three(model))
