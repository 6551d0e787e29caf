"""The oracle of the installed transformers: `model.generate` on one unpadded row."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import torch
import transformers

from descant import AllowedSequences, Hypothesis
from tools.fuzz.cases import Ask
from tools.fuzz.runs import Result
from tools.fuzz.subjects import Subject, subject, tokenizer

__all__ = ["generated", "has"]

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

# Fields that mean the same there.
_SHARED = frozenset(
    {
        "max_length", "max_new_tokens", "min_length", "min_new_tokens", "stop_strings", "num_beams",
        "early_stopping", "length_penalty", "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids",
        "sequence_bias", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
        "renormalize_logits", "remove_invalid_values", "pad_token_id", "eos_token_id", "forced_bos_token_id",
        "forced_eos_token_id", "num_return_sequences", "encoder_repetition_penalty",
        "encoder_no_repeat_ngram_size", "guidance_scale", "prefix_allowed_tokens_fn", "watermarking_config",
    }
)  # fmt: skip
# Fields that change no token.
_NEUTRAL = frozenset(
    {
        "logprobs", "prefill_chunk_size", "prompt_lookup_num_tokens", "max_matching_ngram_size",
        "suffix_lookup_num_tokens", "suffix_lookup_shared", "assistant_early_exit", "num_assistant_tokens",
        "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    }
)  # fmt: skip


def has(on: Subject, ask: Ask) -> bool:
    """Whether it decodes a request in the same way."""
    if ask.branches or not set(ask.fields) <= _SHARED | _NEUTRAL:
        return False
    guided = "guidance_scale" in ask.fields
    # Its unguided cache stays in the beams' old order, and it has no cache for other kinds of memory.
    return not guided or ("num_beams" not in ask.fields and on.cache_type == "kv")


def generated(on: Subject, ask: Ask) -> Result:
    """The result of `model.generate`; its reasons are not known."""
    given: dict[str, Any] = {name: value for name, value in ask.fields.items() if name in _SHARED}
    if "watermarking_config" in given:
        given["watermarking_config"] = transformers.WatermarkingConfig(**given["watermarking_config"])
    if ask.source:
        given |= {"input_ids": torch.tensor([ask.source]), "decoder_input_ids": torch.tensor([ask.prompt])}
    else:
        given["input_ids"] = torch.tensor([ask.prompt])
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    if ask.negative:
        given["negative_prompt_ids"] = torch.tensor([ask.negative])
    if ask.processors:
        given["logits_processor"] = transformers.LogitsProcessorList(ask.processors)
    if ask.criteria:
        given["stopping_criteria"] = transformers.StoppingCriteriaList(ask.criteria)
    if "stop_strings" in given:
        given["tokenizer"] = tokenizer(on.vocab)
    allowed = given.get("prefix_allowed_tokens_fn")
    if isinstance(allowed, AllowedSequences):
        given["prefix_allowed_tokens_fn"] = allowed.prefix_fn(len(ask.prompt))
    # Its drafts need a cache, its guidance is a processor with a cache that is not cut, and its criteria see
    # only the end of what a step with drafts adds.
    stops = bool(ask.criteria) or "stop_strings" in given
    if "guidance_scale" not in ask.fields and on.cache_type == "kv" and not stops:
        given |= {"assistant_model": _draft(on.name)} if ask.drafts else {}
        given |= {name: value for name, value in ask.fields.items() if name == "prompt_lookup_num_tokens"}
    beams = given.get("num_beams", 1) > 1
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = on.model.generate(**given, do_sample=False, return_dict_in_generate=True, output_scores=beams)
    width = len(ask.prompt)
    scores = out.sequences_scores.tolist() if beams else [None] * len(out.sequences)
    return Result([
        Hypothesis(row[width:], "", score) for row, score in zip(out.sequences, scores, strict=True)
    ])  # fmt: skip


@functools.cache
def _draft(name: str) -> Any:
    """A draft model of its own: `generate` writes into its generation config."""
    return copy.deepcopy(subject(name).draft)
