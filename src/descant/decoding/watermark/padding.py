"""The padding around a text in a batch, which detectors do not score."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import numpy as np

from descant.core.interfaces import Array

__all__ = ["PaddingTokens"]


class PaddingTokens(NamedTuple):
    """The tokens that pad the rows of a batch, and which of them also end a text."""

    ids: frozenset[int] = frozenset()
    end_ids: frozenset[int] = frozenset()

    @classmethod
    def of(cls, source: Any) -> Self:
        """Those of a model config or a tokenizer; without a pad token, generate() pads with the end token."""
        end_ids = _as_ids(getattr(source, "eos_token_id", None))
        return cls(_as_ids(getattr(source, "pad_token_id", None)) or end_ids, end_ids)

    def text_span(self, ids: Array) -> tuple[int, int]:
        """Where the text of a row [L] starts and stops; the first end token of a run on the right is text."""
        is_text = ~np.isin(ids, list(self.ids))
        if not is_text.any():
            return 0, 0
        positions = np.flatnonzero(is_text)
        start, stop = int(positions[0]), int(positions[-1]) + 1
        if stop < len(ids) and int(ids[stop]) in self.end_ids:
            stop += 1
        return start, stop


def _as_ids(value: Any) -> frozenset[int]:
    """No token id, one or several as a set."""
    if isinstance(value, int) and not isinstance(value, bool):
        return frozenset({value})
    return frozenset(value) if isinstance(value, list | tuple) else frozenset()
