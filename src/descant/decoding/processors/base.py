"""Base classes of processors: the documented `(input_ids, scores)` and the engine's `(context, scores)`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from descant.config.generation_config import GenerationConfig
from descant.core.context import BatchPart, CallBatches, Context, PromptInfo
from descant.core.interfaces import Processor
from descant.errors import InputError

TokenIds = int | Sequence[int] | Tensor
NO_STATE: Mapping[str, float] = {}


class LogitsProcessor:
    """Base class of all processors. A subclass defines `process`, or `__call__` if it does not use contexts.

    `process` is pure and reads its parameters from the context, where every row has its own. An instance only
    holds the parameters of direct calls, under the same names. A processor that depends on more than the
    row's tokens declares its columns with their initial values in `state`, and defines `advance`.
    """

    config_fields: ClassVar[tuple[str, ...]] = ()  # config fields passed unchanged as parameters
    order_name: ClassVar[str] = "custom"  # of one's own: its place in `processor_order`, after the one there
    state: Mapping[str, float] = NO_STATE
    is_random: ClassVar[bool] = False  # whether it uses `context.uniform_per_token` or `uniform_per_sequence`

    @classmethod
    def make_unbound(cls) -> Self:
        """Return an instance without parameters, as the engine uses it."""
        return cls.__new__(cls)

    @classmethod
    def params_from_config(cls, config: GenerationConfig, prompt: PromptInfo) -> dict[str, Any]:  # noqa: ARG003
        """Return the row parameters of this processor: numbers, lists of numbers, or objects."""
        return {name: to_list(getattr(config, name)) for name in cls.config_fields}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return new scores [N, V] for the ids [N, L], none of which is treated as padding."""
        return self.process(Context.standalone(input_ids, vars(self), self.state), scores)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Return new scores [N, V] for the rows of `context`."""
        raise NotImplementedError(f"{type(self).__name__} must define `process` or `__call__`")

    def advance(self, context: Context, before: Tensor, after: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        """Return the state [N] after the chosen tokens [N]; scores are [N, V] before and after `process`."""
        raise NotImplementedError(f"{type(self).__name__} has a `state` and must define `advance`")


class LogitsProcessorList(list[Any]):
    """A list of processors applied in order."""

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        """Return new scores [N, V]; further arguments of a processor are taken from `kwargs`."""
        for processor in self:
            names = list(inspect.signature(processor.__call__).parameters)[2:]
            missing = [name for name in names if name not in kwargs]
            if missing:
                raise InputError(
                    "kwargs", f"must contain {missing} for {type(processor).__name__}", list(kwargs)
                )
            scores = processor(input_ids, scores, **{name: kwargs[name] for name in names})
        return scores


class BoundProcessor:
    """A built-in processor constructed by the user: its own parameters apply to all rows."""

    def __init__(self, function: LogitsProcessor) -> None:
        self.function = function
        self.state = function.state
        self.is_random = function.is_random

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Process the scores with the instance's parameters."""
        return self.function.process(context.with_params(vars(self.function)), scores)

    def advance(self, context: Context, before: Tensor, after: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        """Advance the state with the instance's parameters."""
        return self.function.advance(context.with_params(vars(self.function)), before, after, tokens)


class CallableProcessor:
    """A user's callable `(input_ids, scores)`, which may keep state by the index of a row.

    It receives ids padded on the left. The rows of a call keep their index until all of them have ended: a
    row that has ended is shown with its final tokens and padding, its scores are 0 and what is returned for
    it is ignored.
    """

    state = NO_STATE
    is_random = False

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.function = function
        self._batches = CallBatches()
        self.record_finished = self._batches.record_finished

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Call the function once per batch of rows of equal width."""
        parts = self._batches.split(context)
        if parts[0].lines is None:
            return self._call_function(parts[0], scores)
        processed = scores.clone()
        for part in parts:
            assert part.lines is not None
            index = part.lines.to(scores.device)
            processed[index] = self._call_function(part, scores[index])
        return processed

    def _call_function(self, part: BatchPart, scores: Tensor) -> Tensor:
        """Call the function on rows of equal width and check its result."""
        given = part.expand(scores)
        shape = given.shape
        result: Any = self.function(part.input_ids, given)
        if not isinstance(result, Tensor) or result.shape != shape:
            must = f"must return a tensor of shape {list(shape)}"
            raise InputError("logits_processor", must, result, "return the scores")
        return part.select(result).float()

    def advance(self, context: Context, before: Tensor, after: Tensor, tokens: Tensor) -> dict[str, Tensor]:  # noqa: ARG002
        """Return no state: the engine does not manage a callable's state."""
        return {}


def as_processor(candidate: Any) -> Processor:
    """Wrap a user's processor for the engine."""
    if isinstance(candidate, LogitsProcessor) and type(candidate).process is not LogitsProcessor.process:
        return BoundProcessor(candidate)
    if not isinstance(candidate, LogitsProcessor) and hasattr(candidate, "process"):
        processor: Processor = candidate
        return processor
    if not callable(candidate):
        raise InputError(
            "logits_processor", "must contain callables (input_ids, scores) -> scores", candidate
        )
    return CallableProcessor(candidate)


def as_id_list(value: TokenIds | None) -> list[int]:
    """Convert no token id, one or several to a list."""
    if value is None:
        return []
    return [value] if isinstance(value, int) else torch.as_tensor(value).reshape(-1).tolist()


def to_list(value: Any) -> Any:
    """Convert tuples to lists, recursively."""
    return [to_list(part) for part in value] if isinstance(value, tuple) else value


def vocab_mask(shape: torch.Size, ids: Tensor) -> Tensor:
    """Mask of the token ids [N, W] over the vocabulary [N, V]; ids out of range are ignored."""
    width = shape[1]
    mask = torch.zeros(shape[0], width + 1, dtype=torch.bool, device=ids.device)
    ids = torch.where((ids >= 0) & (ids < width), ids, width)
    return mask.scatter_(1, ids.expand(shape[0], -1), True)[:, :width]


def check_number(name: str, value: Any, low: float, high: float = float("inf"), integer: bool = False) -> Any:
    """Return the value if it is a number within the bounds, raise otherwise."""
    types = int if integer else (int, float)
    if isinstance(value, bool) or not isinstance(value, types) or not low <= value <= high:
        expected = "an integer" if integer else "a number"
        raise InputError(name, f"must be {expected} between {low} and {high}", value)
    return value


def check_positive(name: str, value: Any, do: str = "", high: float = float("inf")) -> float:
    """Return the value as a float if it is a number above 0 and at most `high`, raise otherwise."""
    if check_number(name, value, 0.0, high) <= 0:
        raise InputError(name, "must be > 0", value, do)
    return float(value)
