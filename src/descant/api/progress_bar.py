"""The progress bar of a call: finished prompts and new tokens."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from tqdm.auto import tqdm

from descant.engine.session import Event, Finished, Tokens

__all__ = ["ProgressBar"]


class ProgressBar:
    """A bar on stderr, or in a notebook, that counts prompts and shows the tokens a second."""

    def __init__(self, num_prompts: int) -> None:
        self._bar: Any = tqdm(total=num_prompts, unit="prompt", desc="generate")
        self._num_tokens = 0

    def count(self, event: Event) -> None:
        """Count an event of the session."""
        if isinstance(event, Tokens):
            self._num_tokens += len(event.token)
            elapsed = self._bar.format_dict["elapsed"]
            speed = f"{self._num_tokens / elapsed:.0f} tokens/s" if elapsed > 0 else ""
            self._bar.set_postfix_str(speed, refresh=False)
            self._bar.update(0)
        elif isinstance(event, Finished):
            self._bar.update()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
