"""The ports: the only things the loop knows of models, caches, strategies, drafters and processors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from descant.core.context import Context
from descant.core.records import DraftContext, ForwardOutput, Hypothesis, Observation, Proposal, Selection
from descant.core.rows import Rows

Array = np.ndarray[Any, np.dtype[Any]]  # on the host

__all__ = [
    "Array",
    "Drafter",
    "KVCache",
    "KVSpan",
    "Model",
    "ModelTraits",
    "NoiseSource",
    "Processor",
    "RankGroup",
    "RowCache",
    "StateCache",
    "StepObserver",
    "StopCondition",
    "Strategy",
    "VisibleSlots",
    "Wrapper",
]


@dataclass(frozen=True)
class ModelTraits:
    """The traits of a model that decide how it is fed."""

    is_encoder_decoder: bool
    supports_position_ids: bool  # takes `position_ids`, so rows of different length can share a forward
    supports_logits_to_keep: bool  # takes `logits_to_keep`
    supports_inputs_embeds: bool  # takes `inputs_embeds`
    vocab_size: int  # how many logits it gives
    num_layers: int  # of the decoder
    attn_implementation: str  # "sdpa", "eager", ...
    sliding_windows: dict[str, int | None]  # kind of layer -> how far back it sees; None: everything
    max_positions: int | None  # how many positions a learned table holds; None: no such limit
    context_length: int | None  # the length it was made for
    embedding_size: int | None = None  # of its embeddings
    cache_type: str = "kv"  # what it remembers: "kv" and values, a state of its "recurrent", or "none"
    layer_types: tuple[str, ...] = ()  # the kind of each layer, where they are of several
    cache_argument: str = "past_key_values"  # under which name it takes that
    prepares_own_inputs: bool = False  # says by itself what it is fed, so that it has to be asked
    needs_equal_lengths: bool = False  # only rows of equal length can share a forward
    needs_batch_size_one: bool = False  # rows cannot share a forward at all
    has_own_position_ids: bool = False  # counts positions in a way of its own
    needs_position_ids: bool = False  # has to be told positions that it would count otherwise
    has_tied_embeddings: bool = False  # its output embeddings are its input embeddings
    has_lm_head: bool = True  # hidden states can be given to its output embeddings
    main_input_name: str = "input_ids"  # the input that a prompt is, or for an encoder, that it reads
    input_names: frozenset[str] = frozenset()  # names of all its inputs
    placeholder_tokens: Mapping[str, int] = field(
        default_factory=dict
    )  # kind of medium -> the token that stands for it

    @property
    def supports_custom_mask(self) -> bool:
        """Whether it can be shown a mask of our own, so that ragged rows can share a forward."""
        return (
            self.supports_position_ids
            and not self.needs_equal_lengths
            and self.attn_implementation in ("sdpa", "eager")
            and "chunked_attention" not in self.sliding_windows
        )


class KVSpan(NamedTuple):
    """Where one forward writes: which rows, from which slot on, and how far it reads.

    A row's position is its slot. Rows that start level have an `int` for a start and need no scatter.
    """

    rows: Tensor | None  # [N] on the device; None: every row, in order
    start: int | Tensor  # first slot written; [N] on the device where rows are ragged
    width: int  # how many slots are written
    read_length: int  # how many slots are read
    host_rows: Tensor | None = None  # [N] the rows on the host, where they are not all in order
    host_starts: Tensor | None = None  # [N] the starts on the host, where they differ
    num_committed: Tensor | None = (
        None  # [N] (host) how many of the written slots are no guesses; None: not told
    )

    def on_host(self, rows: int) -> tuple[Array, Array]:
        """The rows, of so many in all, and where each starts [N], without waiting for a device if told."""
        where: Array = np.arange(rows)
        if self.rows is not None:
            where = (self.rows.cpu() if self.host_rows is None else self.host_rows).numpy()
        if isinstance(self.start, int):
            return where, np.full(len(where), self.start)
        return where, (self.start.cpu() if self.host_starts is None else self.host_starts).numpy()

    @property
    def is_first_write(self) -> bool:
        """Whether nothing lies before what is written, so that the new keys are all there is to read."""
        return isinstance(self.start, int) and self.start == 0


class VisibleSlots(NamedTuple):
    """What a layer of a cache shows of its rows in a forward: the slots they hold, then those written.

    Query `j` of row `i` sees the slots below `held[i] + j + 1`; what lies behind is stale.
    """

    past_lengths: Tensor  # [N] (host) how many slots each fed row has before the write
    num_slots: int  # how many slots are shown


class RowCache(Protocol):
    """What remembers what rows have read; how it is read and written is between it and the model."""

    @property
    def max_rewind(self) -> int | None:
        """How far below the longest length that it ever had commit may cut a row; None: any length.

        What was written and not yet committed can always be cut.
        """
        ...

    def __len__(self) -> int:
        """How many rows it has."""
        ...

    def commit(self, parents: Tensor | None, lengths: Tensor) -> None:
        """New row `i` is old row `parents[i]` cut to `lengths[i]` (host): reorder, fork, roll back, evict.

        None for parents leaves every row where it is.
        """
        ...

    def extend(self, rows: int) -> None:
        """Append empty rows."""
        ...


class KVCache(RowCache, Protocol):
    """A cache of keys and values, slot by slot."""

    @property
    def lengths(self) -> Tensor:
        """How many positions each row has [R] (host), those that it forgot included."""
        ...

    @property
    def nbytes(self) -> int:
        """What it takes in memory."""
        ...

    def update(self, layer: int, key: Tensor, value: Tensor, span: KVSpan) -> tuple[Tensor, Tensor]:
        """Write [N, H, T, D] at the span; the keys and values [N, H, S, D] that its rows hold then."""
        ...

    def visible_slots(self, layer: int, span: KVSpan) -> VisibleSlots | None:
        """What `update` is about to show of that layer; None: slot `p` is position `p`, up to `span.stop`."""
        ...

    def select(self, rows: Tensor) -> Self:
        """A cache of its own with these rows [N] (host), as last committed; this one stays as it is."""
        ...

    def join(self, other: Self) -> None:
        """Take the rows of another one of the same kind below its own; the other is used up."""
        ...

    def to(self, device: torch.device | str) -> None:
        """Move everything it holds."""
        ...

    def state(self) -> dict[str, Tensor]:
        """All that it holds, as last committed, by name; none of it shares memory."""
        ...

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take what `state` gave, into a cache that is made alike and holds nothing."""
        ...


class StateCache(RowCache, Protocol):
    """A cache of whatever a model keeps by itself."""

    def row_batches(self) -> list[Tensor]:
        """The rows that have a state, in as few parts as can share a forward (host)."""
        ...

    def read_state(self, rows: Tensor) -> Any:
        """The state of those rows (host), a line each, in that order; it may be written to."""
        ...

    def write_state(self, rows: Tensor, state: Any) -> None:
        """Hold the state of those rows (host) after a forward."""
        ...


class Model(Protocol):
    """What predicts: a network with its inputs per request, or a wrapper that changes its distribution."""

    traits: ModelTraits

    @property
    def device(self) -> torch.device:
        """Where it takes its inputs."""
        ...

    def add_requests(self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]]) -> None:
        """Take what new requests give besides decoder tokens, one entry each: encoder inputs, embeddings."""
        ...

    def remove_requests(self, requests: Sequence[int]) -> None:
        """Forget those requests."""
        ...

    def set_output_states(self, states: Sequence[str]) -> None:
        """Bring these states along from the next forward on: "hidden_states", "attentions"."""
        ...

    def forward(self, rows: Rows, proposal: Proposal, cache: RowCache) -> ForwardOutput:
        """Feed each row's pending tokens and drafts."""
        ...


class Wrapper(Model, Protocol):
    """A model over another that changes the distribution of the rows that ask for it, and of no others."""

    inner: Model
    row_flag: str  # the parameter of the rows that ask for it, where a recipe made it

    def wrap_cache(self, cache: RowCache) -> RowCache:
        """The cache that it needs, given the one of the model inside."""
        ...


class Strategy(Protocol):
    """What chooses: which rows go on, with which tokens."""

    needs_log_probs: bool  # processors see log-probabilities, not logits
    columns: Mapping[str, Any]  # the state it keeps per row: what a new row starts with, [1, ...] or a Column

    def propose(self, rows: Rows, aid: DraftContext) -> Proposal:
        """What to feed."""
        ...

    def select(self, rows: Rows, proposal: Proposal, output: ForwardOutput) -> Selection:
        """What to keep; `output.logits` are processed."""
        ...

    def finish(self, request: int) -> list[Hypothesis]:
        """The sequences of a request that has ended, best first; it is forgotten."""
        ...

    def drop(self, request: int) -> None:
        """Forget a request that was cancelled or failed."""
        ...

    def finished_so_far(self, request: int) -> list[Hypothesis]:
        """The sequences of a running request that have ended and may be returned."""
        ...


class Drafter(Protocol):
    """What guesses ahead. It may own rows and a cache; a wrong guess costs time and nothing else."""

    is_model_free: bool  # whether a guess costs next to nothing: no network is asked

    def add_requests(self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]]) -> None:
        """Take what new requests give besides decoder tokens, one entry each."""
        ...

    def remove_requests(self, requests: Sequence[int]) -> None:
        """Forget requests that have ended."""
        ...

    def commit(self, parents: Tensor, lengths: Tensor) -> None:
        """Follow the rows: row `i` is what `parents[i]` was at the last draft, -1 if it was not there (host).

        It has `lengths[i]` tokens now, and all but the last are as they were tried, where any were.
        """
        ...

    def draft(self, rows: Rows, most: Tensor, aid: DraftContext) -> Proposal:
        """Tokens that may follow each row, at most so many [R] (host)."""
        ...


class Processor(Protocol):
    """What reshapes logits; pure, its state lives in the table."""

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """New scores [N, V] for the lines of `context`."""
        ...


class StatefulProcessor(Processor, Protocol):
    """A processor whose answer depends on more of a row's past than its tokens."""

    @property
    def state(self) -> Mapping[str, float]:
        """The columns it keeps, with what a new row starts with; where there are none it has no state."""
        ...

    def advance(self, context: Context, before: Tensor, after: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        """The state of each line [N] after its token [N], of what was given and made of it [N, V]."""
        ...


class StepObserver(Protocol):
    """What keeps a record of the rows' choices in columns of its own."""

    def observe(self, seen: Observation, proposal: Proposal, selection: Selection) -> Selection:
        """The selection with its columns brought up to the choice."""
        ...


class NoiseSource(Protocol):
    """What chance draws from: exponential variables, one for every candidate of every row."""

    def draw(self, rows: Rows, size: int) -> Tensor:
        """One line of `size` variables for each row [R, size], on the rows' device."""
        ...


class RankGroup(Protocol):
    """Other processes that decode the same table, each with a part of the model: all must choose alike."""

    def broadcast(self, mine: Tensor) -> Tensor:
        """What the first of them holds: integers, of the same shape in all."""
        ...

    def any_rank(self, mine: bool) -> bool:
        """Whether it is so in any of them."""
        ...

    def check_equal(self, name: str, mine: object, digest: int) -> None:
        """Raise in all of them where what `name` names differs, as told by its digest."""
        ...

    def raise_if_failed(self) -> None:
        """Raise if any of them has failed."""
        ...

    def abort(self) -> None:
        """Tell the others that this one goes no further."""
        ...


class StopCondition(Protocol):
    """What ends a row."""

    def finish_reasons(
        self, rows: Rows, parents: Tensor | None, tokens: Tensor
    ) -> Sequence[tuple[str, Array]]:
        """Reasons that end somebody, and which candidates [N]: `tokens[i]` after row `parents[i]` (host)."""
        ...

    def first_stop(self, rows: Rows, run: Tensor, count: Array) -> tuple[Array, list[str | None]]:
        """How many of each row's next tokens `run[i, :count[i]]` (host) stand until one ends it, and why."""
        ...
