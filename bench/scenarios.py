"""Benchmark scenarios of speculative decoding: the prompts, and the methods that decode them."""

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

from bench.prompts import GROUNDED, PROMPTS, Prompt, high_entropy_prompts, repetitive_prompts

__all__ = ["CASES", "Method", "Scenario", "batches", "build_scenarios", "load_model"]

CASES = ("grounded", "unguessable", "short", "pair", "exit", "foreign")
_LOOKUP = {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 3}
_SUFFIX = {"suffix_lookup_num_tokens": 10}


@dataclass(frozen=True)
class Method:
    """A decoding method; `theirs` runs in transformers, `counterpart` names that of one of ours."""

    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    theirs: bool = False
    counterpart: str | None = None
    # Fields that transformers reads only from the draft model's own config.
    draft_config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Scenario:
    """Batches of prompts that all methods decode."""

    case: str
    size: int  # rows of each batch
    batches: Sequence[Mapping[str, Tensor]]
    methods: Sequence[Method]
    common: Mapping[str, Any]  # fields of every method
    seed: int | None = None  # None: greedy


def build_scenarios(case: str, tokenizer: Any, options: argparse.Namespace) -> Iterator[Scenario]:
    """The scenarios of a case by batch size; with one row, one for each kind of text."""
    methods: Callable[[], list[Method]] = {
        "grounded": _lookup_methods,
        "unguessable": lambda: [*_lookup_methods(), *_assistant_methods(options, plain=False)],
        "short": lambda: [*_lookup_methods(), *_assistant_methods(options, plain=False)],
        "pair": lambda: _assistant_methods(options),
        "exit": lambda: _early_exit_methods(options),
        "foreign": lambda: _cross_tokenizer_methods(tokenizer, options),
    }[case]
    selected = [method for method in methods() if not options.way or method.name in ("none", *options.way)]
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "min_new_tokens": options.new}
    kinds = options.kind or tuple(GROUNDED)
    for size in options.batch:
        # transformers drafts for one row only.
        supported = selected if size == 1 else [method for method in selected if not method.theirs]
        if case == "unguessable":
            common = {"max_new_tokens": options.new, **sampling}
            for kind in ("digits", "free"):
                prompts = batches(tokenizer, high_entropy_prompts(kind, max(size, options.prompts)), size)
                yield Scenario(kind, size, prompts, supported, common, seed=11)
            continue
        common = {"max_new_tokens": options.new, "do_sample": False}
        if case == "short":
            yield from _short_scenarios(tokenizer, size, supported, (common, {**common, **sampling}))
            continue
        mixed = [one for one in PROMPTS if one.kind in kinds]
        # As many different prompts as the batch has rows.
        groups = {"mixed": list(islice(cycle(mixed), size))}
        if size == 1:
            groups = {kind: list(GROUNDED[kind][: options.prompts]) for kind in kinds}
        for kind, prompts_of_kind in groups.items():
            label = kind if case == "grounded" else f"{case} {kind}"
            yield Scenario(label, size, batches(tokenizer, prompts_of_kind, size), supported, common)


def _short_scenarios(
    tokenizer: Any, size: int, methods: Sequence[Method], fields: tuple[Mapping[str, Any], Mapping[str, Any]]
) -> Iterator[Scenario]:
    """One batch of short prompts each, so that decoding is the cost; fields: greedy, sampled."""
    greedy, sampled = fields
    repeated = batches(tokenizer, repetitive_prompts(size), size)
    free = batches(tokenizer, high_entropy_prompts("free", size), size)
    yield Scenario("repetitive", size, repeated, methods, greedy)
    yield Scenario("free, greedy", size, free, methods, greedy)
    yield Scenario("free, sampled", size, free, methods, sampled, seed=11)


def batches(tokenizer: Any, source: Iterable[Prompt], size: int) -> list[Mapping[str, Tensor]]:
    """The prompts in padded batches of that size; the last is completed with repeated prompts."""
    prompts = [one.ids(tokenizer) for one in source]
    count = -(-len(prompts) // size) * size
    completed = list(islice(cycle(prompts), count))
    return [_pad_left(completed[at : at + size]) for at in range(0, count, size)]


def _none() -> list[Method]:
    return [Method("none", counterpart="transformers none"), Method("transformers none", theirs=True)]


def _lookup_methods() -> list[Method]:
    """Drafts without a network."""
    adaptive = {"num_assistant_tokens_schedule": "adaptive"}
    constant = {"num_assistant_tokens_schedule": "constant"}
    counterpart = "transformers lookup"
    return [
        *_none(),
        Method("lookup, constant 10", {**_LOOKUP, **constant}, counterpart=counterpart),
        Method("lookup, adaptive", {**_LOOKUP, **adaptive}, counterpart=counterpart),
        Method("suffix, constant 10", {**_SUFFIX, **constant}),
        Method("suffix, adaptive", {**_SUFFIX, **adaptive}),
        Method(counterpart, _LOOKUP, theirs=True),
    ]


def _draft_methods(name: str, common: Mapping[str, Any], options: argparse.Namespace) -> list[Method]:
    """Drafts by a network, with constant and adaptive length; transformers with the same and by default."""
    counterpart = f"transformers {name}"
    counts = sorted({2, options.guesses})
    methods = []
    for count in counts:
        schedule = {"num_assistant_tokens": count, "num_assistant_tokens_schedule": "constant"}
        their_name = f"{counterpart}, {count}"
        methods.append(Method(f"{name}, constant {count}", {**common, **schedule}, counterpart=their_name))
        methods.append(Method(their_name, common, theirs=True, draft_config=schedule))
    schedule = {"num_assistant_tokens": options.guesses, "num_assistant_tokens_schedule": "adaptive"}
    methods.append(Method(f"{name}, adaptive", {**common, **schedule}, counterpart=f"{counterpart}, default"))
    methods.append(Method(f"{counterpart}, default", common, theirs=True))
    return methods


def _assistant_methods(options: argparse.Namespace, plain: bool = True) -> list[Method]:
    methods = _draft_methods("draft", {"assistant_model": load_model(options.draft)}, options)
    if not plain:
        return [method for method in methods if method.name == "draft, adaptive"]
    return _none() + methods


def _early_exit_methods(options: argparse.Namespace) -> list[Method]:
    return _none() + _draft_methods("exit", {"assistant_early_exit": options.layers}, options)


def _cross_tokenizer_methods(tokenizer: Any, options: argparse.Namespace) -> list[Method]:
    folder = options.other
    common = {
        "assistant_model": load_model(folder),
        "tokenizer": tokenizer,
        "assistant_tokenizer": transformers.AutoTokenizer.from_pretrained(folder),
    }
    return _none() + _draft_methods("foreign", common, options)


def load_model(folder: Path) -> Any:
    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"no model in {folder}: build it with `python tools/models.py {folder.name}`")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _pad_left(prompts: Sequence[Sequence[int]]) -> Mapping[str, Tensor]:
    """Token ids [B, L] and their mask, padded at the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(one)) + list(one) for one in prompts])
    mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in prompts])
    return {"input_ids": ids, "attention_mask": mask}
