"""The table of generation parameters: every documented one, declared once, with what it means.

`Parameters` is the storage: only what was given is kept, an absent field reads as its default.
`LATER` lists the fields whose method is not built yet; it must shrink to nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import FrozenInstanceError, dataclass
from types import MappingProxyType
from typing import Any, Final, dataclass_transform

from descant.config import fields as kinds
from descant.config.fields import Field, FrozenMap, Unset, declare
from descant.errors import ConfigError

__all__ = ["FIELDS", "GROUPS", "LATER", "Later", "Parameters", "typed", "unknown"]

EMPTY: Final = FrozenMap()

GROUPS: Final = (
    "length", "strategy", "beams", "sampling", "penalties", "tokens", "output", "encoder", "speech",
    "speculation", "watermark", "cache",
)  # fmt: skip

CACHES: Final = (
    "dynamic", "static", "offloaded", "offloaded_static", "sliding_window", "hybrid", "hybrid_chunked",
    "offloaded_hybrid", "offloaded_hybrid_chunked", "mamba", "quantized", "sink", "paged", "snapkv", "h2o",
)  # fmt: skip


class Store:
    """What a config keeps: the given values, where each came from, and what it does not understand."""

    __slots__ = ("__weakref__", "_extra", "_sources", "_unused", "_values")
    _values: dict[str, Any]
    _sources: dict[str, str]
    _extra: FrozenMap
    _unused: FrozenMap


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(declare,))
class Frozen(Store):
    """The base by which type checkers see the declared fields as keyword-only and read-only."""

    __slots__ = ()

    def __init__(self, **given: Any) -> None:
        self._fill(typed(given), {})
        self.__post_init__()

    def __post_init__(self) -> None:
        """What a subclass checks once its values are in place."""

    def _fill(
        self,
        values: dict[str, Any],
        sources: dict[str, str],
        extra: FrozenMap = EMPTY,
        unused: FrozenMap = EMPTY,
    ) -> None:
        object.__setattr__(self, "_values", values)
        object.__setattr__(self, "_sources", sources)
        object.__setattr__(self, "_extra", extra)
        object.__setattr__(self, "_unused", unused)

    def __setattr__(self, name: str, value: Any) -> None:
        raise FrozenInstanceError(f"`{name}` cannot be set, a config is frozen: use replace({name}=...)")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"`{name}` cannot be deleted, a config is frozen")


# fmt: off
class Parameters(Frozen):
    """Every generation parameter, its default and its meaning. Sequences read as tuples."""

    __slots__ = ()

    # -- length
    max_length: int = declare(
        default=20, off=Unset, kind=kinds.integer(1), group="length",
        about="Longest sequence, prompt included; when no length is given at all, 20 new tokens.")
    max_new_tokens: int | None = declare(
        default=None, kind=kinds.integer(1), group="length",
        about="Most tokens to add to the prompt; beats `max_length` of the same or a lower level.")
    min_length: int = declare(
        default=0, kind=kinds.integer(), group="length",
        about="Shortest sequence, prompt included: no end token before it.")
    min_new_tokens: int | None = declare(
        default=None, kind=kinds.integer(), group="length",
        about="Fewest tokens to add before an end token; beats `min_length` of the same or a lower level.")
    max_time: float | None = declare(
        default=None, kind=kinds.real(0.0, open_low=True), group="length",
        about="Seconds after which no further step begins.")
    stop_strings: str | Sequence[str] | None = declare(
        default=None, kind=kinds.strings(), group="length",
        about="Text, or several texts, that end a row once it has produced one of them; needs `tokenizer`.")
    stop_token_ids: Sequence[int] | None = declare(
        default=None, kind=kinds.tokens(empty=True), group="length",
        about="Further tokens that end a row, besides `eos_token_id`.")
    stop_regex: str | None = declare(
        default=None, kind=kinds.pattern(), group="length",
        about="Regular expression that ends a row once its new text matches anywhere; needs `tokenizer`.")

    # -- strategy
    do_sample: bool = declare(
        default=False, kind=kinds.flag(), group="strategy",
        about="Draw the next token at random instead of taking the likeliest.")
    num_beams: int = declare(
        default=1, kind=kinds.integer(1), group="strategy",
        about="Hypotheses kept side by side; 1 is no beam search.")
    penalty_alpha: float | None = declare(
        default=None, kind=kinds.real(0.0, 1.0), group="strategy",
        about="Weight of the repetition term in contrastive search, against the model's confidence.")
    dola_layers: str | Sequence[int] | None = declare(
        default=None, kind=kinds.layers(), group="strategy",
        about='Early layers that DoLa contrasts with the last: "low", "high", or indices (0: embeddings).')
    guidance_scale: float | None = declare(
        default=None, kind=kinds.real(), group="strategy",
        about="Strength of classifier-free guidance away from the negative prompt; 1 is none.")
    token_healing: bool = declare(
        default=False, kind=kinds.flag(), group="strategy",
        about="Let the model write the end of the prompt again, in tokens that agree with its text; needs "
        "`tokenizer`.")
    banned_phrases: str | Sequence[str] | None = declare(
        default=None, kind=kinds.strings(), group="strategy",
        about="Text, or several texts, never said: a row that completes one is cut back to where it began, "
        "and goes another way; needs `tokenizer`.")
    seed: int | None = declare(
        default=None, kind=kinds.integer(), group="strategy",
        about="Seed of the row's own random stream; unset draws from torch's generator.")
    prefix_allowed_tokens_fn: Callable[[int, Any], Sequence[int]] | None = declare(
        default=None, kind=kinds.function(), group="strategy",
        about="Function of a prompt's number and a row's ids that says which tokens may come next.")
    processor_order: Sequence[str] | None = declare(
        default=None, kind=kinds.names(), group="strategy",
        about='Fields whose processors run in this order, in the places these have among all; "custom": the '
        "caller's own.")
    thinking_budget: int | None = declare(
        default=None, kind=kinds.integer(), group="strategy",
        about="Most tokens of thought, after which `thinking_end` is forced.")
    thinking_start: Sequence[int] | None = declare(
        default=None, kind=kinds.tokens(empty=True), group="strategy",
        about="Tokens that open a thought; unset: the thought begins with the first new token.")
    thinking_end: Sequence[int] | None = declare(
        default=None, kind=kinds.tokens(), group="strategy",
        about="Tokens that close a thought.")

    # -- beams
    early_stopping: bool | str = declare(
        default=False, kind=kinds.stopping(), group="beams",
        about='When a beam search ends: True at `num_beams` finished, False when better is unlikely, "never" '
        "when better is impossible.")
    length_penalty: float = declare(
        default=1.0, off=Unset, kind=kinds.real(-50.0, 50.0), group="beams",
        about="Power of the length that divides a hypothesis' log-probability; above 0 favours long ones.")
    num_beam_groups: int = declare(
        default=1, kind=kinds.integer(1), group="beams",
        about="Groups into which the beams are divided so that they differ from each other.")
    diversity_penalty: float = declare(
        default=0.0, kind=kinds.real(0.0), group="beams",
        about="Taken from a token's score for each earlier group that chose it at the same step.")
    constraints: Sequence[Any] | None = declare(
        default=None, kind=kinds.objects(), group="beams",
        about="Constraint objects that every result of the beam search must fulfil.")
    force_words_ids: Sequence[Any] | None = declare(
        default=None, kind=kinds.words_or_choices(), group="beams",
        about="Words that must occur, as token ids; a list of lists is a word with alternatives.")
    ordered_constraints: bool = declare(
        default=False, kind=kinds.flag(), group="beams",
        about="Whether the constraints must be met in the order given.")
    constraint_gap: int = declare(
        default=0, kind=kinds.integer(), group="beams",
        about="Fewest tokens between the end of one constraint and the beginning of the next.")
    low_memory: bool | None = declare(
        default=None, kind=kinds.flag(), group="beams",
        about="Run beams or candidates one after the other, for less memory.")

    # -- sampling
    temperature: float = declare(
        default=1.0, kind=kinds.scale(zero=True), group="sampling",
        about="Divisor of the logits: below 1 sharper, above 1 flatter.")
    top_k: int = declare(
        default=50, off=0, kind=kinds.integer(), group="sampling",
        about="Keep this many of the likeliest tokens; 0 keeps all.")
    top_p: float = declare(
        default=1.0, kind=kinds.real(0.0, 1.0), group="sampling",
        about="Keep the fewest likeliest tokens whose probabilities reach this sum; 1 keeps all.")
    min_p: float | None = declare(
        default=None, kind=kinds.real(0.0, 1.0), group="sampling",
        about="Keep tokens at least this fraction as likely as the likeliest.")
    top_h: float | None = declare(
        default=None, kind=kinds.real(0.0, 1.0, open_low=True), group="sampling",
        about="Keep the likeliest tokens whose entropy stays within this share of the whole.")
    top_n_sigma: float | None = declare(
        default=None, kind=kinds.real(0.0, open_low=True), group="sampling",
        about="Keep tokens whose logit is at most this many standard deviations below the best.")
    p_less: bool = declare(
        default=False, kind=kinds.flag(), group="sampling",
        about="Keep tokens at least as likely as two independent draws are to agree.")
    typical_p: float = declare(
        default=1.0, kind=kinds.real(0.0, 1.0, open_low=True), group="sampling",
        about="Keep the tokens of most typical information content up to this probability; 1 keeps all.")
    epsilon_cutoff: float = declare(
        default=0.0, kind=kinds.real(0.0, 1.0, open_high=True), group="sampling",
        about="Drop tokens less likely than this; 0 drops none.")
    eta_cutoff: float = declare(
        default=0.0, kind=kinds.real(0.0, 1.0, open_high=True), group="sampling",
        about="Drop tokens less likely than a bound that falls with the entropy; 0 drops none.")
    xtc_probability: float = declare(
        default=0.0, kind=kinds.real(0.0, 1.0), group="sampling",
        about="How often to leave out all but the least likely of the tokens above `xtc_threshold`.")
    xtc_threshold: float = declare(
        default=0.1, off=Unset, kind=kinds.real(0.0, 1.0), group="sampling",
        about="Probability from which on a token counts as a top choice.")
    dynamic_temperature_range: float = declare(
        default=0.0, kind=kinds.real(0.0), group="sampling",
        about="How far the temperature follows the entropy, down and up from `temperature`.")
    dynamic_temperature_exponent: float = declare(
        default=1.0, off=Unset, kind=kinds.scale(), group="sampling",
        about="Power of the relative entropy by which the temperature rises.")
    mirostat_tau: float | None = declare(
        default=None, kind=kinds.real(0.0, open_low=True), group="sampling",
        about="Surprise a token, in bits, that mirostat steers towards.")
    mirostat_eta: float = declare(
        default=0.1, off=Unset, kind=kinds.real(0.0, 1.0), group="sampling",
        about="How fast mirostat corrects its bound.")
    adaptive_p_target: float | None = declare(
        default=None, kind=kinds.real(0.0, 1.0), group="sampling",
        about="Probability of the chosen tokens that adaptive-p steers towards.")
    adaptive_p_decay: float = declare(
        default=0.9, off=Unset, kind=kinds.real(0.0, 0.99), group="sampling",
        about="How long adaptive-p remembers what was chosen.")

    # -- penalties, bans and biases
    repetition_penalty: float = declare(
        default=1.0, kind=kinds.scale(), group="penalties",
        about="Factor against tokens that already occurred; 1 is none, below 1 invites them.")
    no_repeat_ngram_size: int = declare(
        default=0, kind=kinds.integer(), group="penalties",
        about="Length of the n-grams that may occur only once; 0 bans none.")
    no_repeat_ngram_window: int = declare(
        default=0, kind=kinds.integer(), group="penalties",
        about="How many of the last tokens count for `no_repeat_ngram_size`; 0: all.")
    presence_penalty: float = declare(
        default=0.0, kind=kinds.real(-2.0, 2.0), group="penalties",
        about="Taken from the logit of every token that was generated before.")
    frequency_penalty: float = declare(
        default=0.0, kind=kinds.real(-2.0, 2.0), group="penalties",
        about="Taken from the logit of a token each time that it was generated before.")
    dry_multiplier: float = declare(
        default=0.0, kind=kinds.real(0.0), group="penalties",
        about="Weight of the DRY penalty against going on with a repeat; 0 is none.")
    dry_base: float = declare(
        default=1.75, off=Unset, kind=kinds.real(1.0, 100.0), group="penalties",
        about="Factor by which the DRY penalty grows with each token of the repeat.")
    dry_allowed_length: int = declare(
        default=2, off=Unset, kind=kinds.integer(1), group="penalties",
        about="Longest repeat that DRY lets pass.")
    dry_range: int = declare(
        default=0, kind=kinds.integer(), group="penalties",
        about="How many of the last tokens DRY looks at; 0: all.")
    dry_sequence_breakers: Sequence[int | str] | None = declare(
        default=None, kind=kinds.tokens_or_texts(), group="penalties",
        about="Tokens that no repeat runs across: ids, or texts that they contain (needs `tokenizer`).")
    logit_bias: Mapping[int, float] | None = declare(
        default=None, kind=kinds.token_biases(), group="penalties",
        about="What to add to the logits of these tokens.")
    bad_words_ids: Sequence[Sequence[int]] | None = declare(
        default=None, kind=kinds.words(), group="penalties",
        about="Token sequences that must not be produced.")
    sequence_bias: Mapping[tuple[int, ...], float] | None = declare(
        default=None, kind=kinds.biases(), group="penalties",
        about="What to add to the logit of a token that would complete each of these sequences.")
    exponential_decay_length_penalty: tuple[int, float] | None = declare(
        default=None, kind=kinds.decay(), group="penalties",
        about="From this many new tokens on, raise the end token's score by a growing power of the factor.")
    suppress_tokens: Sequence[int] | None = declare(
        default=None, kind=kinds.tokens(empty=True), group="penalties",
        about="Tokens that are never produced.")
    begin_suppress_tokens: Sequence[int] | None = declare(
        default=None, kind=kinds.tokens(empty=True), group="penalties",
        about="Tokens that are not produced first.")
    renormalize_logits: bool = declare(
        default=False, kind=kinds.flag(), group="penalties",
        about="Apply a log-softmax after all processors.")
    remove_invalid_values: bool = declare(
        default=False, kind=kinds.flag(), group="penalties",
        about="Replace NaN and infinite logits by finite ones before choosing.")

    # -- special tokens
    pad_token_id: int | None = declare(
        default=None, kind=kinds.token(), group="tokens",
        about="Token that fills the results up to one length.")
    bos_token_id: int | None = declare(
        default=None, kind=kinds.token(), group="tokens",
        about="Token that begins a sequence when there is no prompt.")
    eos_token_id: int | Sequence[int] | None = declare(
        default=None, kind=kinds.token_or_tokens(), group="tokens",
        about="Token, or tokens, that end a row.")
    forced_bos_token_id: int | None = declare(
        default=None, kind=kinds.token(), group="tokens",
        about="Token that must come first, after the start token.")
    forced_eos_token_id: int | Sequence[int] | None = declare(
        default=None, kind=kinds.token_or_tokens(), group="tokens",
        about="Token, or tokens, one of which must come last when the length limit is reached.")
    forced_decoder_ids: Sequence[Sequence[int | None]] | None = declare(
        default=None, kind=kinds.forced(), group="tokens",
        about="Pairs of position and token that are forced before choosing begins.")

    # -- output
    num_return_sequences: int = declare(
        default=1, kind=kinds.integer(1), group="output",
        about="Results for each prompt.")
    return_dict_in_generate: bool = declare(
        default=False, kind=kinds.flag(), group="output",
        about="Return an output object instead of the token tensor alone.")
    output_scores: bool = declare(
        default=False, kind=kinds.flag(), group="output",
        about="Also return each step's scores after the processors.")
    output_logits: bool | None = declare(
        default=None, kind=kinds.flag(), group="output",
        about="Also return each step's logits as the model gave them.")
    logprobs: int | None = declare(
        default=None, kind=kinds.integer(), group="output",
        about="Also return each token's log-probability before and after the processors, and this many of "
        "the likeliest tokens at its place.")
    output_attentions: bool = declare(
        default=False, kind=kinds.flag(), group="output",
        about="Also return the attention weights of every layer.")
    output_hidden_states: bool = declare(
        default=False, kind=kinds.flag(), group="output",
        about="Also return the hidden states of every layer.")

    # -- encoder-decoder
    decoder_start_token_id: int | Sequence[int] | None = declare(
        default=None, kind=kinds.token_or_tokens(), group="encoder",
        about="First token of the decoder, or one for each row; else the begin token.")
    encoder_no_repeat_ngram_size: int = declare(
        default=0, kind=kinds.integer(), group="encoder",
        about="Length of the n-grams of the encoder's input that must not occur in the output; 0 bans none.")
    encoder_repetition_penalty: float = declare(
        default=1.0, kind=kinds.scale(), group="encoder",
        about="Factor in favour of tokens of the encoder's input; 1 is none.")

    # -- speech
    return_timestamps: bool = declare(
        default=False, kind=kinds.flag(), group="speech",
        about="Keep to the rules of timestamp tokens, in pairs and ascending.")
    no_timestamps_token_id: int | None = declare(
        default=None, kind=kinds.token(), group="speech",
        about="Token that says there are no timestamps; the timestamps follow it in the vocabulary.")
    max_initial_timestamp_index: int | None = declare(
        default=None, kind=kinds.integer(), group="speech",
        about="Latest first timestamp, counted from the one for zero.")

    # -- speculation
    is_assistant: bool = declare(
        default=False, kind=kinds.flag(), group="speculation",
        about="This config belongs to a draft model.")
    num_assistant_tokens: int = declare(
        default=20, off=Unset, kind=kinds.integer(1), group="speculation",
        about="Tokens that a draft model guesses before the model checks them, at most.")
    num_assistant_tokens_schedule: str = declare(
        default="adaptive", off=Unset,
        kind=kinds.choice("constant", "heuristic", "heuristic_transient", "adaptive"), group="speculation",
        about="How many tokens are guessed: always as many; more after a run that was right and fewer after "
        "another; or up to as many as pay, by what was right and what forwards take.")
    assistant_confidence_threshold: float = declare(
        default=0.4, off=Unset, kind=kinds.real(0.0, 1.0), group="speculation",
        about="The draft model stops guessing when it is less sure than this.")
    prompt_lookup_num_tokens: int | None = declare(
        default=None, kind=kinds.integer(1), group="speculation",
        about="Guess up to this many tokens by copying what followed the same n-gram before.")
    max_matching_ngram_size: int | None = declare(
        default=None, kind=kinds.integer(1), group="speculation",
        about="Longest n-gram that prompt lookup matches; 2 if unset.")
    suffix_lookup_num_tokens: int | None = declare(
        default=None, kind=kinds.integer(1), group="speculation",
        about="Guess up to this many tokens by what followed the longest repeated end of the text.")
    suffix_lookup_shared: bool = declare(
        default=False, kind=kinds.flag(), group="speculation",
        about="Look into what the session has written for earlier requests, too.")
    assistant_early_exit: int | None = declare(
        default=None, kind=kinds.integer(1), group="speculation",
        about="Guess with the model's own first layers, up to this one.")
    assistant_lookbehind: int = declare(
        default=10, off=Unset, kind=kinds.integer(1), group="speculation",
        about="Draft tokens encoded again to align two different tokenizers.")
    target_lookbehind: int = declare(
        default=10, off=Unset, kind=kinds.integer(1), group="speculation",
        about="Target tokens encoded again to align two different tokenizers.")

    # -- watermark
    watermarking_config: Mapping[str, Any] | None = declare(
        default=None, kind=kinds.settings(kinds.Discreet), group="watermark",
        about="Settings of the watermark that the choice of tokens carries: green list, SynthID or Gumbel.")

    # -- cache and speed
    use_cache: bool = declare(
        default=True, off=Unset, kind=kinds.flag(), group="cache",
        about="Keep keys and values between steps instead of computing them again.")
    cache_implementation: str | None = declare(
        default=None, kind=kinds.choice(*CACHES), group="cache",
        about="Name of the cache to use; unset picks the one that suits the model.")
    cache_config: Mapping[str, Any] | None = declare(
        default=None, kind=kinds.settings(), group="cache",
        about="Settings of that cache.")
    return_legacy_cache: bool | None = declare(
        default=None, kind=kinds.flag(), group="cache",
        about="Return the cache as nested tuples.")
    prefill_chunk_size: int | None = declare(
        default=None, kind=kinds.integer(1), group="cache",
        about="Feed the prompt in pieces of this many tokens.")
    compile_config: Mapping[str, Any] | None = declare(
        default=None, kind=kinds.settings(), group="cache",
        about="Settings for compiling the model's forward.")
    disable_compile: bool = declare(
        default=False, kind=kinds.flag(), group="cache",
        about="Never compile the forward.")
    generation_kwargs: Mapping[str, Any] = declare(
        default=FrozenMap(), kind=kinds.settings(), group="cache",
        about="Further arguments for the model's forward.")


# fmt: on
@dataclass(frozen=True, slots=True)
class Later:
    """Why a field is not in this version, and which of its values ask for nothing."""

    reason: str
    neutral: tuple[Any, ...] = (None,)


# fmt: off
LATER: Final[Mapping[str, Later]] = MappingProxyType({
    "forced_decoder_ids": Later("forced decoder tokens", (None, ())),
    "generation_kwargs": Later("arguments passed through to the model", (FrozenMap(),)),
})
# fmt: on


def _collect() -> dict[str, Field]:
    found = {name: field for name, field in vars(Parameters).items() if isinstance(field, Field)}
    for name in LATER:
        found[name].later = True
    return found


FIELDS: Final[Mapping[str, Field]] = MappingProxyType(_collect())


def typed(given: Mapping[str, Any]) -> dict[str, Any]:
    """The kept values of what was written in code, where None switches a field off."""
    values = {}
    for name, value in given.items():
        if name not in FIELDS:
            raise unknown(name, value)
        field = FIELDS[name]
        kept = field.off if value is None else field.parse(value)
        if kept is not Unset:
            values[name] = kept
    return values


def unknown(name: str, value: Any) -> ConfigError:
    """The error for a name that is no parameter, with the one that was probably meant."""
    close = difflib.get_close_matches(name, FIELDS, n=1)
    do = f"did you mean `{close[0]}`?" if close else "leave it out"
    return ConfigError(name, "is not a generation parameter", value, do)
