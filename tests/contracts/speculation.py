"""Drafters for tiny models, and the comparison of a call with drafts to the same call without."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

import descant
from descant import GenerationConfig, Request
from tests.support.tiny_models import Tiny, pad, prompts

NEW = 20
ALWAYS = {"num_assistant_tokens_schedule": "constant"}
GREEDILY = {"assistant_confidence_threshold": 0.0, **ALWAYS}

# By name: fields of the config, and how much of the model a draft model is (None: no draft model).
DRAFTERS: dict[str, tuple[dict[str, Any], float | None]] = {
    "lookup": ({"prompt_lookup_num_tokens": 5, "max_matching_ngram_size": 2, **ALWAYS}, None),
    "suffix": ({"suffix_lookup_num_tokens": 4, **ALWAYS}, None),
    "suffix, shared": ({"suffix_lookup_num_tokens": 3, "suffix_lookup_shared": True, **ALWAYS}, None),
    "draft model": ({"num_assistant_tokens": 4, **GREEDILY}, 0.99),
    "draft model, adaptive": ({"num_assistant_tokens": 6}, 0.99),
    "its own draft model": ({"num_assistant_tokens": 5, **GREEDILY}, 1.0),
    "early exit": ({"assistant_early_exit": 1, "num_assistant_tokens": 3, **GREEDILY}, None),
}
FEW = ("lookup", "suffix", "draft model", "early exit")


@cache
def near(model: Any, share: float) -> Any:
    """A draft model that is mostly the model itself, the rest of its weights chance."""
    made = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(17)
    with torch.no_grad():
        for weight in made.parameters():
            if weight.dim() > 1 and share < 1:
                noise = torch.randn(weight.shape, generator=generator) * weight.std()
                weight.mul_(share).add_(noise, alpha=(1 - share**2) ** 0.5)
    return made


def drafted(model: Any, name: str) -> dict[str, Any]:
    """The arguments of a call that has the model draft with that drafter."""
    fields, share = DRAFTERS[name]
    return fields if share is None else {**fields, "assistant_model": near(model, share)}


def words(tiny: Tiny, count: int = 5, seed: int = 3) -> list[int]:
    """So few tokens that a lookup often succeeds."""
    return prompts(tiny.arch, [count], seed)[0]


def few_words(tiny: Tiny) -> dict[str, Any]:
    """Restrict a model to those tokens, and to an end after some of them."""
    left = {*words(tiny), tiny.eos}
    return {"suppress_tokens": [one for one in range(tiny.vocab) if one not in left], "min_new_tokens": 9}


def texts(tiny: Tiny, lengths: Sequence[int] = (7, 12, 1, 5), seed: int = 0) -> list[list[int]]:
    """Prompts of those words, of which the longer ones repeat themselves."""
    few = words(tiny)
    rows = [[few[token % len(few)] for token in row] for row in prompts(tiny.arch, lengths, seed)]
    return [row[: len(row) // 2] * 2 + row[len(row) // 2 * 2 :] for row in rows]


def inputs(tiny: Tiny, lengths: Sequence[int] = (7, 12, 1, 5), seed: int = 0) -> dict[str, Tensor]:
    """A ragged batch of such prompts."""
    ids, mask = pad(texts(tiny, lengths, seed), tiny.pad, "right" if tiny.encoder_decoder else "left")
    return {"input_ids": ids, "attention_mask": mask}


@dataclass
class Tries:
    """The accepted and rejected drafts of a test, to assert that both occurred."""

    tried: int = 0
    right: int = 0

    def add(self, reports: Sequence[Any]) -> None:
        """Count what became of the drafts of some sequences."""
        self.tried += sum(sum(one.drafted) for one in reports)
        self.right += sum(sum(one.accepted) for one in reports)

    def check(self) -> None:
        """Raise where nothing was drafted right, or nothing wrong: there was nothing to see."""
        assert 0 < self.right < self.tried, f"{self.right} of {self.tried} guesses were right"


def seen(*records: Any) -> Tries:
    """The drafts of some calls."""
    tries = Tries()
    for record in records:
        tries.add(record.speculation)
    return tries


RECORDS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


def same_call(
    model: Any, given: Mapping[str, Any], options: Mapping[str, Any], drafts: Mapping[str, Any]
) -> tuple[Any, Any]:
    """Run a call without and with drafts; both records, of which tokens, scores and logits are the same."""
    options = {"max_new_tokens": NEW, **options, **RECORDS}
    plain = descant.generate(model, **given, **options)
    guessed = descant.generate(model, **given, **options, **drafts)
    assert guessed.sequences.tolist() == plain.sequences.tolist()
    for name in ("scores", "logits"):
        close(getattr(plain, name), getattr(guessed, name), name)
    return plain, guessed


def close(plain: Any, guessed: Any, where: str, atol: float = 1e-4) -> None:
    """Assert that nested tuples of tensors are the same within rounding."""
    if isinstance(plain, Tensor):
        torch.testing.assert_close(guessed, plain, rtol=1e-5, atol=atol, msg=lambda m: f"{where}: {m}")
        return
    assert len(plain) == len(guessed), f"{where}: {len(guessed)} entries with guesses, {len(plain)} without"
    for at, pair in enumerate(zip(plain, guessed, strict=True)):
        close(*pair, f"{where}[{at}]", atol)


def request(
    tiny: Tiny, prompt: Sequence[int], options: Mapping[str, Any], name: str | None = None, **more: Any
) -> Request:
    """A request of a session, with that drafter if one is named."""
    fields, share = ({}, None) if name is None else DRAFTERS[name]
    config = GenerationConfig(**{"max_new_tokens": NEW, **options, **fields})
    if share is not None:
        more["assistant_model"] = near(tiny.model, share)
    if tiny.encoder_decoder:
        return Request([tiny.arch.start], config, {"input_ids": torch.tensor(prompt)}, **more)
    return Request(prompt, config, **more)
