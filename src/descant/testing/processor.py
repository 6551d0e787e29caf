"""The contract of processors: lines are independent, and nothing is changed in place."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from descant.core.context import columns_from_rows
from descant.core.interfaces import Processor
from descant.core.records import Context, RowParams
from descant.core.rows import Rows
from descant.decoding.processors.base import as_processor


@dataclass(frozen=True)
class _ScoreLine:
    """One line of scores, with its tokens and parameters."""

    tokens: list[int]
    prompt_length: int
    scores: Tensor  # [V]
    params: Mapping[str, Any]


def check_processor(
    processor: Processor | Callable[[Tensor, Tensor], Tensor],
    params: Sequence[Mapping[str, Any]] = ({},),
    vocabulary: int = 23,
    examples: int = 20,
    tolerance: float = 1e-5,
) -> None:
    """A line's result depends neither on its index nor on other lines; inputs are not changed.

    `params` holds row parameters, for processors that read them from the context; lines use them in turn.
    Token buffers are padded with random tokens, and some other lines have only -inf or NaN. Lines after
    drafts must give the same result as after committed tokens.
    """
    adapted = as_processor(processor)
    rng = random.Random(vocabulary)
    for _ in range(examples):
        lines = [
            _random_line(
                rng, vocabulary, {"pad_token_id": 0, "prompt_index": 0, **params[index % len(params)]}
            )
            for index in range(2 * len(params) + 3)
        ]
        alone = [_run_checked(adapted, [line], rng)[0] for line in lines]
        invalid = {rng.randrange(len(lines)): value for value in (-torch.inf, torch.nan)}
        constant = {
            index: replace(lines[index], scores=torch.full_like(lines[index].scores, value))
            for index, value in invalid.items()
        }
        for order in (list(range(len(lines))), rng.sample(range(len(lines)), len(lines))):
            batch = [constant.get(index, lines[index]) for index in order]
            for index, result in zip(order, _run_checked(adapted, batch, rng), strict=True):
                if index not in invalid:
                    _check_same(alone[index], result, f"line {index} in the order {order}", tolerance)
        _check_drafts(adapted, lines, rng, tolerance)


def _random_line(rng: random.Random, vocabulary: int, params: Mapping[str, Any]) -> _ScoreLine:
    length = rng.randint(1, 9)
    scores = torch.tensor([rng.gauss(0, 3) for _ in range(vocabulary)])
    if rng.random() < 0.3:
        scores[rng.sample(range(vocabulary), vocabulary // 3)] = -torch.inf
    return _ScoreLine(
        [rng.randrange(vocabulary) for _ in range(length)], rng.randint(0, length), scores, params
    )


def _padded_tokens(lines: Sequence[_ScoreLine], rng: random.Random, extra: int = 0) -> Tensor:
    """The tokens of the lines, right-padded with random tokens [N, C]."""
    width = max(len(line.tokens) for line in lines) + extra + rng.randint(0, 3)
    vocabulary = len(lines[0].scores)
    return torch.tensor(
        [line.tokens + [rng.randrange(vocabulary) for _ in range(width - len(line.tokens))] for line in lines]
    )


def _run_checked(port: Processor, lines: Sequence[_ScoreLine], rng: random.Random) -> Tensor:
    """The processor's result [N, V]; checks its shape, and that inputs are not changed."""
    tokens = _padded_tokens(lines, rng)
    length = torch.tensor([len(line.tokens) for line in lines])
    prompt = torch.tensor([line.prompt_length for line in lines])
    values = columns_from_rows([line.params for line in lines])
    scores = torch.stack([line.scores for line in lines])
    tensor_params = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    inputs = [tokens, length, prompt, scores, *tensor_params.values()]
    before = [tensor.clone() for tensor in inputs]
    result = port.process(Context(tokens, length, prompt, values), scores)
    names = ["tokens", "length", "prompt", "scores", *tensor_params]
    for name, old, new in zip(names, before, inputs, strict=True):
        if not torch.equal(old.nan_to_num(7.0), new.nan_to_num(7.0)):
            raise AssertionError(f"the processor changed `{name}` in place: return a new tensor instead")
    if result.shape != scores.shape or not result.is_floating_point():
        raise AssertionError(
            f"the result is {list(result.shape)} {result.dtype}, must be {list(scores.shape)} of floats"
        )
    repeated = port.process(Context(tokens, length, prompt, values), scores)
    if not torch.equal(result.nan_to_num(7.0), repeated.nan_to_num(7.0)):
        raise AssertionError("called twice, the processor gave two results: it must keep no state of its own")
    return result


def _check_drafts(port: Processor, lines: Sequence[_ScoreLine], rng: random.Random, tolerance: float) -> None:
    """Slot `j` of a row with drafts equals a line whose first `j` drafts are committed."""
    width, vocabulary = 2, len(lines[0].scores)
    num_drafts = torch.tensor([rng.randint(0, width) for _ in lines])
    drafts = torch.tensor([[rng.randrange(vocabulary) for _ in range(width)] for _ in lines])
    length = torch.tensor([len(line.tokens) for line in lines])
    zeros = torch.zeros_like(length)
    rows = Rows(
        _padded_tokens(lines, rng, width),
        length,
        zeros,
        zeros,
        torch.tensor([line.prompt_length for line in lines]),
        torch.arange(len(lines)),
        zeros,
        {"params": RowParams(columns_from_rows([line.params for line in lines]))},
    )
    context = Context.from_rows(rows, drafts, {})
    scores = torch.stack([line.scores for line in lines]).repeat_interleave(width + 1, 0)
    results = port.process(context, scores).view(len(lines), width + 1, vocabulary)
    for row, line in enumerate(lines):
        for slot in range(int(num_drafts[row]) + 1):
            extended = replace(line, tokens=line.tokens + drafts[row, :slot].tolist())
            alone, label = _run_checked(port, [extended], rng)[0], f"line {row} after {slot} drafts"
            _check_same(alone, results[row, slot], label, tolerance)


def _check_same(alone: Tensor, other: Tensor, label: str, tolerance: float) -> None:
    if not torch.equal(alone.isfinite(), other.isfinite()):
        tokens = (alone.isfinite() != other.isfinite()).nonzero().flatten().tolist()
        raise AssertionError(f"{label}: tokens {tokens} are masked in one case and not in the other")
    if not torch.allclose(alone, other, rtol=tolerance, atol=tolerance, equal_nan=True):
        difference = (alone - other).nan_to_num(0.0, 0.0, 0.0).abs().max()
        raise AssertionError(f"{label}: the scores differ by {difference:.3g} from those of the line alone")
