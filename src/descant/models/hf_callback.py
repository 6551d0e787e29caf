"""Calls from transformers' generate(): `model.generate(..., custom_generate=descant.generate)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from descant.config.generation_config import STEP_OUTPUT_FIELDS, GenerationConfig

__all__ = ["config_from_hf", "inputs_from_hf", "is_hf_prepared", "user_criteria"]

_COPIED_FIELDS = (
    "num_beams", "num_return_sequences", "do_sample", "early_stopping", "length_penalty", "max_time", "seed",
    "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "return_dict_in_generate",
    *STEP_OUTPUT_FIELDS,
)  # fmt: skip


def is_hf_prepared(config: Any) -> bool:
    """Whether transformers' generate() has resolved this config, that is, made the call."""
    return hasattr(config, "_eos_token_tensor")


def config_from_hf(hf_config: Any, width: int) -> GenerationConfig:
    """The Descant config of such a call, for prompts of `width` tokens.

    The samplers are in the list of processors that the call passes, so `top_k` is switched off here.
    """
    values = {name: getattr(hf_config, name, None) for name in _COPIED_FIELDS}
    values = {name: value for name, value in values.items() if value is not None}
    if values.get("num_beams", 1) == 1:
        values = {
            name: value for name, value in values.items() if name not in ("early_stopping", "length_penalty")
        }
    if values.get("do_sample"):
        values["top_k"] = 0
    return GenerationConfig.merge({**values, "max_new_tokens": int(hf_config.max_length) - width})


def inputs_from_hf(hf_config: Any, given: Mapping[str, Any], encoder_decoder: bool) -> dict[str, Any]:
    """The inputs of such a call, with each prompt once instead of once per beam."""
    num_rows = len(given["input_ids"])
    repeats = max(hf_config.num_beams or 1, hf_config.num_return_sequences or 1)
    inputs = {name: _undo_expand(value, repeats, num_rows) for name, value in given.items()}
    if encoder_decoder:
        inputs["decoder_input_ids"] = inputs.pop("input_ids")
        outputs, mask = inputs.get("encoder_outputs"), inputs.get("attention_mask")
        if outputs is not None and mask is not None and outputs[0].shape[1] != mask.shape[1]:
            del inputs["attention_mask"]  # it masks the encoder's input, which is of another length
    return inputs


def user_criteria(criteria: Sequence[Any]) -> list[Any]:
    """The criteria that the user passed: those for length, EOS and time are set by the config."""
    from_config = ("MaxLengthCriteria", "EosTokenCriteria", "MaxTimeCriteria")
    return [criterion for criterion in criteria if type(criterion).__name__ not in from_config]


def _undo_expand(value: Any, repeats: int, num_rows: int) -> Any:
    """A batch in which every row was repeated, each row once."""
    if isinstance(value, Tensor) and value.ndim and len(value) == num_rows:
        return value[::repeats]
    if hasattr(value, "last_hidden_state"):
        return (value.last_hidden_state[::repeats],)
    return value
