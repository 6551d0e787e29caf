"""What processors read: the parameters of every row, and what each line of logits follows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from descant.core.counter_rng import uniform
from descant.core.row_params import ObjectArray, ParamValues, RowParams, columns_from_rows, row_params
from descant.core.rows import Column, Rows, index_rows, new_rows_column
from descant.tokenization.token_healing import HealedSuffix

__all__ = ["Context", "ParamValues", "PromptInfo", "RowParams", "columns_from_rows", "row_params"]


@dataclass(frozen=True)
class PromptInfo:
    """What the parameters of a row may depend on besides its config."""

    length: int  # tokens, a healed suffix included
    offset: int = 0  # positions without a token
    padded_width: int = 0  # width of the padded prompts of its call
    prompt_index: int = 0  # index of the prompt in its call
    source_ids: Callable[[], list[int]] = list  # ids of the encoder's input; without an encoder, the prompt's
    healed_suffix: HealedSuffix | None = None  # the tokens that token healing has removed
    padding: int = 0  # positions of padding that count as prompt in `max_length` and `min_length`
    max_length: int | None = None  # positions that its other inputs have room for; None: no limit


class _LazySelect(Mapping[str, Any]):
    """Some lines of columns, each selected on first use: a processor reads few of a table's columns."""

    def __init__(self, columns: Mapping[str, Any], index: Tensor) -> None:
        self._columns, self._index = columns, index

    def __getitem__(self, name: str) -> Any:
        return _index_values(self._columns[name], self._index)

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


class Context:
    """What each line of logits follows: line `i` follows `tokens[i, :length[i]]`.

    `param(name)` is that line's own parameter, [N, 1] for a number and [N, W] for a list padded with -1;
    `max_on_host(name)` is its maximum over the lines. `state(name)` is a processor's state of each line,
    [N, 1] for a number.
    """

    def __init__(  # noqa: PLR0913 - the columns of a table
        self,
        tokens: Tensor,
        length: Tensor,
        prompt: Tensor,
        params: ParamValues,
        cache: dict[str, Tensor] | None = None,
        *,
        slot: Tensor | None = None,
        states: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokens = tokens  # [N, C]
        self._length = length  # [N] (host)
        self._prompt = prompt  # [N] (host)
        self._params = params  # [N] or [N, ...] each (host)
        self._device_params: dict[str, Tensor] = {} if cache is None else cache
        self._slot = torch.zeros_like(length) if slot is None else slot  # [N] (host)
        self._states = {} if states is None else states  # [N, ...] each, or a Column

    @classmethod
    def from_rows(cls, rows: Rows, drafts: Tensor | None, cache: dict[str, Tensor]) -> Context:
        """The lines of a table: one per row, or `K + 1` per row with drafts [R, K].

        Drafts are written in place behind the rows' tokens. All lines of a row have the row's state.
        """
        params = row_params(rows)
        if drafts is None:
            return cls(
                rows.tokens,
                rows.length,
                rows.prompt_length,
                params.values,
                cache,
                slot=rows.slot,
                states=rows.columns,
            )
        width = drafts.shape[1]
        tokens = rows.append(drafts, rows.length).tokens.repeat_interleave(width + 1, 0)
        row = torch.arange(len(rows)).repeat_interleave(width + 1)
        length = (rows.length[:, None] + torch.arange(width + 1)).flatten()
        values, states = _LazySelect(params.values, row), _LazySelect(rows.columns, row)
        return cls(tokens, length, rows.prompt_length[row], values, slot=rows.slot[row], states=states)

    @classmethod
    def standalone(
        cls,
        input_ids: Tensor,
        params: Mapping[str, Any],
        state: Mapping[str, float | Tensor | Column] | None = None,
    ) -> Context:
        """For a processor called directly with `input_ids`: all ids are valid and its state is initial."""
        count, length = input_ids.shape
        prompt = torch.full((count,), int(params.get("prompt_length", 0)))
        states = {
            name: new_rows_column(start, count, input_ids.device) for name, start in (state or {}).items()
        }
        values = _repeat_params(params, count)
        return cls(input_ids, torch.full((count,), length), prompt, values, states=states)

    def with_params(self, params: Mapping[str, Any]) -> Context:
        """The same lines, with these parameters for all of them."""
        return self._replace(params={**self._params, **_repeat_params(params, len(self._length))})

    def with_states(self, states: Mapping[str, Tensor | Column]) -> Context:
        """The same lines with these states of [N] lines."""
        return self._replace(states=states, cache=self._device_params)

    @property
    def tokens(self) -> Tensor:
        """The tokens that each line follows, right padded [N, L]."""
        return self._tokens[:, : int(self._length.max())]

    @cached_property
    def length(self) -> Tensor:
        """The number of tokens that each line follows [N, 1]."""
        return self._length.to(self._tokens.device, non_blocking=True)[:, None]

    @cached_property
    def generated(self) -> Tensor:
        """How many of them are new, not prompt [N, 1]."""
        return (self._length - self._prompt).to(self._tokens.device, non_blocking=True)[:, None]

    @cached_property
    def generated_on_host(self) -> list[int]:
        """The same on the host."""
        return [int(one) for one in (self._length - self._prompt).tolist()]

    def new_tokens(self, line: int) -> list[int]:
        """The new tokens of a line, on the host."""
        start, stop = int(self._prompt[line]), int(self._length[line])
        return [int(token) for token in self._tokens[line, start:stop].tolist()]

    def new_token_arrays(self) -> list[ObjectArray]:
        """The new tokens of each line, on the host, with one copy from the device."""
        if not len(self._length):
            return []
        first = int(self._prompt.min())
        tokens = self._tokens[:, first : int(self._length.max())].cpu().numpy()
        bounds = zip((self._prompt - first).tolist(), (self._length - first).tolist(), strict=True)
        return [tokens[line, start:stop] for line, (start, stop) in enumerate(bounds)]

    @cached_property
    def valid(self) -> Tensor:
        """Which of `tokens` are no padding [N, L]."""
        return torch.arange(self.tokens.shape[1], device=self._tokens.device) < self.length

    def param(self, name: str) -> Tensor:
        """A parameter on the device, [N, 1] or [N, W]."""
        if name not in self._device_params:
            value = self._params[name]
            assert isinstance(value, Tensor)
            dtype = torch.float32 if value.is_floating_point() else value.dtype
            value = value.to(self._tokens.device, dtype, non_blocking=True)
            self._device_params[name] = value if value.ndim > 1 else value[:, None]
        return self._device_params[name]

    def object_param(self, name: str) -> list[Any]:
        """A parameter that is an object, one per line."""
        value = self._params[name]
        assert not isinstance(value, Tensor)
        return list(value)

    def state(self, name: str) -> Tensor:
        """A processor's state of each line, [N, 1] for a number, [N, 1, ...] else; NaN if it has none."""
        value: Tensor | None = self._states.get(name)
        if value is None:
            return torch.full((len(self._length), 1), torch.nan, device=self._tokens.device)
        return value[:, None]

    def state_column(self, name: str) -> Tensor | Column:
        """A processor's state as it is stored: a tensor [N, ...] or a Column of N rows."""
        if name not in self._states:
            return torch.full((len(self._length),), torch.nan, device=self._tokens.device)
        value: Tensor | Column = self._states[name]
        return value

    def uniform_per_token(self, salt: int) -> Tensor:
        """A number in (0, 1) for each line [N, 1], fixed by the row's seed and its length."""
        return self._uniform(self._length, salt)

    def uniform_per_sequence(self, salt: int) -> Tensor:
        """A number in (0, 1) for each line [N, 1], fixed by the row's seed at every length."""
        return self._uniform(torch.zeros_like(self._length), salt)

    def _uniform(self, position: Tensor, salt: int) -> Tensor:
        """A number in (0, 1) for each line [N, 1] at a position [N] (host)."""
        if "processor_seed" not in self._params:  # the processor was called directly
            return torch.rand(len(self._length), 1, device=self._tokens.device)
        seed = self._params["processor_seed"]
        assert isinstance(seed, Tensor)
        values = uniform(seed, self._slot, position, salt)[:, None]
        return values.to(self._tokens.device, torch.float32, non_blocking=True)

    def max_on_host(self, name: str) -> int:
        """The largest value of an integer parameter, without a device sync."""
        return int(self._params[name].max())

    def is_uniform(self, name: str) -> bool:
        """Whether the parameter is the same for every line."""
        value = self._params[name]
        return bool((value == value[0]).all())

    @property
    def num_lines(self) -> int:
        """The number of lines."""
        return len(self._length)

    @property
    def num_widths(self) -> int:
        """How many different widths the lines have as left-padded ids."""
        return len(set(self._padded_widths().tolist()))

    def batch_places(self) -> tuple[ObjectArray, ObjectArray, ObjectArray, ObjectArray] | None:
        """The place of each line in the batch of its call (host); None if no call has a batch of several.

        These are the batch, the row in it, the number of its rows, and how many of these rows a line stands
        for: all sequences of its prompt before the first token.
        """
        if "batch_size" not in self._params:
            return None
        size = self._params["batch_size"].numpy()  # type: ignore[union-attr]
        if not (size > 1).any():
            return None
        names = ("batch_id", "batch_row", "num_sequences")
        batch_id, row, copies = (self._params[name].numpy() for name in names)  # type: ignore[union-attr]
        copies = np.where((self._length == self._prompt).numpy(), copies, 1)
        return batch_id, row + self._slot.numpy(), size, copies

    def equal_width_groups(self) -> list[Tensor | None]:
        """The lines (host) in groups that a user's processor gets in one call; None: all of them.

        It may read the width of the ids, so lines share a call only if each would be as wide alone.
        """
        widths = self._padded_widths()
        if bool((widths == widths[0]).all()):
            return [None]
        return [(widths == width).nonzero().squeeze(1) for width in sorted(set(widths.tolist()))]

    def _padded_widths(self) -> Tensor:
        """The width of each line's ids, padding included [N] (host).

        It is the width of the call's padded prompts plus the new tokens, also when the longest prompt's
        rows have ended.
        """
        if "padded_width" not in self._params:
            return self._length
        return torch.as_tensor(self._params["padded_width"]) - self._prompt + self._length

    def left_padded(self) -> Tensor:
        """The tokens as transformers' processors expect them: left padded [N, W]."""
        width = int(self._padded_widths().max())
        index = torch.arange(width, device=self._tokens.device) - (width - self.length)
        return torch.where(index >= 0, self._tokens.gather(1, index.clamp(min=0)), self.param("pad_token_id"))

    def take(self, index: Tensor, cache: dict[str, Tensor] | None = None) -> Context:
        """The lines `index` (host) alone."""
        return Context(
            index_rows(self._tokens, index),
            self._length[index],
            self._prompt[index],
            _LazySelect(self._params, index),
            cache,
            slot=self._slot[index],
            states=_LazySelect(self._states, index),
        )

    def _replace(
        self,
        params: ParamValues | None = None,
        states: Mapping[str, Any] | None = None,
        cache: dict[str, Tensor] | None = None,
    ) -> Context:
        return Context(
            self._tokens,
            self._length,
            self._prompt,
            self._params if params is None else params,
            cache,
            slot=self._slot,
            states=self._states if states is None else states,
        )


def _index_values(value: Any, index: Tensor) -> Any:
    if isinstance(value, Tensor):
        return index_rows(value, index)
    return value[index.numpy()] if isinstance(value, np.ndarray) else value.take(index)


def _repeat_params(params: Mapping[str, Any], count: int) -> dict[str, Tensor | ObjectArray]:
    """Parameters repeated for `count` lines."""
    one = columns_from_rows([{name: value for name, value in params.items() if value is not None}])
    return {
        name: value.expand(count, *value.shape[1:]) if isinstance(value, Tensor) else np.repeat(value, count)
        for name, value in one.items()
    }
