"""The context of processors: the parameters of every row, and the tokens before each line of logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, Self, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from descant.core.rows import (
    Column,
    Rows,
    concat_padded,
    device_length,
    index_rows,
    new_rows_column,
    pad_right,
)
from descant.tokenization.token_healing import HealedSuffix

ObjectArray = np.ndarray[Any, np.dtype[Any]]  # [R] of Python objects, None where a row has none
ParamValues = Mapping[str, "Tensor | ObjectArray"]
_KNOWN_TYPES = {int: int, bool: int, float: float, list: list}


@dataclass(frozen=True)
class RowParams:
    """The column of parameters: `values[name]` is [R], [R, W] or [R, K, W] (host), equal within a request.

    It holds the parameters that any row uses; a row that does not use one has -1, or None for an object.
    """

    values: ParamValues
    is_per_request: bool = True

    def __getitem__(self, name: str) -> Tensor:
        value = self.values[name]
        assert isinstance(value, Tensor)
        return value

    def __len__(self) -> int:
        return len(next(iter(self.values.values())))

    def take(self, parents: Tensor) -> Self:
        """The parameters of the new rows."""
        return type(self)(_TakenValues(self.values, parents.numpy()))

    def extend(self, rows: int) -> Self:
        """These rows' parameters, followed by rows that use none."""
        return type(self)(_TakenValues(self.values, np.append(np.arange(len(self)), np.full(rows, -1))))

    def cat(self, other: Self) -> Self:
        """These rows' parameters, followed by another table's."""
        first, second = dict(self.values), dict(other.values)
        if first.keys() != second.keys():
            first = {**first, **_missing_values(second, first, len(self))}
            second = {**second, **_missing_values(first, second, len(other))}
        return type(self)({name: _concat_values(value, second[name]) for name, value in first.items()})


class _LazyColumns(Mapping[str, Any]):
    """Columns of a source, each of which a subclass reads on first use: a step reads few of them."""

    def __init__(self, source: Mapping[str, Any], index: Any) -> None:
        self.source, self.index = source, index

    def __contains__(self, name: object) -> bool:
        return name in self.source

    def __iter__(self) -> Iterator[str]:
        return iter(self.source)

    def __len__(self) -> int:
        return len(self.source)


class _TakenValues(_LazyColumns):
    """Parameters of some rows of a table; the index -1 stands for a row that uses no parameter."""

    def __init__(self, source: ParamValues, index: ObjectArray) -> None:
        super().__init__(source, index)
        if isinstance(source, _TakenValues):
            self.source, self.index = source.source, np.where(index < 0, -1, source.index[index])
        self._taken: dict[str, Tensor | ObjectArray] = {}

    def __getitem__(self, name: str) -> Tensor | ObjectArray:
        taken = self._taken.get(name)
        if taken is None:
            value = self.source[name]
            # Numpy: torch takes twice as long to index a short column.
            array = (value.numpy() if isinstance(value, Tensor) else value)[self.index]
            array[self.index < 0] = -1 if isinstance(value, Tensor) else None
            taken = self._taken[name] = torch.from_numpy(array) if isinstance(value, Tensor) else array
        return taken


def row_params(rows: Rows) -> RowParams:
    """The parameters of a table."""
    params = rows.columns["params"]
    assert isinstance(params, RowParams)
    return params


def columns_from_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor | ObjectArray]:
    """The parameters of rows as columns: numbers [R], lists [R, W] or [R, K, W] padded with -1."""
    names = rows[0] if len(rows) == 1 else dict.fromkeys(name for row in rows for name in row)
    columns: dict[str, Tensor | ObjectArray | None] = dict.fromkeys(names)  # in the order of the names
    numbers: dict[type, dict[str, list[Any]]] = {int: {}, float: {}}
    for name in names:
        values = [rows[0][name]] if len(rows) == 1 else [row.get(name) for row in rows]
        # A look at the first value says the type, nearly always.
        kind = _KNOWN_TYPES.get(type(values[0])) or _value_type(values)
        of_kind = numbers.get(kind)
        if of_kind is None:
            columns[name] = _make_column(values)
        else:
            of_kind[name] = [-1 if value is None else value for value in values] if None in values else values
    # One tensor for all numbers of a type, of which each column is a line: calls into torch dominate here.
    for kind, dtype in ((int, torch.long), (float, torch.float64)):
        lines = torch.tensor(list(numbers[kind].values()), dtype=dtype)
        columns.update(zip(numbers[kind], lines.unbind(0), strict=True))
    return cast("dict[str, Tensor | ObjectArray]", columns)


def _concat_values(first: Tensor | ObjectArray, second: Tensor | ObjectArray) -> Tensor | ObjectArray:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return concat_padded(first, second)
    return np.concatenate((first, second))


def _missing_values(source: ParamValues, target: ParamValues, count: int) -> dict[str, Tensor | ObjectArray]:
    """The values of `count` rows for the parameters of `source` that `target` does not have."""
    return {
        name: value.new_full((count, *value.shape[1:]), -1)
        if isinstance(value, Tensor)
        else np.full(count, None)
        for name, value in source.items()
        if name not in target
    }


def _value_type(values: Sequence[Any]) -> type:
    """The type of a parameter: int (also for bools), float, list or object."""
    first = next(value for value in values if value is not None)
    return next((kind for kind in (float, int, list) if isinstance(first, kind)), object)


def _make_column(values: Sequence[Any]) -> Tensor | ObjectArray:
    """The column of a parameter that is no number; None where a row does not use it."""
    first = values[0]
    if first is None:
        first = next(value for value in values if value is not None)
    if isinstance(first, list):
        if len(values) == 1 and set(map(type, first)) <= {int}:
            return torch.tensor([first or [-1]], dtype=torch.long)
        if all(value is first or value == first for value in values):  # most often one config for all
            block = _stack_blocks([_to_block(first)])
            return block.repeat(len(values), *[1] * (block.ndim - 1))
        return _stack_blocks([_to_block(value or []) for value in values])
    objects = np.full(len(values), None)
    for index, value in enumerate(values):  # one by one, since numpy would convert sequences
        objects[index] = value
    return objects


def _to_block(value: list[Any]) -> Tensor:
    """A list of numbers [1, W], or of lists of numbers [1, K, W] padded with -1."""
    if value and isinstance(value[0], list):
        width = max(1, *(len(part) for part in value))
        return torch.tensor([[*part, *[-1] * (width - len(part))] for part in value])[None]
    if any(isinstance(part, float) for part in value):
        return torch.tensor(value, dtype=torch.float64)[None]
    return torch.tensor(value, dtype=torch.long)[None]


def _stack_blocks(blocks: list[Tensor]) -> Tensor:
    """Blocks of different sizes as one column, padded to at least one entry."""
    deepest = max(blocks, key=lambda block: block.ndim)
    blocks = [block if block.ndim == deepest.ndim else deepest.new_full((1, 1, 1), -1) for block in blocks]
    if all(block.shape == deepest.shape for block in blocks) and deepest.numel():
        return torch.cat(blocks)
    sizes = [max(1, *(block.shape[axis] for block in blocks)) for axis in range(1, deepest.ndim)]
    dtype = next((block.dtype for block in blocks if block.is_floating_point()), torch.long)
    return torch.cat([pad_right(block.to(dtype), sizes) for block in blocks])


UINT32_MASK = 0xFFFFFFFF
Words = TypeVar("Words", Tensor, "np.ndarray[Any, np.dtype[np.int64]]")


def murmur_mix(x: Words) -> Words:
    """The 32-bit finaliser of MurmurHash3, in the low half of int64 elements of a tensor or an array."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & UINT32_MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & UINT32_MASK
    return x ^ (x >> 16)


def counter_bits(seed: Tensor, slot: Tensor, position: Tensor) -> Tensor:
    """32 bits for each (seed, slot, position) [R], all on the host."""
    # On short columns torch takes several times as long as numpy, whose scalars would warn of the overflow.
    seeds, slots, positions = (np.atleast_1d(part.numpy()) for part in (seed, slot, position))
    key = murmur_mix((seeds & UINT32_MASK) ^ murmur_mix(((seeds >> 32) + 0x9E3779B9) & UINT32_MASK))
    key = murmur_mix(key ^ murmur_mix((slots + 0x7F4A7C15) & UINT32_MASK))
    return torch.from_numpy(murmur_mix(key ^ murmur_mix((positions + 0x94D049BB) & UINT32_MASK)))


def uniform(seed: Tensor, slot: Tensor, position: Tensor, salt: int) -> Tensor:
    """A number in the open interval (0, 1) for each (seed, slot, position, salt) [R], on the host."""
    bits = (counter_bits(seed, slot, position) + salt * 0x9E3779B1) & UINT32_MASK
    bits = murmur_mix(murmur_mix(bits) ^ 0x6A09E667)
    return (bits.to(torch.float64) + 0.5) * 2.0**-32


@dataclass(frozen=True)
class PromptInfo:
    """Facts of a prompt on which the parameters of a row may depend."""

    length: int  # tokens, a healed suffix included
    offset: int = 0  # positions without a token
    padded_width: int = 0  # width of the padded prompts of its call
    prompt_index: int = 0  # index of the prompt in its call
    source_ids: Callable[[], list[int]] = list  # ids of the encoder's input; without an encoder, the prompt's
    healed_suffix: HealedSuffix | None = None  # the tokens that token healing has removed
    padding: int = 0  # positions of padding that count as prompt in `max_length` and `min_length`
    max_length: int | None = None  # positions that its other inputs have room for; None: no limit


class _SelectedLines(_LazyColumns):
    """Some lines of columns, by an index tensor."""

    def __getitem__(self, name: str) -> Any:
        value = self.source[name]
        if isinstance(value, Tensor):
            return index_rows(value, self.index)
        return value[self.index.numpy()] if isinstance(value, np.ndarray) else value.take(self.index)


class Context:
    """The tokens before each line of logits: line `i` follows `tokens[i, :length[i]]`.

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
        self._rows: Rows | None = None  # whose lines these are, one each; None: they are lines of their own
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
        params: Any = rows.columns["params"]
        if drafts is None:
            known = rows.tokens, rows.length, rows.prompt_length
            context = cls(*known, params.values, cache, slot=rows.slot, states=rows.columns)
            context._rows = rows
            return context
        width = drafts.shape[1]
        tokens = rows.append(drafts, rows.length).tokens.repeat_interleave(width + 1, 0)
        row = torch.arange(len(rows)).repeat_interleave(width + 1)
        length = (rows.length[:, None] + torch.arange(width + 1)).flatten()
        values, states = _SelectedLines(params.values, row), _SelectedLines(rows.columns, row)
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
        values = {**self._params, **_repeat_params(params, len(self._length))}
        known = self._tokens, self._length, self._prompt
        return Context(*known, values, slot=self._slot, states=self._states)

    def with_states(self, states: Mapping[str, Tensor | Column]) -> Context:
        """The same lines with these states of [N] lines."""
        known = self._tokens, self._length, self._prompt, self._params, self._device_params
        context = Context(*known, slot=self._slot, states=states)
        context._rows = self._rows
        return context

    @property
    def tokens(self) -> Tensor:
        """The tokens that each line follows, right padded [N, L]."""
        return self._tokens[:, : int(self._length.max())]

    @cached_property
    def length(self) -> Tensor:
        """The number of tokens that each line follows [N, 1]."""
        if self._rows is not None:  # without a copy in most steps
            return device_length(self._rows)[:, None]
        return self._length.to(self._tokens.device, non_blocking=True)[:, None]

    @cached_property
    def generated(self) -> Tensor:
        """The number of new tokens, without the prompt [N, 1]."""
        if self._tokens.is_cpu:
            return (self._length - self._prompt)[:, None]
        name = "length of the prompt"  # no parameter has this name
        if name not in self._device_params:
            self._device_params[name] = self._prompt.to(self._tokens.device, non_blocking=True)[:, None]
        return self.length - self._device_params[name]

    @cached_property
    def generated_on_host(self) -> list[int]:
        """The same on the host."""
        return [int(count) for count in (self._length - self._prompt).tolist()]

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

    def has_param(self, name: str) -> bool:
        """Whether any row of the table has a parameter."""
        return name in self._params

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
        """The number of different widths of the lines as left-padded ids."""
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
            _SelectedLines(self._params, index),
            cache,
            slot=self._slot[index],
            states=_SelectedLines(self._states, index),
        )


def _repeat_params(params: Mapping[str, Any], count: int) -> dict[str, Tensor | ObjectArray]:
    """Parameters repeated for `count` lines."""
    column = columns_from_rows([{name: value for name, value in params.items() if value is not None}])
    return {
        name: value.expand(count, *value.shape[1:]) if isinstance(value, Tensor) else np.repeat(value, count)
        for name, value in column.items()
    }


# The initial value of a state column: a number, a tensor [1, ...] or a Column of one row.
StateValue = float | Tensor | Column


class Processor(Protocol):
    """Changes logits. It is pure: its state, if any, lives in columns of the table."""

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """New scores [N, V] for the lines of `context`."""
        ...


class StatefulProcessor(Processor, Protocol):
    """A processor that depends on more of a row's past than its tokens."""

    @property
    def state(self) -> Mapping[str, StateValue]:
        """Its columns by name, each with the value of a new row; empty: it has no state."""
        ...

    def advance(
        self, context: Context, before: Tensor, after: Tensor, tokens: Tensor
    ) -> Mapping[str, Tensor | Column]:
        """The state of each line [N] after its token [N], given its scores before and after [N, V]."""
        ...


class BatchPart(NamedTuple):
    """Some lines of a context, as user code is shown them in one call."""

    lines: Tensor | None  # [N] (host) which lines; None: all
    input_ids: Tensor  # [M, W] padded on the left; rows that have ended are padded on the right
    row_of_line: Tensor | None = None  # [N] (host) the shown row of each line; None: line `i` is row `i`
    line_of_row: Tensor | None = None  # [M] (host) the line that a shown row repeats, -1 if it has ended

    def expand(self, values: Tensor) -> Tensor:
        """Values [N, ...] of the lines as those of the shown rows [M, ...]; 0 for rows that have ended."""
        if self.line_of_row is None:
            return values.clone()
        has_ended = (self.line_of_row < 0).to(values.device)
        shown = index_rows(values, self.line_of_row.clamp(min=0))
        return shown.masked_fill_(has_ended.view(-1, *[1] * (values.ndim - 1)), 0)

    def select(self, values: Tensor) -> Tensor:
        """Values [M, ...] of the shown rows as those of the lines [N, ...]."""
        return values if self.row_of_line is None else index_rows(values, self.row_of_line)


class CallBatches:
    """Arranges the running rows of each call as the batch that the call began with.

    A row of a call has one index from the first step on. When it ends, it stays in what is shown, with its
    final tokens and then the pad token, as in transformers. A prompt with several sequences is shown as that
    many rows from the first step on. Rows that are not part of such a batch, those of beam search and of
    drafts among them, are shown as they are, in groups of equal width.
    """

    def __init__(self) -> None:
        self._ended: dict[int, dict[int, Tensor]] = {}  # by batch and row: the final ids [L]

    def record_finished(self, rows: Rows, emitted: Any) -> None:
        """Keep the final ids of the rows that the tokens of a step (`Tokens`) end."""
        params: Mapping[str, Any] = row_params(rows).values
        if not emitted.finished or "batch_size" not in params:
            return
        for index, hypothesis in emitted.finished.items():
            fed_row = index if emitted.row is None else int(emitted.row[index])
            if int(params["batch_size"][fed_row]) < 2:
                continue
            length = int(rows.prompt_length[fed_row])
            padding = max(0, int(params["padded_width"][fed_row]) - length)
            left = rows.tokens.new_full((padding,), int(params["pad_token_id"][fed_row]))
            ids = (left, rows.tokens[fed_row, :length], hypothesis.tokens.to(rows.tokens.device))
            row = int(params["batch_row"][fed_row]) + int(emitted.slot[index])
            self._ended.setdefault(int(params["batch_id"][fed_row]), {})[row] = torch.cat(ids)

    def split(self, context: Context) -> list[BatchPart]:
        """The lines of a context in parts, each for one call of user code."""
        places = context.batch_places()
        if places is None:
            self._ended.clear()
            return _split_by_width(context, None)
        batch_id, row, size, copies = places
        self._ended = {key: rows for key, rows in self._ended.items() if key in batch_id}
        parts, others = [], np.flatnonzero(size < 2).tolist()
        for key in dict.fromkeys(batch_id[size > 1].tolist()):
            lines = np.flatnonzero((batch_id == key) & (size > 1))
            part = self._arrange(context, lines, (key, row[lines], int(size[lines[0]]), copies[lines]))
            if part is None:
                others += lines.tolist()
            else:
                parts.append(part)
        if others:
            parts += _split_by_width(context, torch.tensor(sorted(others)))
        return parts

    def _arrange(self, context: Context, lines: Any, place: tuple[int, Any, int, Any]) -> BatchPart | None:
        """The lines of one call as its whole batch; None if they are no batch of one width."""
        key, row, size, copies = place
        shown = np.repeat(row, copies) + np.concatenate([np.arange(count) for count in copies])
        part = context if len(lines) == context.num_lines else context.take(torch.from_numpy(lines))
        if len(set(shown.tolist())) < len(shown) or shown.max() >= size or part.num_widths > 1:
            return None
        index = None if part is context else torch.from_numpy(lines)
        ids = part.left_padded()
        if len(shown) == size and (shown == np.arange(size)).all() and len(row) == size:
            return BatchPart(index, ids)
        line_of_row = torch.full((size,), -1)
        line_of_row[torch.from_numpy(shown)] = torch.from_numpy(np.repeat(np.arange(len(row)), copies))
        result = index_rows(ids, line_of_row.clamp(min=0))
        ended = self._ended.get(key, {})
        pad = part.param("pad_token_id")[:1]
        for ended_row in (line_of_row < 0).nonzero().squeeze(1).tolist():
            result[ended_row] = pad[0]
            if ended_row in ended:
                final = ended[ended_row][: result.shape[1]]
                result[ended_row, : len(final)] = final
        return BatchPart(index, result, torch.from_numpy(row.copy()), line_of_row)


def _split_by_width(context: Context, lines: Tensor | None) -> list[BatchPart]:
    """Running rows as they are, in groups of equal width."""
    part = context if lines is None else context.take(lines)
    parts = []
    for group in part.equal_width_groups():
        index = group if lines is None else lines if group is None else lines[group]
        ids = (part if group is None else part.take(group)).left_padded()
        parts.append(BatchPart(index, ids))
    return parts
