"""A prefix function of allowed tokens; both sides of the reference's pipe build the same one."""

from __future__ import annotations

from collections.abc import Callable

import torch


def allowed_after(salt: int, vocabulary: int) -> Callable[[int, torch.Tensor], list[int]]:
    """Some tokens, at least one, that depend on the prompt's number and on every id before."""

    def allowed(batch: int, ids: torch.Tensor) -> list[int]:
        state = salt * 31 + batch
        for token in ids.tolist():
            state = (state * 1103515245 + token + 12345) % 2**31
        return sorted({(state // 7**n) % vocabulary for n in range(1 + state % 5)})

    return allowed
