"""Declared traits: what the engine must know of a model or a strategy before it runs one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["ModelTraits", "StrategyTraits"]


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
