"""With drafts a ragged batch gives the same as the reference for each row alone, with the same drafter.

The reference speculates on one row at a time. It promises the same, and reads the number of draft tokens from
the draft model's own config; both sides draft as many.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch

import descant
from tests.reference.parity.compare import TOLERANCE, Batch, Call, batch, split
from tests.reference.parity.subjects import DEEP, TINY, ragged, seeds
from tests.reference.process.client import ReferenceClient
from tests.reference.real.prompts import PROMPTS
from tests.support import tiny_models
from tests.support.tiny_models import ARCHITECTURES, Tiny

NEW = 24
LLAMAS = ("llama", "mistral", "qwen2", "gemma")  # of which the reference can leave layers out
SLOW = pytest.mark.slow


@dataclass(frozen=True)
class Guessing:
    """A call with drafts, as each side takes it."""

    subject: Any
    fields: Mapping[str, Any] = field(default_factory=dict)  # of the config, the same on both sides
    helper: Any = None  # a draft model
    count: int = 5
    foreign: bool = False  # it has another tokenizer
    new: int = NEW

    @property
    def _settings(self) -> dict[str, Any]:
        return {
            "num_assistant_tokens": self.count,
            "num_assistant_tokens_schedule": "constant",
            "assistant_confidence_threshold": 0.0,
        }

    def ours(self, prompts: Batch) -> Any:
        """Our record."""
        given: dict[str, Any] = {**self.fields}
        if self.helper is not None:
            given |= {"assistant_model": self.helper.model, **self._settings}
        elif "assistant_early_exit" in self.fields:
            given |= self._settings
        if self.foreign:
            given |= {
                "tokenizer": self.subject.tokenizer,
                "assistant_tokenizer": self.helper.tokenizer,
            }
        return descant.generate(
            self.subject.model,
            **prompts.inputs,
            **given,
            max_new_tokens=self.new,
            return_dict_in_generate=True,
        )

    def theirs(self, reference: ReferenceClient, prompts: Batch) -> dict[str, Any]:
        """The reference's answer."""
        arguments = {**self.fields, "max_new_tokens": self.new}
        helper = None
        if self.helper is not None:
            helper = {"model": str(self.helper.folder), "settings": self._settings}
            if self.foreign:
                helper["tokenizer"] = str(self.helper.folder)
        elif "assistant_early_exit" in self.fields:
            arguments |= self._settings
        more = {"tokenizer": str(self.subject.folder)} if self.foreign else {}
        answer: dict[str, Any] = reference.ask(
            "generate_own",
            model=str(self.subject.folder),
            inputs=prompts.inputs,
            arguments=arguments,
            want=["sequences", "choices", "fed"],
            assistant=helper,
            **more,
        )
        return answer


@dataclass
class Seen:
    """What was drafted on either side."""

    right: int = 0
    fed: list[int] = field(default_factory=list)  # tokens of each of the reference's forwards


def same(reference: ReferenceClient, guessing: Guessing, prompts: Batch) -> Seen:
    """Assert that both sides give the same tokens, ours in a batch."""
    call, seen = Call(guessing.subject, {"max_new_tokens": guessing.new}), Seen()
    mine = guessing.ours(prompts)
    seen.right = sum(one.saved_forwards for one in mine.speculation)
    for row in range(len(prompts.rows)):
        single = prompts.only(row)
        theirs = guessing.theirs(reference, single)
        (ours,), _ = split(call, mine.sequences, prompts, row)
        (wanted,), _ = split(call, theirs["sequences"], single, 0)
        wanted = wanted[: guessing.new]  # a run of drafts may take the reference one token too far
        best, second = theirs["choices"][0, : len(wanted)].unbind(-1)
        assert float((best - second).min()) > TOLERANCE, "a near tie: choose other prompts"
        assert ours == wanted, f"row {row}"
        seen.fed += theirs["fed"]
    return seen


@pytest.fixture(scope="session")
def helpers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    """`helpers(name)`: a tiny draft model of that architecture, whose weights are nearly the target's."""
    root, loaded = tmp_path_factory.mktemp("helpers"), {}

    def get(name: str) -> Tiny:
        if name not in loaded:
            arch = replace(ARCHITECTURES[name], name=f"{name}-helper")
            with mock.patch.dict(tiny_models.ARCHITECTURES, {arch.name: arch}):
                made = tiny_models.load(arch.name, tiny_models.build(arch.name, root / name))
                _blur(made.model)
                _saved(made)
                loaded[name] = tiny_models.load(arch.name, root / name)
        return loaded[name]

    return get


@torch.no_grad()
def _blur(model: Any) -> None:
    """Move the weights a little, so that it drafts right about every other time."""
    generator = torch.Generator().manual_seed(5)
    for _, weight in sorted(model.named_parameters()):
        if weight.dim() > 1:
            weight += 0.05 * weight.std() * torch.randn(weight.shape, generator=generator)


def _saved(made: Tiny) -> None:
    """Write the weights, and leave the configs as they were written for both versions."""
    kept = {name: (made.folder / name).read_text() for name in ("config.json", "generation_config.json")}
    made.model.save_pretrained(made.folder)
    for name, text in kept.items():
        (made.folder / name).write_text(text)


# ------------------------------------------------------------------------ tiny models
@pytest.mark.parametrize("seed", seeds(1, 6))
@pytest.mark.parametrize("name", TINY)
def test_a_draft_model(name, seed, tiny, helpers, reference):
    model = tiny(name)
    seen = same(reference, Guessing(model, helper=helpers(name)), ragged(model, seed))
    assert seen.right > 0
    assert max(seen.fed) > 1


@pytest.mark.parametrize("count", [1, 2, *(pytest.param(one, marks=SLOW) for one in (3, 4, 6, 7, 8))])
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_any_number_of_drafts(name, count, tiny, helpers, reference):
    model = tiny(name)
    same(reference, Guessing(model, helper=helpers(name), count=count), ragged(model))


# By model and seed: with the first prompt the reference chooses by less than 1e-4.
NEAR_TIES = {("gpt2", 2), ("gemma", 1)}


@pytest.mark.parametrize("seed", seeds(1, 6))
@pytest.mark.parametrize("name", [name for name in TINY if name != "bart"])
def test_prompt_lookup(name, seed, tiny, reference):
    """Of prompts with repeated text."""
    model = tiny(name)
    rows = ragged(model, seed).rows
    twice = batch(model, [[*row, *row] for row in rows[(name, seed) in NEAR_TIES :]])
    fields = {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 2}
    same(reference, Guessing(model, fields), twice)


@pytest.mark.parametrize("name", ["bart", "llama"])
def test_the_reference_ends_before_it_begins(name, tiny, reference):
    """Without a match it checks whether the prompt has ended: so it has if its last token is an end token."""
    model = tiny(name)
    row = [5, 6, 8, 9] if model.encoder_decoder else [5, 6, 8, model.eos]
    prompts = batch(model, [row])
    fields = {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 2}
    given = {"inputs": prompts.inputs, "arguments": {**fields, "max_new_tokens": 8}}
    theirs = reference.ask("generate_own", model=str(model.folder), **given, want=["sequences"])
    assert theirs["sequences"].shape[1] == (1 if model.encoder_decoder else len(row)), "nothing new"
    ours = descant.generate(model.model, **prompts.inputs, max_new_tokens=8, **fields)
    assert torch.equal(ours, descant.generate(model.model, **prompts.inputs, max_new_tokens=8))
    assert ours.shape[1] > theirs["sequences"].shape[1]


@pytest.mark.parametrize("seed", seeds(1, 3))
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=SLOW if DEEP[name][0] > 40 else ()) for name in LLAMAS]
)
def test_early_exit(name, seed, deep, reference):
    model = deep(name)
    layers = DEEP[name][0]
    for last in (layers - 1, layers // 2):
        prompts = ragged_deep(model, name, seed)
        seen = same(reference, Guessing(model, {"assistant_early_exit": last}), prompts)
        assert max(seen.fed) > 1


def ragged_deep(model: Any, name: str, seed: int) -> Batch:
    """The prompts of the shallow model of that name."""
    return batch(model, ragged(replace(model, arch=ARCHITECTURES[name]), seed).rows)


OPTIONS = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "min_new_tokens": {"min_new_tokens": 14},
    "several end tokens": {"eos_token_id": [2, 30, 32, 33, 34, 40]},  # none of them a prompt's last
    "suppress_tokens": {"suppress_tokens": list(range(20, 60))},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("drafter", ["lookup", "draft model"])
def test_option(drafter, option, tiny, helpers, reference):
    model = tiny("llama")
    guessing = Guessing(model, OPTIONS[option], helper=helpers("llama"))
    if drafter == "lookup":
        guessing = Guessing(model, {**OPTIONS[option], "prompt_lookup_num_tokens": 4})
    call = Call(model, {**OPTIONS[option], "max_new_tokens": NEW})
    prompts = ragged(model, 1)
    mine = guessing.ours(prompts)
    for row in range(len(prompts.rows)):
        single = prompts.only(row)
        ours, _ = split(call, mine.sequences, prompts, row)
        wanted, _ = split(call, guessing.theirs(reference, single)["sequences"], single, 0)
        assert ours == wanted, f"row {row}"


# ------------------------------------------------------------------------ pretrained models
TEXTS = (PROMPTS[25], PROMPTS[6], PROMPTS[8])  # days of the week, a tale, numbers
PAIRS = {
    "smol-draft": ("smollm2", "smol-draft", False),
    "stories15m": ("smollm2", "stories15m", True),
    "minimind2-small": ("stories15m", "minimind2-small", True),
}


def batch_of(model: Any, texts: tuple[str, ...]) -> Batch:
    return batch(model, [model.tokens(text) for text in texts])


@pytest.mark.ci_cases("smol-draft", "minimind2-small")
@pytest.mark.parametrize("pair", PAIRS)
def test_a_pretrained_draft_model(pair, real, reference):
    name, helper, foreign = PAIRS[pair]
    target = real(name)
    guessing = Guessing(target, helper=real(helper), foreign=foreign, new=12)
    seen = same(reference, guessing, batch_of(target, TEXTS[:2]))
    assert pair == "minimind2-small" or seen.right > 0


@pytest.mark.ci_cases("stories15m")
@pytest.mark.parametrize("name", ["stories15m", "smollm2"])
def test_pretrained_prompt_lookup(name, real, reference):
    model = real(name)
    fields = {"prompt_lookup_num_tokens": 5, "max_matching_ngram_size": 2}
    seen = same(reference, Guessing(model, fields, new=16), batch_of(model, TEXTS))
    assert max(seen.fed) > 1


@pytest.mark.ci_cases("stories15m-4")
@pytest.mark.parametrize(("name", "layers"), [("stories15m", 4), ("smollm2", 20)])
def test_pretrained_early_exit(name, layers, real, reference):
    model = real(name)
    same(reference, Guessing(model, {"assistant_early_exit": layers}, new=10), batch_of(model, TEXTS[:2]))
