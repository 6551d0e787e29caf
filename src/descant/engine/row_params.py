"""The parameters of a row that the engine owns: each is declared here, and set once.

Strategies, processors, wrappers, drafters and recipes add parameters of their own: a plain mapping beside
these, `method_params`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

__all__ = ["PlanParams", "PromptParams", "RowIds", "row_values"]


@dataclass(frozen=True, kw_only=True)
class PlanParams:
    """What follows from the config: equal for all requests of a plan."""

    eos_token_ids: list[int]
    stop_token_ids: list[int]
    end_token_ids: list[int]  # both of the above
    pad_token_id: int
    do_sample: int  # 0 or 1
    num_sequences: int  # rows that a prompt becomes after its prefill, without beams
    seed: int  # -1: none given
    early_stopping: int  # 0: False, 1: True, 2: "never"
    length_penalty: float
    min_tokens_to_keep: int  # by filters, so that enough candidates remain
    logprobs: int  # alternatives to record per token; -1: no log-probabilities

    def override(self, values: Mapping[str, Any]) -> tuple[PlanParams, dict[str, Any]]:
        """These with the values that have a field here, and the remaining values."""
        names = {one.name for one in fields(self)}
        own = {name: value for name, value in values.items() if name in names}
        rest = {name: value for name, value in values.items() if name not in names}
        return (replace(self, **own) if own else self), rest


@dataclass(frozen=True, kw_only=True)
class PromptParams:
    """What follows from the prompt."""

    max_length: int  # tokens, prompt included
    begin_index: int  # length at which the first new token is chosen
    padded_width: int  # width of the padded prompts of its call
    prompt_index: int  # index of the prompt in its call
    deadline: float  # monotonic seconds; inf: none

    @property
    def last_length(self) -> int:
        """The length of a row before its last choice."""
        return self.max_length - 1


@dataclass(frozen=True, kw_only=True)
class RowIds:
    """What admission assigns: ids of shared objects, and where the row draws its noise."""

    strategy_id: int
    processor_chain_id: int
    criteria_id: int  # -1 here and below: none
    stop_strings_id: int
    stop_regex_id: int
    seed: int  # -1: it draws from torch's generator
    noise_row: int  # its first row of torch's noise
    has_side_inputs: int  # 1: inputs besides tokens, so the prompt is prefilled before anything is drafted
    processor_seed: int | None = None  # for random processors; None: it has none
    batch_id: int = -1  # the call that it belongs to, for user code that keeps state by row
    batch_row: int = 0  # the index of its first sequence among the rows of that call
    batch_size: int = 1  # the number of these rows; 1: it is shown as it is


def row_values(
    plan: PlanParams, prompt: PromptParams, ids: RowIds, method_params: Mapping[str, Any]
) -> dict[str, Any]:
    """All parameters of one row."""
    assigned = {name: value for name, value in vars(ids).items() if value is not None}
    return {**vars(plan), **vars(prompt), "last_length": prompt.last_length, **method_params, **assigned}
