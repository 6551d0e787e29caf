"""The error of code that belongs to one request."""

from __future__ import annotations

__all__ = ["RequestFault"]


class RequestFault(Exception):
    """Code of one request has raised `cause` in a strategy that serves several.

    The engine fails that request, and makes the step again without it.
    """

    def __init__(self, request: int, cause: Exception) -> None:
        super().__init__(f"request {request}: {cause!r}")
        self.request, self.cause = request, cause
