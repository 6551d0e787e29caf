"""What processors see: the parameters of every row, and where each line of logits stands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from descant.core.counter_rng import uniform
from descant.core.rows import Rows, join, pick, widened
from descant.tokenization.token_healing import Tail

__all__ = ["Context", "Params", "Prompt", "Values", "params_of", "table"]

Objects = np.ndarray[Any, np.dtype[Any]]  # [R] of Python objects, None where a row has none
Values = Mapping[str, "Tensor | Objects"]


@dataclass(frozen=True)
class Prompt:
    """What the parameters of a row may depend on besides its config."""

    length: int  # tokens
    offset: int = 0  # positions without a token
    width: int = 0  # tokens of the padded prompts it came with
    batch: int = 0  # which prompt of its call it is
    source: Callable[[], list[int]] = list  # ids of the encoder's input; without an encoder, the prompt's
    tail: Tail | None = None  # what token healing has taken off its end; `length` counts it


@dataclass(frozen=True)
class Params:
    """The column of parameters: `values[name]` is [R], [R, W] or [R, K, W] (host), equal inside a request.

    It holds what somebody uses; for a row that does not use it a value is -1, or None where it is an object.
    """

    values: Values
    constant: bool = True

    def __getitem__(self, name: str) -> Tensor:
        value = self.values[name]
        assert isinstance(value, Tensor)
        return value

    def __len__(self) -> int:
        return len(next(iter(self.values.values())))

    def take(self, parents: Tensor) -> Self:
        """The parameters of the new rows."""
        return type(self)({name: _picked(value, parents) for name, value in self.values.items()})

    def cat(self, other: Self) -> Self:
        """These rows' parameters with another table's below."""
        mine, theirs = self.values, other.values
        if mine.keys() != theirs.keys():
            mine = {**mine, **_absent(theirs, mine, len(self))}
            theirs = {**theirs, **_absent(mine, theirs, len(other))}
        return type(self)({name: _joined(value, theirs[name]) for name, value in mine.items()})


def params_of(rows: Rows) -> Params:
    """The parameters of a table."""
    params = rows.columns["params"]
    assert isinstance(params, Params)
    return params


def table(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor | Objects]:
    """Parameters row by row as columns: numbers [R], lists [R, W] or [R, K, W] padded with -1."""
    names = dict.fromkeys(name for row in rows for name in row)
    given = {name: [row.get(name) for row in rows] for name in names}
    kinds = {name: _kind(values) for name, values in given.items()}
    columns: dict[str, Tensor | Objects] = {}
    # All numbers of a kind as one tensor, of which each column is a line: most of the time is torch's entry.
    for kind, dtype in ((int, torch.long), (float, torch.float64)):
        mine = [name for name in names if kinds[name] is kind]
        lines = [[-1 if value is None else value for value in given[name]] for name in mine]
        columns |= dict(zip(mine, torch.tensor(lines, dtype=dtype), strict=True))
    return {name: columns[name] if name in columns else _column(given[name]) for name in names}


class _Some(Mapping[str, Any]):
    """Some lines of columns, each picked when it is asked for: a stage reads few of those a table has."""

    def __init__(self, columns: Mapping[str, Any], index: Tensor) -> None:
        self._columns, self._index = columns, index

    def __getitem__(self, name: str) -> Tensor | Objects:
        return _picked(self._columns[name], self._index)

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


class Context:
    """Where each line of logits stands: line `i` follows `tokens[i, :length[i]]`.

    `param(name)` is that line's own parameter, [N, 1] for a number and [N, W] for a list padded with -1;
    `largest(name)` is its maximum over the lines, known on the host. `state(name)` is what a processor
    keeps of a line's past, [N, 1].
    """

    def __init__(  # noqa: PLR0913 - the columns of a table
        self,
        tokens: Tensor,
        length: Tensor,
        prompt: Tensor,
        params: Values,
        cache: dict[str, Tensor] | None = None,
        *,
        slot: Tensor | None = None,
        states: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokens = tokens  # [N, C]
        self._length = length  # [N] (host)
        self._prompt = prompt  # [N] (host)
        self._params = params  # [N] or [N, ...] each (host)
        self._device: dict[str, Tensor] = {} if cache is None else cache
        self._slot = torch.zeros_like(length) if slot is None else slot  # [N] (host)
        self._states = {} if states is None else states  # [N] each

    @classmethod
    def of(cls, rows: Rows, drafts: Tensor | None, cache: dict[str, Tensor]) -> Context:
        """The lines of a table and its drafts [R, K], `K + 1` lines a row, in the state of their row."""
        params = params_of(rows)
        if drafts is None:
            return cls(
                rows.tokens,
                rows.length,
                rows.prompt,
                params.values,
                cache,
                slot=rows.slot,
                states=rows.columns,
            )
        width = drafts.shape[1]
        tokens = rows.append(drafts, rows.length).tokens.repeat_interleave(width + 1, 0)
        row = torch.arange(len(rows)).repeat_interleave(width + 1)
        length = (rows.length[:, None] + torch.arange(width + 1)).flatten()
        values, states = _Some(params.values, row), _Some(rows.columns, row)
        return cls(tokens, length, rows.prompt[row], values, slot=rows.slot[row], states=states)

    @classmethod
    def standalone(
        cls, input_ids: Tensor, params: Mapping[str, Any], state: Mapping[str, float] | None = None
    ) -> Context:
        """A processor called by hand, as `(input_ids, scores)`: every id counts as real, its state begins."""
        count, length = input_ids.shape
        prompt = torch.full((count,), int(params.get("prompt", 0)))
        states = {
            name: torch.full((count,), value, device=input_ids.device)
            for name, value in (state or {}).items()
        }
        values = _lines(params, count)
        return cls(input_ids, torch.full((count,), length), prompt, values, states=states)

    def fixed(self, params: Mapping[str, Any]) -> Context:
        """The same lines, with some parameters the same for all of them."""
        return self._like(params={**self._params, **_lines(params, len(self._length))})

    def after(self, states: Mapping[str, Tensor]) -> Context:
        """The same lines, of whose states these [N] are known."""
        return self._like(states=states, cache=self._device)

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
    def new(self) -> list[int]:
        """The same, known on the host."""
        return [int(one) for one in (self._length - self._prompt).tolist()]

    def written(self, line: int) -> list[int]:
        """The new tokens of a line, on the host."""
        return [
            int(one) for one in self._tokens[line, int(self._prompt[line]) : int(self._length[line])].tolist()
        ]

    @cached_property
    def valid(self) -> Tensor:
        """Which of `tokens` are real [N, L]."""
        return torch.arange(self.tokens.shape[1], device=self._tokens.device) < self.length

    def param(self, name: str) -> Tensor:
        """That parameter on the device, [N, 1] or [N, W]."""
        if name not in self._device:
            value = self._params[name]
            assert isinstance(value, Tensor)
            kind = torch.float32 if value.is_floating_point() else value.dtype
            value = value.to(self._tokens.device, kind, non_blocking=True)
            self._device[name] = value if value.ndim > 1 else value[:, None]
        return self._device[name]

    def objects(self, name: str) -> list[Any]:
        """A parameter that is an object, one a line."""
        value = self._params[name]
        assert not isinstance(value, Tensor)
        return list(value)

    def state(self, name: str) -> Tensor:
        """What a processor keeps of each line's past [N, 1]; NaN where it has not begun."""
        value: Tensor | None = self._states.get(name)
        if value is None:
            return torch.full((len(self._length), 1), torch.nan, device=self._tokens.device)
        return value[:, None]

    def chance(self, salt: int) -> Tensor:
        """A number between 0 and 1 for each line [N, 1], the same whenever the row asks at this place."""
        return self._drawn(self._length, salt)

    def luck(self, salt: int) -> Tensor:
        """A number between 0 and 1 for each line [N, 1], the same wherever its sequence asks."""
        return self._drawn(torch.zeros_like(self._length), salt)

    def _drawn(self, place: Tensor, salt: int) -> Tensor:
        """What the dice of each line show at a place [N] (host)."""
        if "dice" not in self._params:  # called by hand
            return torch.rand(len(self._length), 1, device=self._tokens.device)
        value = self._params["dice"]
        assert isinstance(value, Tensor)
        drawn = uniform(value, self._slot, place, salt)[:, None]
        return drawn.to(self._tokens.device, torch.float32, non_blocking=True)

    def largest(self, name: str) -> int:
        """The largest value of an integer parameter, without asking the device."""
        value = self._params[name]
        return int(value.max())

    def level(self, name: str) -> bool:
        """Whether the parameter is the same for every line."""
        value = self._params[name]
        return bool((value == value[0]).all())

    def abreast(self) -> list[Tensor | None]:
        """The lines (host) in parts that a documented processor is shown at once; None: all of them.

        It may read the width of the ids, so lines share a call only where each would be as wide alone.
        """
        wide = self._wide()
        if bool((wide == wide[0]).all()):
            return [None]
        return [(wide == one).nonzero().squeeze(1) for one in sorted(set(wide.tolist()))]

    def _wide(self) -> Tensor:
        """How wide the ids of each line are, padding included [N] (host).

        That is the width of the call's padded prompts and what is new, also when the longest has left.
        """
        if "width" not in self._params:
            return self._length
        return torch.as_tensor(self._params["width"]) - self._prompt + self._length

    def left_padded(self) -> Tensor:
        """The tokens as a documented processor expects them: aligned at the right, padded before [N, W]."""
        wide = int(self._wide().max())
        at = torch.arange(wide, device=self._tokens.device) - (wide - self.length)
        return torch.where(at >= 0, self._tokens.gather(1, at.clamp(min=0)), self.param("pad"))

    def take(self, index: Tensor, cache: dict[str, Tensor] | None = None) -> Context:
        """The lines `index` (host) alone."""
        return Context(
            pick(self._tokens, index),
            self._length[index],
            self._prompt[index],
            _Some(self._params, index),
            cache,
            slot=self._slot[index],
            states=_Some(self._states, index),
        )

    def _like(
        self,
        params: Values | None = None,
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


def _picked(value: Tensor | Objects, index: Tensor) -> Tensor | Objects:
    return pick(value, index) if isinstance(value, Tensor) else value[index.numpy()]


def _joined(first: Tensor | Objects, second: Tensor | Objects) -> Tensor | Objects:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return join(first, second)
    return np.concatenate((first, second))


def _absent(there: Values, here: Values, count: int) -> dict[str, Tensor | Objects]:
    """What `count` rows hold of the parameters that only others use."""
    return {
        name: value.new_full((count, *value.shape[1:]), -1)
        if isinstance(value, Tensor)
        else np.full(count, None)
        for name, value in there.items()
        if name not in here
    }


def _kind(values: Sequence[Any]) -> type:
    """Of what kind a parameter is: int (also for bools), float, list or object."""
    first = next(value for value in values if value is not None)
    return next((kind for kind in (float, int, list) if isinstance(first, kind)), object)


def _column(values: Sequence[Any]) -> Tensor | Objects:
    """A parameter of several rows that is no number, None where a row does not use it."""
    first = next(value for value in values if value is not None)
    if isinstance(first, list):
        if all(value is first or value == first for value in values):  # mostly: one config for all
            block = _stacked([_block(first)])
            return block.repeat(len(values), *[1] * (block.ndim - 1))
        return _stacked([_block(value or []) for value in values])
    objects = np.full(len(values), None)
    for place, value in enumerate(values):  # one by one, since numpy would take a sequence apart
        objects[place] = value
    return objects


def _block(value: list[Any]) -> Tensor:
    """A list of numbers [1, W], or of lists of numbers [1, K, W] padded with -1."""
    if value and isinstance(value[0], list):
        wide = max(1, *(len(part) for part in value))
        return torch.tensor([[*part, *[-1] * (wide - len(part))] for part in value])[None]
    if any(isinstance(part, float) for part in value):
        return torch.tensor(value, dtype=torch.float64)[None]
    return torch.tensor(value, dtype=torch.long)[None]


def _stacked(blocks: list[Tensor]) -> Tensor:
    """Blocks of different size one below the other, none of them empty."""
    deepest = max(blocks, key=lambda block: block.ndim)
    blocks = [block if block.ndim == deepest.ndim else deepest.new_full((1, 1, 1), -1) for block in blocks]
    if all(block.shape == deepest.shape for block in blocks) and deepest.numel():
        return torch.cat(blocks)
    wide = [max(1, *(block.shape[at] for block in blocks)) for at in range(1, deepest.ndim)]
    kind = next((block.dtype for block in blocks if block.is_floating_point()), torch.long)
    return torch.cat([widened(block.to(kind), wide) for block in blocks])


def _lines(params: Mapping[str, Any], count: int) -> dict[str, Tensor | Objects]:
    """Parameters repeated for so many lines."""
    one = table([{name: value for name, value in params.items() if value is not None}])
    return {
        name: value.expand(count, *value.shape[1:]) if isinstance(value, Tensor) else np.repeat(value, count)
        for name, value in one.items()
    }
