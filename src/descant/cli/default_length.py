"""The note that a text ends where the default length ends it, and not where the model ends it."""

from __future__ import annotations

from typing import Final

from descant.cli import terminal
from descant.config.generation_config import DEFAULT_NEW_TOKENS, GenerationConfig

__all__ = ["LENGTH_FIELDS", "DefaultLengthNote"]

LENGTH_FIELDS: Final = frozenset({"max_new_tokens", "max_length"})


class DefaultLengthNote:
    """Collects why texts of a run ended, and says once that the default length has cut one."""

    def __init__(self) -> None:
        self._is_due = False

    def add(self, config: GenerationConfig, finish_reason: str | None) -> None:
        """Take the end of a text that was generated with a merged config."""
        self._is_due |= finish_reason == "length" and not config.given & LENGTH_FIELDS

    def print_if_due(self) -> None:
        """Print the note, if a text was cut."""
        if self._is_due:
            terminal.print_info(
                f"stopped at the default of {DEFAULT_NEW_TOKENS} new tokens: set --max-new-tokens"
            )
