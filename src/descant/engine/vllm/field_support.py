"""Which part of vLLM, or of what Descant adds to it, applies each field of a config."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, Literal, NamedTuple

from descant.config.generation_config import FIELDS, GenerationConfig
from descant.errors import ConfigError

AppliedBy = Literal["vllm", "plug-in", "engine", "refused"]


class FieldSupport(NamedTuple):
    """The part that applies a field, and how or why not.

    "vllm": vLLM itself, by a parameter of its own. "plug-in": Descant's processors inside vLLM. "engine":
    `descant.VLLM` alone, around vLLM. "refused": nothing does, and a value other than the default raises.
    """

    by: AppliedBy
    note: str


_PROCESSOR: Final = FieldSupport("plug-in", "a processor")
_OWN_LOOP: Final = FieldSupport("refused", "needs Descant's own loop")
_COMPILES: Final = FieldSupport("refused", "vLLM compiles by its own settings")

# Of the fields of a group that are not named below.
_BY_GROUP: Final = {
    "length": _PROCESSOR,
    "strategy": _OWN_LOOP,
    "beams": FieldSupport("refused", "of beam search"),
    "sampling": _PROCESSOR,
    "penalties": _PROCESSOR,
    "tokens": _PROCESSOR,
    "output": FieldSupport("refused", "vLLM does not return it"),
    "encoder": _PROCESSOR,
    "speech": FieldSupport("refused", "for speech models"),
    "speculation": _OWN_LOOP,
    "watermark": _PROCESSOR,
    "cache": FieldSupport("refused", "the keys and values are vLLM's"),
}
_BY_NAME: Final = {
    "max_length": FieldSupport("vllm", "`max_tokens`, less the prompt"),
    "max_new_tokens": FieldSupport("vllm", "`max_tokens`"),
    "eos_token_id": FieldSupport("vllm", "`stop_token_ids` with `ignore_eos`"),
    "stop_token_ids": FieldSupport("vllm", "`stop_token_ids`"),
    "num_return_sequences": FieldSupport("vllm", "`n`"),
    "do_sample": FieldSupport("plug-in", "greedy, or the noise of the seed"),
    "seed": FieldSupport("plug-in", "the same stream as in a session; drawn if unset"),
    "pad_token_id": FieldSupport("plug-in", "has no effect: rows are not padded"),
    "bos_token_id": FieldSupport("plug-in", "has no effect: the prompt is given"),
    "processor_order": FieldSupport("plug-in", "the order of the processors"),
    "grammar": _PROCESSOR,
    "thinking_budget": _PROCESSOR,
    "thinking_message": FieldSupport("plug-in", "of `thinking_budget`"),
    "thinking_start": FieldSupport("plug-in", "of `thinking_budget`"),
    "thinking_end": FieldSupport("plug-in", "of `thinking_budget`"),
    "stop_strings": FieldSupport(
        "engine", "checked by Descant after each token, the end of the prompt included"
    ),
    "stop_regex": FieldSupport("engine", "checked by Descant after each token"),
    "max_time": FieldSupport("engine", "checked by Descant after each token"),
    "return_dict_in_generate": FieldSupport("engine", "what `generate` returns"),
    "prefix_allowed_tokens_fn": FieldSupport("refused", "a function cannot be sent to vLLM's workers"),
    "logprobs": FieldSupport("refused", "vLLM has those before the processors only"),
    "decoder_start_token_id": FieldSupport("refused", "for models with an encoder"),
    "prefill_chunk_size": FieldSupport("refused", "vLLM's `max_num_batched_tokens`"),
    "compile_config": _COMPILES,
    "disable_compile": _COMPILES,
    "generation_kwargs": FieldSupport("refused", "for `generate` on a model"),
}


# Every field of GenerationConfig.
FIELD_SUPPORT: Final = {name: _BY_NAME.get(name, _BY_GROUP[field.group]) for name, field in FIELDS.items()}


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
