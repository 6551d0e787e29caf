"""The law of processors: each line is judged by itself, and nothing is changed in place."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from descant.core.context import columns_from_rows
from descant.core.interfaces import Processor
from descant.core.records import Context, RowParams
from descant.core.rows import Rows
from descant.decoding.processors import as_processor

__all__ = ["check_processor"]


@dataclass(frozen=True)
class _ScoreLine:
    """One line of scores, what it follows, and its parameters."""

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
    """A line's result depends neither on its place nor on its neighbours; the inputs stay as they were.

    `params` holds the parameters of one line each, for processors that read them from the context; lines
    use them in turn. Token stores are padded with rubbish, and some neighbours have only -inf or NaN.
    Lines of drafts must come out as if their drafts were decided.
    """
    port = as_processor(processor)
    rng = random.Random(vocabulary)
    for _ in range(examples):
        lines = [
            _random_line(rng, vocabulary, {"pad_token_id": 0, "prompt_index": 0, **params[at % len(params)]})
            for at in range(2 * len(params) + 3)
        ]
        alone = [_run_checked(port, [line], rng)[0] for line in lines]
        spoilt = {rng.randrange(len(lines)): value for value in (-torch.inf, torch.nan)}
        for order in (list(range(len(lines))), rng.sample(range(len(lines)), len(lines))):
            given = [
                _with_constant_scores(lines[at], spoilt[at]) if at in spoilt else lines[at] for at in order
            ]
            for place, answer in zip(order, _run_checked(port, given, rng), strict=True):
                if place not in spoilt:
                    _check_same(alone[place], answer, f"line {place} in the order {order}", tolerance)
        _check_drafts(port, lines, rng, tolerance)


def _random_line(rng: random.Random, vocabulary: int, params: Mapping[str, Any]) -> _ScoreLine:
    length = rng.randint(1, 9)
    scores = torch.tensor([rng.gauss(0, 3) for _ in range(vocabulary)])
    if rng.random() < 0.3:
        scores[rng.sample(range(vocabulary), vocabulary // 3)] = -torch.inf
    return _ScoreLine(
        [rng.randrange(vocabulary) for _ in range(length)], rng.randint(0, length), scores, params
    )


def _with_constant_scores(line: _ScoreLine, value: float) -> _ScoreLine:
    return _ScoreLine(line.tokens, line.prompt_length, torch.full_like(line.scores, value), line.params)


def _padded_tokens(lines: Sequence[_ScoreLine], rng: random.Random, room: int = 0) -> Tensor:
    """The tokens of the lines, padded at the right with rubbish [N, C]."""
    wide = max(len(line.tokens) for line in lines) + room + rng.randint(0, 3)
    vocabulary = len(lines[0].scores)
    return torch.tensor(
        [line.tokens + [rng.randrange(vocabulary) for _ in range(wide - len(line.tokens))] for line in lines]
    )


def _run_checked(port: Processor, lines: Sequence[_ScoreLine], rng: random.Random) -> Tensor:
    """The processor's answer [N, V], checked to be an answer and to have left its inputs alone."""
    tokens = _padded_tokens(lines, rng)
    length = torch.tensor([len(line.tokens) for line in lines])
    prompt = torch.tensor([line.prompt_length for line in lines])
    values = columns_from_rows([line.params for line in lines])
    scores = torch.stack([line.scores for line in lines])
    numbers = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    given = [tokens, length, prompt, scores, *numbers.values()]
    before = [tensor.clone() for tensor in given]
    answer = port.process(Context(tokens, length, prompt, values), scores)
    names = ["tokens", "length", "prompt", "scores", *numbers]
    for name, old, new in zip(names, before, given, strict=True):
        if not torch.equal(old.nan_to_num(7.0), new.nan_to_num(7.0)):
            raise AssertionError(f"the processor changed `{name}` in place: return a new tensor instead")
    if answer.shape != scores.shape or not answer.is_floating_point():
        raise AssertionError(
            f"the answer is {list(answer.shape)} {answer.dtype}, must be {list(scores.shape)} of floats"
        )
    again = port.process(Context(tokens, length, prompt, values), scores)
    if not torch.equal(answer.nan_to_num(7.0), again.nan_to_num(7.0)):
        raise AssertionError("asked twice, the processor gave two answers: it must keep no state of its own")
    return answer


def _check_drafts(port: Processor, lines: Sequence[_ScoreLine], rng: random.Random, tolerance: float) -> None:
    """Slot `j` of a row with drafts equals a line on which the first `j` are decided."""
    width, vocabulary = 2, len(lines[0].scores)
    n = torch.tensor([rng.randint(0, width) for _ in lines])
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
    answers = port.process(context, scores).view(len(lines), width + 1, vocabulary)
    for at, line in enumerate(lines):
        for slot in range(int(n[at]) + 1):
            decided = _ScoreLine(
                line.tokens + drafts[at, :slot].tolist(), line.prompt_length, line.scores, line.params
            )
            _check_same(
                _run_checked(port, [decided], rng)[0],
                answers[at, slot],
                f"line {at} after {slot} drafts",
                tolerance,
            )


def _check_same(alone: Tensor, other: Tensor, where: str, tolerance: float) -> None:
    if not torch.equal(alone.isfinite(), other.isfinite()):
        odd = (alone.isfinite() != other.isfinite()).nonzero().flatten().tolist()
        raise AssertionError(f"{where}: tokens {odd} are ruled out in one place and not in the other")
    if not torch.allclose(alone, other, rtol=tolerance, atol=tolerance, equal_nan=True):
        far = (alone - other).nan_to_num(0.0, 0.0, 0.0).abs().max()
        raise AssertionError(f"{where}: the scores differ by {far:.3g} from those of the line alone")
