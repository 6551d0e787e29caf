"""Being written."""

from __future__ import annotations

from typing import Any


def page(trace: Any, beside: Any = None, title: Any = None) -> str:
    """Being written."""
    raise NotImplementedError
