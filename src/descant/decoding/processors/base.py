"""The documented face of a processor, `(input_ids, scores)`, over the port, `(context, scores)`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from descant.config.generation_config import GenerationConfig
from descant.core.context import Context, PromptInfo
from descant.core.interfaces import Processor
from descant.errors import InputError

__all__ = [
    "BoundProcessor",
    "CallableProcessor",
    "LogitsProcessor",
    "LogitsProcessorList",
    "as_processor",
    "check_number",
    "to_list",
    "vocab_mask",
]

NO_STATE: Mapping[str, float] = {}


class LogitsProcessor:
    """The base of all processors: a subclass defines `process`, or, knowing nothing of contexts, `__call__`.

    `process` is pure and reads its parameters from the context, where every line has its own; an
    instance only holds the parameters of a call by hand, under the same names. One whose answer depends
    on the row's past beyond its tokens names the columns it keeps in `state`, with what a row starts
    with, and defines `advance`.
    """

    config_fields: ClassVar[tuple[str, ...]] = ()  # the config fields that are its parameters as they are
    state: Mapping[str, float] = NO_STATE
    is_random: ClassVar[bool] = False  # whether it asks `context.chance`

    @classmethod
    def make_unbound(cls) -> Self:
        """One without parameters of its own, as the loop uses it."""
        return cls.__new__(cls)

    @classmethod
    def params_from_config(cls, config: GenerationConfig, prompt: PromptInfo) -> dict[str, Any]:  # noqa: ARG003
        """The parameters of a row that uses it: numbers, lists of numbers, or objects."""
        return {name: to_list(getattr(config, name)) for name in cls.config_fields}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """New scores [N, V] after the ids [N, L], all of which count as real."""
        return self.process(Context.standalone(input_ids, vars(self), self.state), scores)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """New scores [N, V] for the lines of `context`."""
        raise NotImplementedError(f"{type(self).__name__} must define `process` or `__call__`")

    def advance(self, context: Context, before: Tensor, after: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        """The state of each line [N] after its token [N], of what was given and made of it [N, V]."""
        raise NotImplementedError(f"{type(self).__name__} has a `state` and must define `advance`")


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


class BoundProcessor:
    """One of ours that a user made by hand: it follows the rows, with its own parameters for all of them."""

    def __init__(self, function: LogitsProcessor) -> None:
        self.function = function
        self.state = function.state
        self.is_random = function.is_random

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """What it makes of the scores."""
        return self.function.process(context.with_params(vars(self.function)), scores)

    def advance(self, context: Context, before: Tensor, after: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        """Its state after the choice."""
        return self.function.advance(context.with_params(vars(self.function)), before, after, tokens)


class CallableProcessor:
    """A user's own processor, who is shown the ids of the running rows padded on the left."""

    state = NO_STATE
    is_random = False

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.function = function

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """What the user's function makes of the scores."""
        parts = context.equal_width_groups()
        if parts[0] is None:
            return self._call_function(context, scores)
        answer = scores.clone()
        for part in parts:
            assert part is not None
            at = part.to(scores.device)
            answer[at] = self._call_function(context.take(part), scores[at])
        return answer

    def _call_function(self, context: Context, scores: Tensor) -> Tensor:
        """The same of lines that are equally wide."""
        answer: Any = self.function(context.left_padded(), scores.clone())
        if not isinstance(answer, Tensor) or answer.shape != scores.shape:
            must = f"must return a tensor of shape {list(scores.shape)}"
            raise InputError("logits_processor", must, answer, "return the scores")
        return answer.float()

    def advance(self, context: Context, before: Tensor, after: Tensor, tokens: Tensor) -> dict[str, Tensor]:  # noqa: ARG002
        """It has no state that we know of."""
        return {}


def as_processor(given: Any) -> Processor:
    """A processor that a user brings along, as the loop calls it."""
    if isinstance(given, LogitsProcessor) and type(given).process is not LogitsProcessor.process:
        return BoundProcessor(given)
    if not isinstance(given, LogitsProcessor) and hasattr(given, "process"):
        port: Processor = given
        return port
    if not callable(given):
        raise InputError("logits_processor", "must hold callables (input_ids, scores) -> scores", given)
    return CallableProcessor(given)


def to_list(value: Any) -> Any:
    """A field's value as a parameter: sequences as lists."""
    return [to_list(part) for part in value] if isinstance(value, tuple) else value


def vocab_mask(shape: torch.Size, ids: Tensor) -> Tensor:
    """Which columns the ids [N, W] name, entries below 0 or too large naming none [N, V]."""
    width = shape[1]
    mask = torch.zeros(shape[0], width + 1, dtype=torch.bool, device=ids.device)
    ids = torch.where((ids >= 0) & (ids < width), ids, width)
    return mask.scatter_(1, ids.expand(shape[0], -1), True)[:, :width]


def check_number(name: str, value: Any, low: float, high: float = float("inf"), integer: bool = False) -> Any:
    """The value, checked to be a number between the bounds."""
    kinds = int if integer else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
        kind = "an integer" if integer else "a number"
        raise InputError(name, f"must be {kind} between {low} and {high}", value)
    return value
