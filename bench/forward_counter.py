"""The number of forwards of a model, and of their input positions."""

from __future__ import annotations

from types import TracebackType
from typing import Any

__all__ = ["ForwardCounter"]


class ForwardCounter:
    """Counts the forwards of a model while open: `with ForwardCounter(model) as counter`."""

    def __init__(self, model: Any) -> None:
        self.forwards = 0
        self.fed = 0  # positions, padding included
        self._model = model

    def __enter__(self) -> ForwardCounter:
        self._hook = self._model.register_forward_pre_hook(self._count, with_kwargs=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hook.remove()

    def _count(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG002
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        self.forwards += 1
        self.fed += ids.numel()
