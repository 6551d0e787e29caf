"""The table of generation parameters: each one declared once, with type, default, group and description."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from descant.config import field_types as types
from descant.config.cache_config import CacheConfig, as_cache_config
from descant.config.compile_config import CompileConfig
from descant.config.field_types import MAX_PHRASE_BYTES, MAX_PHRASES, MAX_STOP_TOKENS
from descant.config.fields import FrozenMap, NoOffValue, StoredParameters, field
from descant.config.grammar_spec import grammar_spec
from descant.config.watermarking_config import BaseWatermarkingConfig, as_watermarking_config

DEFAULT_NEW_TOKENS: Final = 20  # when no length is given at any level

# Per-step tensors that generate() can return besides the tokens.
STEP_OUTPUT_FIELDS: Final = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")

GROUPS: Final = (
    "length", "strategy", "beams", "sampling", "penalties", "tokens", "output", "encoder", "speech",
    "speculation", "watermark", "cache",
)  # fmt: skip

CACHE_IMPLEMENTATIONS: Final = (
    "dynamic", "static", "offloaded", "offloaded_static", "sliding_window", "hybrid", "hybrid_chunked",
    "offloaded_hybrid", "offloaded_hybrid_chunked", "mamba", "quantized", "sink", "paged", "snapkv", "h2o",
)  # fmt: skip


# fmt: off
class Parameters(StoredParameters):
    """Every generation parameter, its default and its meaning. Sequences read as tuples."""

    __slots__ = ()

    # -- length
    max_length: int = field(
        default=20, off=NoOffValue, kind=types.integer(1), group="length",
        doc="Maximum length, prompt included; 20 new tokens if no length is given.")
    max_new_tokens: int | None = field(
        default=None, kind=types.integer(1), group="length",
        doc="Maximum number of new tokens; overrides `max_length` of the same or a lower level.")
    min_length: int = field(
        default=0, kind=types.integer(), group="length",
        doc="Minimum length, prompt included; no end token before it.")
    min_new_tokens: int | None = field(
        default=None, kind=types.integer(), group="length",
        doc="Minimum number of new tokens before an end token; overrides `min_length` of the same or a lower "
        "level.")
    max_time: float | None = field(
        default=None, kind=types.real(0.0), group="length",
        doc="Seconds after which no further step starts.")
    stop_strings: str | Sequence[str] | None = field(
        default=None, kind=types.strings(), group="length",
        doc="Text, or several texts, that end a row when generated; at most 256 texts and 4,096 bytes; needs "
        "`tokenizer`.")
    stop_token_ids: Sequence[int] | None = field(
        default=None, kind=types.tokens(empty=True, most=MAX_STOP_TOKENS), group="length",
        doc="Tokens that end a row, in addition to `eos_token_id`; at most 4,096.")
    stop_regex: str | None = field(
        default=None, kind=types.pattern(), group="length",
        doc="Regular expression that ends a row when its new text matches anywhere; needs `tokenizer`.")

    # -- strategy
    do_sample: bool = field(
        default=False, kind=types.flag(), group="strategy",
        doc="Sample the next token instead of taking the most likely.")
    num_beams: int = field(
        default=1, kind=types.integer(1), group="strategy",
        doc="Number of beams; 1 is no beam search.")
    penalty_alpha: float | None = field(
        default=None, kind=types.real(0.0, 1.0), group="strategy",
        doc="Weight of the degeneration penalty in contrastive search, against the model's confidence.")
    dola_layers: str | Sequence[int] | None = field(
        default=None, kind=types.layers(), group="strategy",
        doc='Early layers that DoLa contrasts with the last: "low", "high", or indices (0: embeddings).')
    guidance_scale: float | None = field(
        default=None, kind=types.real(), group="strategy",
        doc="Scale of classifier-free guidance away from the negative prompt; 1 is none.")
    token_healing: bool = field(
        default=False, kind=types.flag(), group="strategy",
        doc="Generate the end of the prompt again, with tokens that agree with its text; needs `tokenizer`.")
    banned_phrases: str | Sequence[str] | None = field(
        default=None, kind=types.strings(MAX_PHRASES, MAX_PHRASE_BYTES), group="strategy",
        doc="Text, or several texts, that must not be generated: a row that completes one backtracks to its "
        "start and continues differently; at most 2,048 texts and 16,384 bytes; needs `tokenizer`.")
    seed: int | None = field(
        default=None, kind=types.integer(), group="strategy",
        doc="Seed of the row's own random stream; drawn from torch's generator if unset.")
    prefix_allowed_tokens_fn: Callable[[int, Any], Sequence[int]] | None = field(
        default=None, kind=types.function(), group="strategy",
        doc="Function of a prompt's index and a row's ids that returns the allowed next tokens.")
    grammar: Mapping[str, Any] | None = field(
        default=None, kind=grammar_spec(), group="strategy",
        doc='What the new text must match: `{"json_schema": ...}`, `{"json": True}`, `{"regex": ...}`, '
        '`{"choice": [...]}`, `{"grammar": ...}` or `{"tools": [...]}`; needs `tokenizer`.')
    processor_order: Sequence[str] | None = field(
        default=None, kind=types.names(), group="strategy",
        doc='Fields whose processors run in this order, at the positions of these fields in the whole order; '
        '"custom": the processors of the call.')
    thinking_budget: int | None = field(
        default=None, kind=types.integer(), group="strategy",
        doc="Maximum number of thinking tokens, after which the thought is closed; needs `tokenizer` unless "
        "`thinking_end` is given.")
    thinking_message: str | None = field(
        default=None, kind=types.text(MAX_PHRASE_BYTES), group="strategy", needs=("thinking_budget",),
        doc="Text that is forced before the end of a thought that has used up its budget; needs `tokenizer`.")
    thinking_start: Sequence[int] | None = field(
        default=None, kind=types.tokens(empty=True), group="strategy", needs=("thinking_budget",),
        doc="Tokens that start thinking; with `thinking_end` alone, it starts with the first new token.")
    thinking_end: Sequence[int] | None = field(
        default=None, kind=types.tokens(), group="strategy", needs=("thinking_budget",),
        doc="Tokens that end thinking; if unset, those of the tokenizer's family.")

    # -- beams
    early_stopping: bool | str = field(
        default=False, kind=types.early_stopping_mode(), group="beams",
        doc='When beam search ends: True at `num_beams` finished hypotheses, False when a better one is '
        'unlikely, "never" when a better one is impossible.')
    length_penalty: float = field(
        default=1.0, off=NoOffValue, kind=types.real(-50.0, 50.0), group="beams",
        doc="Exponent of the length that divides a hypothesis' log-probability; above 0 favours long ones.")
    num_beam_groups: int = field(
        default=1, kind=types.integer(1), group="beams",
        doc="Number of beam groups for diverse beam search.")
    diversity_penalty: float = field(
        default=0.0, kind=types.real(0.0), group="beams", needs=("num_beams", "num_beam_groups"),
        doc="Subtracted from a token's score for each earlier group that selected it at the same step.")
    constraints: Sequence[Any] | None = field(
        default=None, kind=types.constraint_objects(), group="beams",
        doc="Constraint objects that every beam search result must satisfy.")
    force_words_ids: Sequence[Any] | None = field(
        default=None, kind=types.words_or_choices(), group="beams",
        doc="Words that must occur, as token ids; a list of lists is a word with alternatives.")
    ordered_constraints: bool = field(
        default=False, kind=types.flag(), group="beams",
        doc="Satisfy the constraints in the given order.")
    constraint_gap: int = field(
        default=0, kind=types.integer(), group="beams",
        doc="Minimum number of tokens between the end of one constraint and the start of the next.")
    low_memory: bool | None = field(
        default=None, kind=types.flag(), group="beams", needs=(),
        doc="Run beams or candidates sequentially, to save memory.")

    # -- sampling
    temperature: float = field(
        default=1.0, kind=types.positive_real(zero=True), group="sampling",
        doc="Divisor of the logits; below 1 is sharper, above 1 is flatter.")
    top_k: int = field(
        default=50, off=0, kind=types.integer(), group="sampling",
        doc="Keep this many of the most likely tokens; 0 keeps all.")
    top_p: float = field(
        default=1.0, kind=types.real(0.0, 1.0), group="sampling",
        doc="Keep the smallest set of most likely tokens whose probabilities reach this sum; 1 keeps all.")
    min_p: float | None = field(
        default=None, kind=types.real(0.0, 1.0), group="sampling",
        doc="Keep tokens with at least this fraction of the maximum probability.")
    top_h: float | None = field(
        default=None, kind=types.real(0.0, 1.0, open_low=True), group="sampling",
        doc="Keep the most likely tokens whose entropy stays within this share of the total.")
    top_n_sigma: float | None = field(
        default=None, kind=types.real(0.0, open_low=True), group="sampling",
        doc="Keep tokens whose logit is at most this many standard deviations below the maximum.")
    p_less: bool = field(
        default=False, kind=types.flag(), group="sampling",
        doc="Keep tokens at least as likely as the collision probability of two independent draws.")
    typical_p: float = field(
        default=1.0, kind=types.real(0.0, 1.0, open_low=True), group="sampling",
        doc="Keep the tokens of most typical information content up to this total probability; 1 keeps all.")
    epsilon_cutoff: float = field(
        default=0.0, kind=types.real(0.0, 1.0, open_high=True), group="sampling",
        doc="Drop tokens less likely than this; 0 drops none.")
    eta_cutoff: float = field(
        default=0.0, kind=types.real(0.0, 1.0, open_high=True), group="sampling",
        doc="Drop tokens less likely than a bound that falls with the entropy; 0 drops none.")
    xtc_probability: float = field(
        default=0.0, kind=types.real(0.0, 1.0), group="sampling",
        doc="Probability of removing all but the least likely of the tokens above `xtc_threshold`.")
    xtc_threshold: float = field(
        default=0.1, off=NoOffValue, kind=types.real(0.0, 1.0), group="sampling", needs=("xtc_probability",),
        doc="Minimum probability of a top choice for XTC.")
    dynamic_temperature_range: float = field(
        default=0.0, kind=types.real(0.0), group="sampling",
        doc="How far the temperature moves with the entropy, below and above `temperature`.")
    dynamic_temperature_exponent: float = field(
        default=1.0, off=NoOffValue, kind=types.positive_real(), group="sampling",
        needs=("dynamic_temperature_range",),
        doc="Exponent of the relative entropy in the dynamic temperature.")
    mirostat_tau: float | None = field(
        default=None, kind=types.real(0.0, open_low=True), group="sampling",
        doc="Target surprise of mirostat, in bits per token.")
    mirostat_eta: float = field(
        default=0.1, off=NoOffValue, kind=types.real(0.0, 1.0), group="sampling", needs=("mirostat_tau",),
        doc="Learning rate of mirostat.")
    adaptive_p_target: float | None = field(
        default=None, kind=types.real(0.0, 1.0), group="sampling",
        doc="Target probability of the selected tokens for adaptive-p.")
    adaptive_p_decay: float = field(
        default=0.9, off=NoOffValue, kind=types.real(0.0, 0.99), group="sampling",
        needs=("adaptive_p_target",),
        doc="Decay of the running average of adaptive-p.")

    # -- penalties, bans and biases
    repetition_penalty: float = field(
        default=1.0, kind=types.positive_real(), group="penalties",
        doc="Factor against tokens that already occurred; 1 is none, below 1 favours them.")
    no_repeat_ngram_size: int = field(
        default=0, kind=types.integer(), group="penalties",
        doc="Length of the n-grams that may occur only once; 0 bans none.")
    no_repeat_ngram_window: int = field(
        default=0, kind=types.integer(), group="penalties", needs=("no_repeat_ngram_size",),
        doc="Number of last tokens that `no_repeat_ngram_size` looks at; 0 is all.")
    presence_penalty: float = field(
        default=0.0, kind=types.real(-2.0, 2.0), group="penalties",
        doc="Subtracted from the logit of every token that was generated before.")
    frequency_penalty: float = field(
        default=0.0, kind=types.real(-2.0, 2.0), group="penalties",
        doc="Subtracted from the logit of a token for each time that it was generated before.")
    dry_multiplier: float = field(
        default=0.0, kind=types.real(0.0), group="penalties",
        doc="Weight of the DRY penalty against continuing a repeat; 0 is none.")
    dry_base: float = field(
        default=1.75, off=NoOffValue, kind=types.real(1.0, 100.0), group="penalties",
        needs=("dry_multiplier",),
        doc="Factor by which the DRY penalty grows with each token of the repeat.")
    dry_allowed_length: int = field(
        default=2, off=NoOffValue, kind=types.integer(1), group="penalties", needs=("dry_multiplier",),
        doc="Maximum length of a repeat without DRY penalty.")
    dry_range: int = field(
        default=0, kind=types.integer(), group="penalties", needs=("dry_multiplier",),
        doc="Number of last tokens that DRY looks at; 0 is all.")
    dry_sequence_breakers: Sequence[int | str] | None = field(
        default=None, kind=types.tokens_or_texts(), group="penalties", needs=("dry_multiplier",),
        doc="Tokens that end a repeat: ids, or texts that they contain (at most 256; needs `tokenizer`).")
    logit_bias: Mapping[int, float] | None = field(
        default=None, kind=types.token_biases(), group="penalties",
        doc="Values to add to the logits of these tokens.")
    bad_words_ids: Sequence[Sequence[int]] | None = field(
        default=None, kind=types.words(), group="penalties",
        doc="Token sequences that must not be generated.")
    sequence_bias: Mapping[tuple[int, ...], float] | None = field(
        default=None, kind=types.sequence_biases(), group="penalties",
        doc="Values to add to the logit of a token that would complete one of these sequences.")
    exponential_decay_length_penalty: tuple[int, float] | None = field(
        default=None, kind=types.decay_pair(), group="penalties",
        doc="After this many new tokens, raise the end token's score by a growing power of the factor.")
    suppress_tokens: Sequence[int] | None = field(
        default=None, kind=types.tokens(empty=True), group="penalties",
        doc="Tokens that are never generated.")
    begin_suppress_tokens: Sequence[int] | None = field(
        default=None, kind=types.tokens(empty=True), group="penalties",
        doc="Tokens that are not generated first.")
    renormalize_logits: bool = field(
        default=False, kind=types.flag(), group="penalties",
        doc="Apply a log-softmax after all processors.")
    remove_invalid_values: bool = field(
        default=False, kind=types.flag(), group="penalties",
        doc="Replace NaN and infinite logits by finite values before selection.")

    # -- special tokens
    pad_token_id: int | None = field(
        default=None, kind=types.token(), group="tokens",
        doc="Padding token of the results.")
    bos_token_id: int | None = field(
        default=None, kind=types.token(), group="tokens",
        doc="First token of a sequence without a prompt.")
    eos_token_id: int | Sequence[int] | None = field(
        default=None, kind=types.token_or_tokens(most=MAX_STOP_TOKENS), group="tokens",
        doc="Token, or tokens, that end a row; at most 4,096.")
    forced_bos_token_id: int | None = field(
        default=None, kind=types.token(), group="tokens",
        doc="Token that is forced first, after the start token.")
    forced_eos_token_id: int | Sequence[int] | None = field(
        default=None, kind=types.token_or_tokens(), group="tokens",
        doc="Token, or one of several tokens, that is forced last at the length limit.")
    forced_decoder_ids: Sequence[Sequence[int | None]] | None = field(
        default=None, kind=types.position_token_pairs(), group="tokens",
        doc="Pairs of index and token: that token is forced at that index, 1 being the first new token.")

    # -- output
    num_return_sequences: int = field(
        default=1, kind=types.integer(1), group="output",
        doc="Number of results per prompt; a recipe that forks returns all it has unless this is set.")
    return_dict_in_generate: bool = field(
        default=False, kind=types.flag(), group="output",
        doc="Return an output object instead of the token tensor alone.")
    output_scores: bool = field(
        default=False, kind=types.flag(), group="output", needs=("return_dict_in_generate",),
        doc="Also return each step's scores after the processors.")
    output_logits: bool | None = field(
        default=None, kind=types.flag(), group="output", needs=("return_dict_in_generate",),
        doc="Also return each step's logits before the processors.")
    logprobs: int | None = field(
        default=None, kind=types.integer(), group="output",
        doc="Also return each token's log-probability before and after the processors, and this many of "
        "the most likely tokens at its position.")
    logprobs_support: bool = field(
        default=False, kind=types.flag(), group="output", needs=("logprobs",),
        doc="Also return which tokens each token was chosen from: those that the processors left.")
    output_attentions: bool = field(
        default=False, kind=types.flag(), group="output", needs=("return_dict_in_generate",),
        doc="Also return the attention weights of every layer.")
    output_hidden_states: bool = field(
        default=False, kind=types.flag(), group="output", needs=("return_dict_in_generate",),
        doc="Also return the hidden states of every layer.")

    # -- encoder-decoder
    decoder_start_token_id: int | Sequence[int] | None = field(
        default=None, kind=types.token_or_tokens(), group="encoder",
        doc="First token of the decoder, or one for each row; `bos_token_id` if unset.")
    encoder_no_repeat_ngram_size: int = field(
        default=0, kind=types.integer(), group="encoder",
        doc="Length of the n-grams of the encoder's input that must not occur in the output; 0 bans none.")
    encoder_repetition_penalty: float = field(
        default=1.0, kind=types.positive_real(), group="encoder",
        doc="Factor in favour of tokens of the encoder's input; 1 is none.")

    # -- speech
    return_timestamps: bool = field(
        default=False, kind=types.flag(), group="speech",
        doc="Generate timestamp tokens, in pairs and ascending.")
    no_timestamps_token_id: int | None = field(
        default=None, kind=types.token(), group="speech",
        doc="Token for no timestamps; the timestamps follow it in the vocabulary.")
    max_initial_timestamp_index: int | None = field(
        default=None, kind=types.integer(), group="speech",
        doc="Index of the latest first timestamp, counted from zero seconds.")

    # -- speculation
    is_assistant: bool = field(
        default=False, kind=types.flag(), group="speculation",
        doc="This config belongs to a draft model.")
    num_assistant_tokens: int = field(
        default=20, off=NoOffValue, kind=types.integer(1), group="speculation",
        doc="Maximum number of tokens that a draft model drafts before verification.")
    num_assistant_tokens_schedule: str = field(
        default="adaptive", off=NoOffValue,
        kind=types.choice("constant", "heuristic", "heuristic_transient", "adaptive"), group="speculation",
        doc="How the draft length changes: constant; longer after a fully accepted draft and shorter after "
        "another; or adapted to the acceptance rate and the cost of forwards.")
    assistant_confidence_threshold: float = field(
        default=0.4, off=NoOffValue, kind=types.real(0.0, 1.0), group="speculation",
        doc="The draft model stops drafting below this confidence.")
    prompt_lookup_num_tokens: int | None = field(
        default=None, kind=types.integer(1), group="speculation", is_drafter=True,
        doc="Draft up to this many tokens by copying what followed the same n-gram before.")
    max_matching_ngram_size: int | None = field(
        default=None, kind=types.integer(1), group="speculation", needs=("prompt_lookup_num_tokens",),
        doc="Longest n-gram that prompt lookup matches; 2 if unset.")
    suffix_lookup_num_tokens: int | None = field(
        default=None, kind=types.integer(1), group="speculation", is_drafter=True,
        doc="Draft up to this many tokens by copying what followed the longest repeated suffix.")
    suffix_lookup_shared: bool = field(
        default=False, kind=types.flag(), group="speculation", needs=("suffix_lookup_num_tokens",),
        doc="Also look up suffixes in the outputs of earlier requests with the same salt. The acceptance of "
        "drafts then depends on those requests, which is a side channel.")
    assistant_early_exit: int | None = field(
        default=None, kind=types.integer(1), group="speculation", is_drafter=True,
        doc="Draft with the model's own first layers, up to this one.")
    assistant_lookbehind: int = field(
        default=10, off=NoOffValue, kind=types.integer(1), group="speculation",
        doc="Draft tokens encoded again to align two different tokenizers.")
    target_lookbehind: int = field(
        default=10, off=NoOffValue, kind=types.integer(1), group="speculation",
        doc="Target tokens encoded again to align two different tokenizers.")

    # -- watermark
    watermarking_config: BaseWatermarkingConfig | Mapping[str, Any] | None = field(
        default=None, kind=types.settings(as_watermarking_config, is_secret=True), group="watermark",
        doc="Settings of the watermark: green list, SynthID or Gumbel.")

    # -- cache and speed
    use_cache: bool = field(
        default=True, off=NoOffValue, kind=types.flag(), group="cache",
        doc="Cache keys and values between steps instead of recomputing them.")
    cache_implementation: str | None = field(
        default=None, kind=types.choice(*CACHE_IMPLEMENTATIONS), group="cache",
        doc="Name of the cache; chosen by the model if unset.")
    cache_config: CacheConfig | Mapping[str, Any] | None = field(
        default=None, kind=types.settings(as_cache_config), group="cache", needs=("cache_implementation",),
        doc="Settings of the cache.")
    return_legacy_cache: bool | None = field(
        default=None, kind=types.flag(), group="cache",
        doc="Return the cache as nested tuples.")
    prefill_chunk_size: int | None = field(
        default=None, kind=types.integer(1), group="cache",
        doc="Chunk size of the prefill, in tokens.")
    compile_config: CompileConfig | Mapping[str, Any] | None = field(
        default=None, kind=types.settings(CompileConfig.of), group="cache",
        needs=("cache_implementation",), setting='cache_implementation="static"',
        doc="Settings for compiling the model's forward.")
    disable_compile: bool = field(
        default=False, kind=types.flag(), group="cache",
        doc="Never compile the forward.")
    generation_kwargs: Mapping[str, Any] = field(
        default=FrozenMap(), kind=types.settings(), group="cache",
        doc="Further arguments of the call: parameters, which win over those beside it, and model inputs.")


# fmt: on
