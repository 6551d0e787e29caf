"""What races what: the prompts of a contest and the ways that decode them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from bench.prompts import GROUNDED, PASSAGES, Passage, unguessable

__all__ = ["CASES", "Contest", "Way", "batches", "contests", "loaded"]

CASES = ("grounded", "unguessable", "pair", "exit", "foreign")
_LOOKUP = {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 3}
_SUFFIX = {"suffix_lookup_num_tokens": 10}


@dataclass(frozen=True)
class Way:
    """One way to decode; `theirs` is that of transformers, which `rival` names for one of ours."""

    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    theirs: bool = False
    rival: str | None = None
    # What transformers reads from the draft model's own config alone.
    lent: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Contest:
    """Batches of prompts, one after the other, that all ways decode."""

    case: str
    size: int  # rows of each batch
    batches: Sequence[Mapping[str, Tensor]]
    ways: Sequence[Way]
    common: Mapping[str, Any]  # fields of every way
    seed: int | None = None  # None: greedy


def contests(case: str, tokenizer: Any, options: argparse.Namespace) -> Iterator[Contest]:
    """The contests of a case, batch by batch. One row at a time is measured for each kind of text."""
    ways: Callable[[], list[Way]] = {
        "grounded": _looking,
        "unguessable": lambda: [*_looking(), *_assisted(options, plain=False)],
        "pair": lambda: _assisted(options),
        "exit": lambda: _leaving(options),
        "foreign": lambda: _translated(tokenizer, options),
    }[case]
    made = [way for way in ways() if not options.way or way.name in ("none", *options.way)]
    drawn = {"do_sample": True, "temperature": 1.0, "top_k": 0, "min_new_tokens": options.new}
    kinds = options.kind or tuple(GROUNDED)
    for size in options.batch:
        # transformers takes one row at a time where it drafts.
        mine = made if size == 1 else [way for way in made if not way.theirs]
        if case == "unguessable":
            common = {"max_new_tokens": options.new, **drawn}
            for kind in ("digits", "free"):
                prompts = batches(tokenizer, unguessable(kind, max(size, options.prompts)), size)
                yield Contest(kind, size, prompts, mine, common, seed=11)
            continue
        common = {"max_new_tokens": options.new, "do_sample": False}
        mixed = [one for one in PASSAGES if one.kind in kinds]
        # As many different prompts as fit into one batch.
        groups = {"mixed": list(islice(cycle(mixed), size))}
        if size == 1:
            groups = {kind: list(GROUNDED[kind][: options.prompts]) for kind in kinds}
        for kind, passages in groups.items():
            label = kind if case == "grounded" else f"{case} {kind}"
            yield Contest(label, size, batches(tokenizer, passages, size), mine, common)


def batches(tokenizer: Any, passages: Iterable[Passage], size: int) -> list[Mapping[str, Tensor]]:
    """The prompts in batches of that size, each as wide as its longest; the last is filled up."""
    prompts = [one.ids(tokenizer) for one in passages]
    count = -(-len(prompts) // size) * size
    filled = list(islice(cycle(prompts), count))
    return [_padded(filled[at : at + size]) for at in range(0, count, size)]


def _none() -> list[Way]:
    return [Way("none", rival="transformers none"), Way("transformers none", theirs=True)]


def _looking() -> list[Way]:
    """No network guesses."""
    adaptive = {"num_assistant_tokens_schedule": "adaptive"}
    constant = {"num_assistant_tokens_schedule": "constant"}
    rival = "transformers lookup"
    return [
        *_none(),
        Way("lookup, constant 10", {**_LOOKUP, **constant}, rival=rival),
        Way("lookup, adaptive", {**_LOOKUP, **adaptive}, rival=rival),
        Way("suffix, constant 10", {**_SUFFIX, **constant}),
        Way("suffix, adaptive", {**_SUFFIX, **adaptive}),
        Way(rival, _LOOKUP, theirs=True),
    ]


def _guessing(name: str, common: Mapping[str, Any], options: argparse.Namespace) -> list[Way]:
    """A network guesses: always as many, or as many as pay; transformers as ours, and as it likes."""
    rival = f"transformers {name}"
    counts = sorted({2, options.guesses})
    ways = []
    for count in counts:
        how = {"num_assistant_tokens": count, "num_assistant_tokens_schedule": "constant"}
        whom = f"{rival}, {count}"
        ways.append(Way(f"{name}, constant {count}", {**common, **how}, rival=whom))
        ways.append(Way(whom, common, theirs=True, lent=how))
    how = {"num_assistant_tokens": options.guesses, "num_assistant_tokens_schedule": "adaptive"}
    ways.append(Way(f"{name}, adaptive", {**common, **how}, rival=f"{rival}, default"))
    ways.append(Way(f"{rival}, default", common, theirs=True))
    return ways


def _assisted(options: argparse.Namespace, plain: bool = True) -> list[Way]:
    ways = _guessing("draft", {"assistant_model": loaded(options.draft)}, options)
    if not plain:
        return [way for way in ways if way.name == "draft, adaptive"]
    return _none() + ways


def _leaving(options: argparse.Namespace) -> list[Way]:
    return _none() + _guessing("exit", {"assistant_early_exit": options.layers}, options)


def _translated(tokenizer: Any, options: argparse.Namespace) -> list[Way]:
    folder = options.other
    common = {
        "assistant_model": loaded(folder),
        "tokenizer": tokenizer,
        "assistant_tokenizer": transformers.AutoTokenizer.from_pretrained(folder),
    }
    return _none() + _guessing("foreign", common, options)


def loaded(folder: Path) -> Any:
    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"no model in {folder}: build it with `python tools/models.py {folder.name}`")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _padded(prompts: Sequence[Sequence[int]]) -> Mapping[str, Tensor]:
    """Token ids [B, L] and their mask, padded at the left."""
    wide = max(map(len, prompts))
    ids = torch.tensor([[0] * (wide - len(one)) + list(one) for one in prompts])
    mask = torch.tensor([[0] * (wide - len(one)) + [1] * len(one) for one in prompts])
    return {"input_ids": ids, "attention_mask": mask}
