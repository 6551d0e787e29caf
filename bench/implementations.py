"""The three compared implementations, with one signature."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

import descant
from bench import baseline_loop
from bench.case import Case, Prompts

__all__ = ["BASELINE", "IMPLEMENTATIONS", "OURS", "THEIRS", "Implementation"]

Implementation = Callable[[Any, Case, Prompts, int], Tensor]  # (model, case, prompts, new) -> [B, new]


def _baseline(model: Any, case: Case, prompts: Prompts, new: int) -> Tensor:  # noqa: ARG001
    return baseline_loop.decode(model, prompts.ids, new)


def _ours(model: Any, case: Case, prompts: Prompts, new: int) -> Tensor:
    whole = descant.generate(
        model, input_ids=prompts.ids, attention_mask=prompts.mask, max_new_tokens=new, **case.arguments
    )
    return whole[:, prompts.ids.shape[1] :]


def _theirs(model: Any, case: Case, prompts: Prompts, new: int) -> Tensor:
    whole = model.generate(
        input_ids=prompts.ids, attention_mask=prompts.mask, max_new_tokens=new, **case.arguments
    )
    return whole[:, prompts.ids.shape[1] :]


BASELINE, OURS, THEIRS = "baseline", "descant", "transformers"
IMPLEMENTATIONS: Mapping[str, Implementation] = {BASELINE: _baseline, OURS: _ours, THEIRS: _theirs}
