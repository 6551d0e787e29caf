"""Being written."""

from __future__ import annotations

from typing import Any


def terminal(trace: Any, picture: str = "tree", **how: Any) -> str:
    """Being written."""
    raise NotImplementedError
