"""The shape and the time of every forward of some models."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

__all__ = ["Forwards", "Shape"]

Shape = tuple[int, int, int]  # (id of the model, rows, positions per row)


class Forwards:
    """Times the forwards of models while open: `with Forwards(clock, model) as forwards`."""

    def __init__(self, clock: Callable[[], float], *models: Any) -> None:
        self.shapes: list[Shape] = []
        self._times: list[float] = []
        self._clock, self._models = clock, models
        self._began = 0.0

    def __enter__(self) -> Forwards:
        self._hooks = []
        for model in self._models:
            self._hooks.append(model.register_forward_pre_hook(self._begin))
            self._hooks.append(model.register_forward_hook(self._end, with_kwargs=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def seconds(self) -> float:
        """The total time of all forwards."""
        return sum(self._times)

    def count(self, model: Any) -> int:
        """The number of forwards of the model."""
        return sum(shape[0] == id(model) for shape in self.shapes)

    def update_minimum(self, fastest: dict[Shape, float]) -> None:
        """Update the minimum seconds of each shape."""
        for shape, seconds in zip(self.shapes, self._times, strict=True):
            fastest[shape] = min(seconds, fastest.get(shape, seconds))

    def _begin(self, model: Any, args: tuple[Any, ...]) -> None:  # noqa: ARG002
        self._began = self._clock()

    def _end(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:  # noqa: ARG002
        self._times.append(self._clock() - self._began)
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        self.shapes.append((id(model), *ids.shape))
