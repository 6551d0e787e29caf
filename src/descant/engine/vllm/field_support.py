"""Which part of vLLM, or of what Descant adds to it, applies each field of a config."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, Literal, NamedTuple

from descant.config.generation_config import FIELDS, GenerationConfig
from descant.decoding.processors.pipeline import PROCESSOR_SPECS
from descant.errors import ConfigError

__all__ = ["FIELD_SUPPORT", "FieldSupport", "check_fields"]

AppliedBy = Literal["vllm", "plug-in", "engine", "refused"]


class FieldSupport(NamedTuple):
    """What applies a field, and how or why not.

    "vllm": vLLM itself, by a parameter of its own. "plug-in": Descant's processors inside vLLM. "engine":
    `descant.VLLM` alone, around vLLM. "refused": nothing does, and a value other than the default raises.
    """

    by: AppliedBy
    note: str


_OWN_LOOP: Final = "needs Descant's own loop"
_NO_STATES: Final = "vLLM does not return it"
_OWN_CACHE: Final = "the keys and values are vLLM's"
_ENCODER: Final = "for models with an encoder"

_VLLM: Final = {
    "max_length": "`max_tokens`, less the prompt",
    "max_new_tokens": "`max_tokens`",
    "eos_token_id": "`stop_token_ids` with `ignore_eos`",
    "stop_token_ids": "`stop_token_ids`",
    "num_return_sequences": "`n`",
}
_PLUGIN: Final = {
    "do_sample": "greedy, or the noise of the seed",
    "seed": "the same stream as in a session; drawn if unset",
    "pad_token_id": "has no effect: rows are not padded",
    "bos_token_id": "has no effect: the prompt is given",
    "processor_order": "the order of the processors",
    "remove_invalid_values": "a processor",
    "thinking_start": "of `thinking_budget`",
    "thinking_end": "of `thinking_budget`",
    "xtc_threshold": "of `xtc_probability`",
    "dynamic_temperature_exponent": "of `dynamic_temperature_range`",
    "mirostat_eta": "of `mirostat_tau`",
    "adaptive_p_decay": "of `adaptive_p_target`",
    "no_repeat_ngram_window": "of `no_repeat_ngram_size`",
    "dry_base": "of `dry_multiplier`",
    "dry_allowed_length": "of `dry_multiplier`",
    "dry_range": "of `dry_multiplier`",
    "dry_sequence_breakers": "of `dry_multiplier`",
}
_ENGINE: Final = {
    "stop_strings": "checked by Descant after each token, the end of the prompt included",
    "stop_regex": "checked by Descant after each token",
    "max_time": "checked by Descant after each token",
    "return_dict_in_generate": "what `generate` returns",
}
_REFUSED: Final = {
    "num_beams": _OWN_LOOP,
    "early_stopping": "of beam search",
    "length_penalty": "of beam search",
    "num_beam_groups": "of beam search",
    "diversity_penalty": "of beam search",
    "constraints": "of beam search",
    "force_words_ids": "of beam search",
    "ordered_constraints": "of beam search",
    "constraint_gap": "of beam search",
    "low_memory": "of beam and contrastive search",
    "penalty_alpha": _OWN_LOOP,
    "dola_layers": _OWN_LOOP,
    "guidance_scale": _OWN_LOOP,
    "token_healing": _OWN_LOOP,
    "banned_phrases": _OWN_LOOP,
    "prefix_allowed_tokens_fn": "a function cannot be sent to vLLM's workers",
    "output_scores": _NO_STATES,
    "output_logits": _NO_STATES,
    "output_attentions": _NO_STATES,
    "output_hidden_states": _NO_STATES,
    "logprobs": "vLLM has those before the processors only",
    "decoder_start_token_id": _ENCODER,
    "return_timestamps": "for speech models",
    "no_timestamps_token_id": "for speech models",
    "max_initial_timestamp_index": "for speech models",
    "is_assistant": _OWN_LOOP,
    "num_assistant_tokens": _OWN_LOOP,
    "num_assistant_tokens_schedule": _OWN_LOOP,
    "assistant_confidence_threshold": _OWN_LOOP,
    "prompt_lookup_num_tokens": _OWN_LOOP,
    "max_matching_ngram_size": _OWN_LOOP,
    "suffix_lookup_num_tokens": _OWN_LOOP,
    "suffix_lookup_shared": _OWN_LOOP,
    "assistant_early_exit": _OWN_LOOP,
    "assistant_lookbehind": _OWN_LOOP,
    "target_lookbehind": _OWN_LOOP,
    "use_cache": _OWN_CACHE,
    "cache_implementation": _OWN_CACHE,
    "cache_config": _OWN_CACHE,
    "return_legacy_cache": _OWN_CACHE,
    "prefill_chunk_size": "vLLM's `max_num_batched_tokens`",
    "compile_config": "vLLM compiles by its own settings",
    "disable_compile": "vLLM compiles by its own settings",
    "generation_kwargs": "for `generate` on a model",
}


def _support_of(name: str) -> FieldSupport:
    named: tuple[tuple[AppliedBy, dict[str, str]], ...] = (
        ("vllm", _VLLM),
        ("plug-in", _PLUGIN),
        ("engine", _ENGINE),
        ("refused", _REFUSED),
    )
    for by, notes in named:
        if name in notes:
            return FieldSupport(by, notes[name])
    if any(name in spec.fields for spec in PROCESSOR_SPECS):
        return FieldSupport("plug-in", "a processor")
    raise KeyError(f"field `{name}` must have an entry in field_support.py")


# Every field of GenerationConfig.
FIELD_SUPPORT: Final = {name: _support_of(name) for name in FIELDS}


def check_fields(config: GenerationConfig, applied_by: Collection[AppliedBy]) -> None:
    """Raise a ConfigError for a field that differs from its default and that none of these applies."""
    for name in FIELDS:
        support, value = FIELD_SUPPORT[name], getattr(config, name)
        if name not in config.given or value == FIELDS[name].default or support.by in applied_by:
            continue
        if support.by == "engine":
            must = f"must be None in vLLM's own requests: it is {support.note}"
            raise ConfigError(name, must, value, "use descant.VLLM")
        must = f"must have its default on vLLM ({support.note})"
        raise ConfigError(name, must, value, "leave it out, or use a Descant session")
