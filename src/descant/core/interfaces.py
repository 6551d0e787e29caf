"""The interfaces of the engine: models, caches, strategies, drafters, processors, stop conditions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from descant.core.context import Processor, StatefulProcessor, StateValue
from descant.core.records import ForwardOutput, Hypothesis, Observation, Proposal, Selection
from descant.core.rows import Rows

__all__ = [
    "Array",
    "DraftContext",
    "DraftLimitingCache",
    "Drafter",
    "KVCache",
    "KVSpan",
    "Model",
    "ModelTraits",
    "MultiCache",
    "NoiseSource",
    "PackingModel",
    "Processor",
    "PromptChunk",
    "RankGroup",
    "ReadableCache",
    "RowCache",
    "SelectableCache",
    "StateCache",
    "StateValue",
    "StatefulProcessor",
    "StepObserver",
    "StopCondition",
    "Strategy",
    "StrategyDefaults",
    "StrategyTraits",
    "TransactionalCache",
    "VisibleSlots",
    "Wrapper",
]


Array = np.ndarray[Any, np.dtype[Any]]  # on the host


class KVSpan(NamedTuple):
    """Where one forward writes: which rows, from which slot on, and how many slots it reads.

    A row's position is its slot. Rows of equal length share an `int` start and need no scatter.
    """

    rows: Tensor | None  # [N] on the device; None: every row, in order
    start: int | Tensor  # first slot written; [N] on the device for ragged rows
    width: int  # number of slots written
    read_length: int  # number of slots read
    host_rows: Tensor | None = None  # [N] `rows` on the host, where they are not all rows in order
    host_starts: Tensor | None = None  # [N] `start` on the host, where starts differ
    num_committed: Tensor | None = None  # [N] (host) written slots that are no drafts; None: unknown

    def on_host(self, rows: int) -> tuple[Array, Array]:
        """The rows, out of `rows` in all, and their starts [N]; no device sync if both are on the host."""
        index: Array = np.arange(rows)
        if self.rows is not None:
            index = (self.rows.cpu() if self.host_rows is None else self.host_rows).numpy()
        if isinstance(self.start, int):
            return index, np.full(len(index), self.start)
        return index, (self.start.cpu() if self.host_starts is None else self.host_starts).numpy()

    @property
    def is_first_write(self) -> bool:
        """Whether nothing lies before the written slots, so that attention reads only the new keys."""
        return isinstance(self.start, int) and self.start == 0


class VisibleSlots(NamedTuple):
    """The slots of a layer that a forward sees: those the rows hold, then those it writes.

    Query `j` of row `i` sees the slots below `past_lengths[i] + j + 1`; slots behind that are stale.
    """

    past_lengths: Tensor  # [N] (host) slots of each fed row before the write
    num_slots: int  # number of slots shown


class RowCache(Protocol):
    """A cache with one entry per row; how it is read and written is between it and the model."""

    @property
    def max_rewind(self) -> int | None:
        """The number of positions below its longest length to which `commit` may cut a row; None: any length.

        Slots written since the last commit can always be cut.
        """
        ...

    @property
    def capacity(self) -> int | None:
        """The most positions a row can have; None: no limit."""
        ...

    def __len__(self) -> int:
        """The number of rows."""
        ...

    def commit(self, parents: Tensor | None, lengths: Tensor) -> None:
        """Make new row `i` old row `parents[i]` cut to `lengths[i]` (host): reorder, fork, roll back, evict.

        With `parents=None` every row keeps its index.
        """
        ...

    def extend(self, rows: int) -> None:
        """Append empty rows."""
        ...


@runtime_checkable
class SelectableCache(RowCache, Protocol):
    """A cache whose rows can be copied out, and joined to another cache of its type."""

    @property
    def lengths(self) -> Tensor:
        """The number of positions of each row [R] (host), evicted ones included."""
        ...

    def select(self, rows: Tensor) -> Self:
        """A new cache with these rows [N] (host), as last committed; this one is unchanged."""
        ...

    def join(self, other: Self) -> None:
        """Append the rows of another cache of the same type, which must not be used afterwards."""
        ...


@runtime_checkable
class ReadableCache(Protocol):
    """Keys and values that can be read by position, and so copied to a cache of any type."""

    @property
    def max_rewind(self) -> int | None:
        """The number of positions by which a row may be cut; None: any length."""
        ...

    @property
    def exact_reads(self) -> bool:
        """Whether `read` returns keys and values exactly as they were written."""
        ...

    @property
    def lengths(self) -> Tensor:
        """The number of positions of each row [R] (host)."""
        ...

    @property
    def layers(self) -> Sequence[int]:
        """The layers that hold anything."""
        ...

    def read(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values [N, H, S, D] of these rows (host), by position."""
        ...


@runtime_checkable
class KVCache(SelectableCache, ReadableCache, Protocol):
    """A cache of keys and values, slot by slot."""

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        ...

    def update(self, layer: int, key: Tensor, value: Tensor, span: KVSpan) -> tuple[Tensor, Tensor]:
        """Write [N, H, T, D] at the span; return the keys and values [N, H, S, D] of its rows."""
        ...

    def visible_slots(self, layer: int, span: KVSpan) -> VisibleSlots | None:
        """The slots that `update` will show; None: slot `p` is position `p`, up to `span.read_length`."""
        ...

    def to(self, device: torch.device | str) -> None:
        """Move all tensors to a device."""
        ...

    def state(self) -> dict[str, Tensor]:
        """All tensors by name, as last committed; they share no memory with the cache."""
        ...

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state` returned into an empty cache of the same type and settings."""
        ...


@runtime_checkable
class StateCache(SelectableCache, Protocol):
    """A cache of a model's own state objects, such as a recurrent state.

    A state cannot be cut. After a commit that cuts a row, its state may have read less than the row has
    positions: the next forward feeds the others again.
    """

    def state_lengths(self, lengths: Tensor) -> Tensor:
        """The positions that the state of each row has read [R] (host), at most `lengths` [R] (host)."""
        ...

    def row_batches(self, lengths: Tensor | None = None) -> list[Tensor]:
        """The rows that have a state, in as few batches as can share a forward (host).

        `lengths` [R] (host) is how many positions each row has read, -1 for rows that are not fed: longer
        states of fed rows are dropped.
        """
        ...

    def read_state(self, rows: Tensor) -> Any:
        """The state of these rows (host), batched in that order; it must not be written to."""
        ...

    def write_state(self, rows: Tensor, state: Any, lengths: Tensor | None = None) -> None:
        """Store the state of these rows (host) after a forward, which has read `lengths` [N] positions.

        The committed state stays until a commit accepts the new one.
        """
        ...


@runtime_checkable
class TransactionalCache(RowCache, Protocol):
    """A cache whose commit can be prepared, so that several caches commit together or not at all."""

    def prepare_commit(self, parents: Tensor | None, lengths: Tensor) -> Callable[[], None]:
        """A commit for which all memory is allocated; nothing changes until it is called."""
        ...


@runtime_checkable
class DraftLimitingCache(Protocol):
    """A cache that changes stored positions at some commits, so that later drafts of a forward miss it."""

    def max_drafts(self, rows: Tensor, pending: Tensor) -> Tensor:
        """The most drafts of these rows [N] (host) behind `pending` [N] positions that read as one by one."""
        ...


@runtime_checkable
class MultiCache(RowCache, Protocol):
    """The caches of several models that are fed the same rows."""

    @property
    def parts(self) -> Sequence[RowCache]:
        """One cache per model."""
        ...


class DraftContext(NamedTuple):
    """The context that a strategy gives its drafter."""

    # Processed scores [R, V] of logits [R, V] after the group's rows, which may have more tokens by then.
    process: Callable[[Rows, Tensor], Tensor]
    cache: RowCache  # of the table
    row_index: Tensor | None = None  # [R] (host) the group's rows in the table; None: all


@dataclass(eq=False)
class PromptChunk:
    """The next tokens of a prompt, of which no logits are needed."""

    rows: Rows  # their pending tokens are fed
    cache: RowCache  # of these rows, in this order
    is_fed: bool = False


@runtime_checkable
class PackingModel(Protocol):
    """A model whose forwards can feed chunks of prompts beside the rows they are called for."""

    def can_pack(self, cache: RowCache) -> bool:
        """Whether rows of different length in this cache share a forward without padding."""
        ...

    def forward(
        self,
        rows: Rows,
        proposal: Proposal,
        cache: RowCache,
        *,
        chunks: Sequence[PromptChunk] = (),
    ) -> ForwardOutput:
        """Feed each row's pending tokens and drafts, and these chunks if the rows are packed.

        A chunk that was fed says so. If the forward raises, none is.
        """
        ...


@dataclass(frozen=True)
class ModelTraits:
    """The traits of a model that decide how it is fed."""

    is_encoder_decoder: bool
    supports_position_ids: bool  # takes `position_ids`, so rows of different length can share a forward
    supports_logits_to_keep: bool  # takes `logits_to_keep`
    supports_inputs_embeds: bool  # takes `inputs_embeds`
    vocab_size: int  # number of logits
    num_layers: int  # of the decoder
    attn_implementation: str  # "sdpa", "eager", ...
    sliding_windows: dict[str, int | None]  # layer type -> window size; None: full attention
    max_positions: int | None  # size of a learned position table; None: no such limit
    context_length: int | None  # context length it was trained for
    embedding_size: int | None = None  # width of the input embeddings
    cache_type: str = "kv"  # "kv" (keys and values), "recurrent" (a state of its own) or "none"
    layer_types: tuple[str, ...] = ()  # the type of each layer, where there are several
    cache_argument: str = "past_key_values"  # the argument of `forward` that takes the cache
    prepares_own_inputs: bool = False  # overrides `prepare_inputs_for_generation`
    needs_equal_lengths: bool = False  # only rows of equal length can share a forward
    needs_batch_size_one: bool = False  # rows cannot share a forward at all
    continues_by_one: bool = False  # after its first forward a row must be fed one token at a time
    reads_again: bool = True  # reads a text at once as it does token by token
    has_own_position_ids: bool = False  # computes positions in its own way
    needs_position_ids: bool = False  # must be given positions that it would compute differently
    has_tied_embeddings: bool = False  # output embeddings are the input embeddings
    has_lm_head: bool = True  # its output embeddings can be applied to hidden states
    main_input_name: str = "input_ids"  # the input that holds the prompt, or the encoder's input
    input_names: frozenset[str] = frozenset()  # names of all arguments of `forward`
    # Inputs whose values belong to positions: they are fed again, and after a cached prefix.
    positioned_inputs: frozenset[str] = frozenset()
    placeholder_tokens: Mapping[str, int] = field(default_factory=dict)  # modality -> placeholder token
    needs_own_cache: bool = False  # works only on what its `new_cache` returns
    ties_requests: bool = False  # some requests share a row of its network, and must run together
    has_aligned_inputs: bool = False  # every fed token has another input beside it
    input_vocab_size: int | None = None  # ids that a prompt may hold; None: those of `vocab_size`
    unused_inputs: frozenset[str] = frozenset()  # inputs that are accepted and have no effect
    config_inputs: frozenset[str] = frozenset()  # inputs that a generation config may hold

    @cached_property
    def num_prompt_ids(self) -> int:
        """The number of ids that a prompt may hold; placeholders of media may be beyond the vocabulary."""
        return max(
            self.vocab_size,
            self.input_vocab_size or 0,
            *(token + 1 for token in self.placeholder_tokens.values()),
        )

    @cached_property
    def supports_custom_mask(self) -> bool:
        """Whether it accepts a custom attention mask, so that ragged rows can share a forward."""
        return (
            self.supports_position_ids
            and not self.needs_equal_lengths
            and self.attn_implementation in ("sdpa", "eager")
            and "chunked_attention" not in self.sliding_windows
        )


@dataclass(frozen=True)
class StrategyTraits:
    """The traits of a strategy that decide what it can be combined with.

    A strategy class declares them as `traits`. The defaults are those of plain sampling.
    """

    forks: bool = False  # a prompt becomes several rows, also with one returned sequence
    max_rewind: int | None = 0  # committed tokens that a row may take back at once; None: any number
    needs_prompt_states: bool = False  # reads hidden states of the whole prompt: no part may be skipped
    feeds_rejected_tokens: bool = False  # tokens are fed that may not become part of the sequence


class RankGroup(Protocol):
    """The processes that decode the same table, each with a part of the model; all must choose alike."""

    def broadcast(self, values: Tensor) -> Tensor:
        """The first rank's integers; all ranks pass the same shape."""
        ...

    def any_rank(self, value: bool) -> bool:
        """Whether it is true on any rank."""
        ...

    def check_equal(self, name: str, value: object, digest: int) -> None:
        """Raise on all ranks if the digest of the value called `name` differs between them."""
        ...

    def raise_if_failed(self) -> None:
        """Raise if any rank has failed."""
        ...

    def abort(self) -> None:
        """Tell the other ranks that this one stops."""
        ...


class Model(Protocol):
    """Predicts the next token: a network with its inputs per request, or a wrapper around a model."""

    @property
    def traits(self) -> ModelTraits:
        """The traits that decide how it is fed."""
        ...

    @property
    def device(self) -> torch.device:
        """The device of its inputs."""
        ...

    @property
    def network(self) -> Any:
        """The torch module, for what only it can tell; None: there is none, or there are several."""
        ...

    @property
    def rank_group(self) -> RankGroup | None:
        """The processes that share it; None: there is one."""
        ...

    def new_cache(self) -> RowCache:
        """An empty cache of the type it works on by default."""
        ...

    def add_requests(self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]]) -> None:
        """Register requests with their inputs besides decoder tokens, one entry each."""
        ...

    def remove_requests(self, requests: Sequence[int]) -> None:
        """Drop the inputs of these requests."""
        ...

    def set_output_states(self, states: Sequence[str]) -> None:
        """Return these states from the next forward on: "hidden_states", "attentions"."""
        ...

    def forward(self, rows: Rows, proposal: Proposal, cache: RowCache) -> ForwardOutput:
        """Feed each row's pending tokens and drafts."""
        ...


class Wrapper(Model, Protocol):
    """A model around another that changes the distribution of the rows that enable it, and of no others."""

    inner: Model
    row_flag: str  # the parameter of the rows that enable it, for one made by a recipe

    @property
    def required_states(self) -> Sequence[str]:
        """States that it needs of each forward: "hidden_states", "attentions"."""
        ...

    def wrap_cache(self, cache: RowCache) -> RowCache:
        """The cache that it needs around the inner model's."""
        ...


class Drafter(Protocol):
    """Proposes draft tokens. It may own rows and a cache; a wrong draft costs time, never correctness."""

    is_model_free: bool  # drafting runs no network, so that its cost is negligible

    def add_requests(self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]]) -> None:
        """Register requests with their inputs besides decoder tokens, one entry each."""
        ...

    def remove_requests(self, requests: Sequence[int]) -> None:
        """Drop requests that have ended."""
        ...

    def commit(self, parents: Tensor, lengths: Tensor) -> None:
        """Follow the rows: row `i` was row `parents[i]` at the last draft, -1 if it was absent (host).

        It now has `lengths[i]` tokens; all but the last are as drafted, where any were.
        """
        ...

    def draft(self, rows: Rows, max_drafts: Tensor, context: DraftContext) -> Proposal:
        """Draft tokens for each row, at most `max_drafts` [R] (host)."""
        ...


class Strategy(Protocol):
    """Chooses which rows continue, and with which tokens."""

    needs_log_probs: bool  # processors get log-probabilities instead of logits
    columns: Mapping[str, Any]  # its state per row: the value of a new row, a tensor [1, ...] or a Column

    @property
    def traits(self) -> StrategyTraits:
        """The traits that decide its combinations."""
        ...

    @property
    def required_states(self) -> Sequence[str]:
        """States that it needs of each forward: "hidden_states", "attentions"."""
        ...

    @property
    def drafter(self) -> Drafter | None:
        """The drafter of its tokens; None: there is none."""
        ...

    @property
    def has_groups(self) -> bool:
        """Whether it runs the processors itself, group by group, with `ForwardOutput.process_rows`."""
        ...

    def propose(self, rows: Rows, context: DraftContext) -> Proposal:
        """The rows and drafts to feed."""
        ...

    def select(self, rows: Rows, proposal: Proposal, output: ForwardOutput) -> Selection:
        """The rows and tokens to keep; `output.logits` are processed."""
        ...

    def finish(self, request: int) -> list[Hypothesis]:
        """Remove an ended request and return its sequences, best first."""
        ...

    def drop(self, request: int) -> None:
        """Remove a request that was cancelled or failed."""
        ...

    def finished_so_far(self, request: int) -> list[Hypothesis]:
        """The finished sequences of a running request that may still be returned."""
        ...


NO_DRAFTS = Proposal()


class StrategyDefaults:
    """A strategy without drafts, groups, columns of its own and needs beside the logits."""

    traits = StrategyTraits()
    needs_log_probs = False
    required_states: Sequence[str] = ()
    drafter: Drafter | None = None
    has_groups = False
    columns: Mapping[str, Any] = {}
    _rank_group: RankGroup | None = None

    def propose(self, rows: Rows, context: DraftContext) -> Proposal:  # noqa: ARG002
        """No drafts."""
        return NO_DRAFTS

    def _to_host(self, scores: Tensor, tokens: Tensor) -> tuple[Array, Array]:
        """Scores [N, S] and tokens or indices [N, T] on the host, the same on all ranks."""
        group, size = self._rank_group, scores.shape[1]
        if scores.is_cpu and group is None:
            return scores.numpy(), tokens.numpy()
        # One device-to-host copy: scores are bit-cast, as floats cannot hold large indices.
        packed = torch.cat((scores.contiguous().view(torch.int32).long(), tokens), 1)
        host = (packed if group is None else group.broadcast(packed)).cpu()
        return host[:, :size].to(torch.int32).view(torch.float32).numpy(), host[:, size:].numpy()


class StepObserver(Protocol):
    """Records the choices of a step in columns of its own."""

    def observe(self, observation: Observation, proposal: Proposal, selection: Selection) -> Selection:
        """The selection with those columns updated."""
        ...


class NoiseSource(Protocol):
    """Exponential variables for sampling, one for every candidate of every row."""

    def draw(self, rows: Rows, size: int) -> Tensor:
        """`size` variables for each row [R, size], on the rows' device."""
        ...


class StopCondition(Protocol):
    """Decides when a row ends."""

    def finish_reasons(
        self, rows: Rows, parents: Tensor | None, tokens: Tensor
    ) -> Sequence[tuple[str, Array]]:
        """Each reason that ends any candidate, and which [N]: `tokens[i]` after row `parents[i]` (host)."""
        ...

    def first_stop(self, rows: Rows, run: Tensor, count: Array) -> tuple[Array, list[str | None]]:
        """The number of each row's next tokens `run[i, :count[i]]` (host) until one ends it, and why."""
        ...
