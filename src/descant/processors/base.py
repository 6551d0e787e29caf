"""The documented face of a processor, `(input_ids, scores)`, over the port, `(context, scores)`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from descant.context import Context
from descant.errors import InputError

__all__ = [
    "FixedProcessor",
    "ForeignProcessor",
    "LogitsProcessor",
    "LogitsProcessorList",
    "UserProcessors",
    "marked",
    "number",
]


class LogitsProcessor:
    """The base of all processors: a subclass defines `process`, or, knowing nothing of contexts, `__call__`.

    `process` is pure and reads its parameters from the context, where every line has its own; an
    instance only holds the parameters of a call by hand, under the same names.
    """

    @classmethod
    def bare(cls) -> Self:
        """One without parameters of its own, as the loop uses it."""
        return cls.__new__(cls)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """New scores [N, V] after the ids [N, L], all of which count as real."""
        return self.process(Context.standalone(input_ids, vars(self)), scores)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """New scores [N, V] for the lines of `context`."""
        raise NotImplementedError(f"{type(self).__name__} must define `process` or `__call__`")


class LogitsProcessorList(list[Any]):
    """Processors applied one after the other."""

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        """New scores [N, V]; a processor that takes more than two arguments finds them in `kwargs`."""
        for processor in self:
            names = list(inspect.signature(processor.__call__).parameters)[2:]
            missing = [name for name in names if name not in kwargs]
            if missing:
                raise InputError(
                    "kwargs", f"must hold {missing} for {type(processor).__name__}", list(kwargs)
                )
            scores = processor(input_ids, scores, **{name: kwargs[name] for name in names})
        return scores


class FixedProcessor:
    """One of ours that a user made by hand: it follows the rows, with its own parameters for all of them."""

    def __init__(self, function: LogitsProcessor) -> None:
        self.function = function

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """What it makes of the scores."""
        return self.function.process(context.fixed(vars(self.function)), scores)


class ForeignProcessor:
    """A user's own processor, who is shown the ids of the running rows padded on the left."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.function = function

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """What the user's function makes of the scores."""
        answer: Any = self.function(context.left_padded(), scores.clone())
        if not isinstance(answer, Tensor) or answer.shape != scores.shape:
            must = f"must return a tensor of shape {list(scores.shape)}"
            raise InputError("logits_processor", must, answer, "return the scores")
        return answer.float()


class UserProcessors:
    """The processors that a request brings along, in its own order."""

    def __init__(self, given: Sequence[Any]) -> None:
        for one in given:
            if not callable(one):
                raise InputError("logits_processor", "must hold callables (input_ids, scores) -> scores", one)
        self.given = tuple(given)
        self._stages = [_behind_the_port(one) for one in given]

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """What they make of the scores one after the other."""
        for stage in self._stages:
            scores = stage.process(context, scores)
        return scores

    def same(self, given: Sequence[Any]) -> bool:
        """Whether these are the same objects in the same order."""
        return len(given) == len(self.given) and all(a is b for a, b in zip(given, self.given, strict=True))


def _behind_the_port(given: Any) -> FixedProcessor | ForeignProcessor:
    if isinstance(given, LogitsProcessor) and type(given).process is not LogitsProcessor.process:
        return FixedProcessor(given)
    return ForeignProcessor(given)


def marked(shape: torch.Size, ids: Tensor) -> Tensor:
    """Which columns the ids [N, W] name, entries below 0 or too large naming none [N, V]."""
    width = shape[1]
    mask = torch.zeros(shape[0], width + 1, dtype=torch.bool, device=ids.device)
    ids = torch.where((ids >= 0) & (ids < width), ids, width)
    return mask.scatter_(1, ids.expand(shape[0], -1), True)[:, :width]


def number(name: str, value: Any, low: float, high: float = float("inf"), whole: bool = False) -> Any:
    """The value, checked to be a number between the bounds."""
    kinds = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
        kind = "an integer" if whole else "a number"
        raise InputError(name, f"must be {kind} between {low} and {high}", value)
    return value
