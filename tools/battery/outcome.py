"""What an attack has found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Outcome", "Size"]

MAX_SHOWN = 20


@dataclass(frozen=True)
class Size:
    """How much an attack does: a count of its own unit, and seconds where it has a length."""

    count: int
    seconds: float = 0.0


@dataclass
class Outcome:
    """Figures, and what went wrong."""

    figures: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def check(self, is_right: bool, failure: object) -> None:
        """Count a failure unless all is right."""
        if not is_right:
            self.failures.append(str(failure)[:3000])

    def line(self, name: str) -> str:
        """The figures in one line."""
        values = "  ".join(
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in self.figures.items()
        )
        return f"{name}: {'failed' if self.failures else 'passed'}  {values}"

    def shown_failures(self) -> list[str]:
        """The first failures."""
        return self.failures[:MAX_SHOWN]
