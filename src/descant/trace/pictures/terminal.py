"""Being written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Paper:
    """How wide lines may be, and whether they may have colours."""

    width: int = 80
    colour: bool = False


def terminal(trace: Any, picture: str, where: Any, beside: Any = None, paper: Any = None) -> str:
    """Being written."""
    raise NotImplementedError
