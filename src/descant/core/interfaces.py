"""The interfaces of the engine: models, caches, strategies, drafters, processors, stop conditions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from descant.core.cache_interfaces import (
    Array,
    CacheWrapper,
    DraftLimitingCache,
    KVCache,
    KVSpan,
    MultiCache,
    ReadableCache,
    RowCache,
    SelectableCache,
    StateCache,
    TransactionalCache,
    VisibleSlots,
)
from descant.core.context import Processor, StatefulProcessor, StateValue
from descant.core.records import DraftContext, ForwardOutput, Hypothesis, Observation, Proposal, Selection
from descant.core.rows import Rows

__all__ = [
    "Array",
    "CacheWrapper",
    "CheckpointedStrategy",
    "DraftLimitingCache",
    "Drafter",
    "KVCache",
    "KVSpan",
    "Model",
    "ModelTraits",
    "MultiCache",
    "NoiseSource",
    "Processor",
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
    "StrategyTraits",
    "TransactionalCache",
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

    @property
    def num_prompt_ids(self) -> int:
        """The number of ids that a prompt may hold; placeholders of media may be beyond the vocabulary."""
        return max(
            self.vocab_size,
            self.input_vocab_size or 0,
            *(token + 1 for token in self.placeholder_tokens.values()),
        )

    @property
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
        """How it is fed."""
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
        """What it can be combined with."""
        ...

    @property
    def required_states(self) -> Sequence[str]:
        """States that it needs of each forward: "hidden_states", "attentions"."""
        ...

    @property
    def drafter(self) -> Drafter | None:
        """What drafts its tokens."""
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


@runtime_checkable
class CheckpointedStrategy(Protocol):
    """A strategy with state outside its columns, which an aborted step must leave as it was."""

    def checkpoint(self) -> Callable[[], None]:
        """A function that restores the state of now."""
        ...


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
        """How many of each row's next tokens `run[i, :count[i]]` (host) remain until one ends it, and why."""
        ...
