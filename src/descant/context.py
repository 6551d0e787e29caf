"""What processors see: the parameters of every row, and where each line of logits stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from descant.rows import Rows, join, pick

__all__ = ["Context", "Params", "params_of"]


@dataclass(frozen=True)
class Params:
    """The column of parameters: `values[name]` is [R] or [R, W] on the host, equal inside a request."""

    values: Mapping[str, Tensor]
    constant: bool = True

    def __getitem__(self, name: str) -> Tensor:
        return self.values[name]

    def take(self, parents: Tensor) -> Self:
        """The parameters of the new rows."""
        return type(self)({name: value[parents] for name, value in self.values.items()})

    def cat(self, other: Self) -> Self:
        """These rows' parameters with another table's below."""
        return type(self)({name: join(value, other.values[name]) for name, value in self.values.items()})


def params_of(rows: Rows) -> Params:
    """The parameters of a table."""
    params = rows.columns["params"]
    assert isinstance(params, Params)
    return params


class Context:
    """Where each line of logits stands: line `i` follows `tokens[i, :length[i]]`.

    `param(name)` is that line's own parameter, [N, 1] for a number and [N, W] for a list padded with -1;
    `largest(name)` is its maximum over the lines, known on the host.
    """

    def __init__(
        self,
        tokens: Tensor,
        length: Tensor,
        prompt: Tensor,
        params: Mapping[str, Tensor],
        cache: dict[str, Tensor] | None = None,
    ) -> None:
        self._tokens = tokens  # [N, C]
        self._length = length  # [N] (host)
        self._prompt = prompt  # [N] (host)
        self._params = params  # [N] or [N, W] each (host)
        self._device: dict[str, Tensor] = {} if cache is None else cache

    @classmethod
    def of(cls, rows: Rows, drafts: Tensor | None, cache: dict[str, Tensor]) -> Context:
        """The lines of a table and its drafts [R, K], `K + 1` lines a row."""
        params = params_of(rows)
        if drafts is None:
            return cls(rows.tokens, rows.length, rows.prompt, params.values, cache)
        width = drafts.shape[1]
        tokens = rows.append(drafts, rows.length).tokens.repeat_interleave(width + 1, 0)
        row = torch.arange(len(rows)).repeat_interleave(width + 1)
        length = (rows.length[:, None] + torch.arange(width + 1)).flatten()
        values = {name: value[row] for name, value in params.values.items()}
        return cls(tokens, length, rows.prompt[row], values)

    @classmethod
    def standalone(cls, input_ids: Tensor, params: Mapping[str, Any]) -> Context:
        """A documented processor called by hand, as `(input_ids, scores)`: every id counts as real."""
        count, length = input_ids.shape
        prompt = torch.full((count,), int(params.get("prompt", 0)))
        return cls(input_ids, torch.full((count,), length), prompt, _lines(params, count))

    def fixed(self, params: Mapping[str, Any]) -> Context:
        """The same lines, with some parameters the same for all of them."""
        values = {**self._params, **_lines(params, len(self._length))}
        return Context(self._tokens, self._length, self._prompt, values)

    @property
    def tokens(self) -> Tensor:
        """What each line follows, right padded [N, L]."""
        return self._tokens[:, : int(self._length.max())]

    @cached_property
    def length(self) -> Tensor:
        """How many tokens each line follows [N, 1]."""
        return self._length.to(self._tokens.device, non_blocking=True)[:, None]

    @cached_property
    def generated(self) -> Tensor:
        """How many of them are new, not prompt [N, 1]."""
        return (self._length - self._prompt).to(self._tokens.device, non_blocking=True)[:, None]

    @cached_property
    def valid(self) -> Tensor:
        """Which of `tokens` are real [N, L]."""
        return torch.arange(self.tokens.shape[1], device=self._tokens.device) < self.length

    def param(self, name: str) -> Tensor:
        """That parameter on the device, [N, 1] or [N, W]."""
        if name not in self._device:
            value = self._params[name]
            kind = torch.float32 if value.is_floating_point() else value.dtype
            value = value.to(self._tokens.device, kind, non_blocking=True)
            self._device[name] = value if value.ndim > 1 else value[:, None]
        return self._device[name]

    def largest(self, name: str) -> int:
        """The largest value of an integer parameter, without asking the device."""
        return int(self._params[name].max())

    def level(self, name: str) -> bool:
        """Whether the parameter is the same for every line."""
        value = self._params[name]
        return bool((value == value[0]).all())

    def left_padded(self) -> Tensor:
        """The tokens as a documented processor expects them: aligned at the right, padded before [N, W].

        The width is that of the call's padded prompts and what is new, also when the longest has left.
        """
        padding = (
            self._params["width"] - self._prompt
            if "width" in self._params
            else torch.zeros(1, dtype=torch.long)
        )
        wide = int((padding + self._length).max())
        at = torch.arange(wide, device=self._tokens.device) - (wide - self.length)
        return torch.where(at >= 0, self._tokens.gather(1, at.clamp(min=0)), self.param("pad"))

    def take(self, index: Tensor) -> Context:
        """The lines `index` (host) alone."""
        values = {name: value[index] for name, value in self._params.items()}
        return Context(pick(self._tokens, index), self._length[index], self._prompt[index], values)


def _lines(params: Mapping[str, Any], count: int) -> dict[str, Tensor]:
    """Numbers and lists of numbers, repeated for so many lines."""
    values = {}
    for name, value in params.items():
        if isinstance(value, float):
            values[name] = torch.full((count,), value, dtype=torch.float64)
        elif isinstance(value, int | list):
            line = torch.tensor(value)
            values[name] = line.expand(count, *line.shape)
    return values
