"""Being called by transformers' own generate(): `model.generate(..., custom_generate=descant.generate)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from descant.config.generation_config import GenerationConfig

__all__ = ["config_from_hf", "inputs_from_hf", "is_hf_prepared", "user_criteria"]

_COPIED_FIELDS = (
    "num_beams", "num_return_sequences", "do_sample", "early_stopping", "length_penalty", "max_time", "seed",
    "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "return_dict_in_generate",
    "output_scores", "output_logits", "output_attentions", "output_hidden_states",
)  # fmt: skip


def is_hf_prepared(config: Any) -> bool:
    """Whether transformers' own generate() has resolved this config, that is, whether it is calling us."""
    return hasattr(config, "_eos_token_tensor")


def config_from_hf(theirs: Any, width: int) -> GenerationConfig:
    """The config of such a call: its lengths resolved, for prompts of `width` tokens.

    Their list of processors comes along and holds the samplers too, so ours are switched off.
    """
    values = {name: getattr(theirs, name, None) for name in _COPIED_FIELDS}
    values = {name: value for name, value in values.items() if value is not None}
    if values.get("num_beams", 1) == 1:
        values = {
            name: value for name, value in values.items() if name not in ("early_stopping", "length_penalty")
        }
    if values.get("do_sample"):
        values["top_k"] = 0
    return GenerationConfig.merge({**values, "max_new_tokens": int(theirs.max_length) - width})


def inputs_from_hf(theirs: Any, given: Mapping[str, Any], encoder_decoder: bool) -> dict[str, Any]:
    """The inputs of such a call, every prompt once again and not repeated for its beams."""
    lines = len(given["input_ids"])
    repeats = max(theirs.num_beams or 1, theirs.num_return_sequences or 1)
    fresh = {name: _undo_expand(value, repeats, lines) for name, value in given.items()}
    if encoder_decoder:
        fresh["decoder_input_ids"] = fresh.pop("input_ids")
        ready, mask = fresh.get("encoder_outputs"), fresh.get("attention_mask")
        if ready is not None and mask is not None and ready[0].shape[1] != mask.shape[1]:
            del fresh["attention_mask"]  # of what the encoder heard, and not of what it made of it
    return fresh


def user_criteria(criteria: Sequence[Any]) -> list[Any]:
    """The user's criteria among theirs: length, end token and time are the config's already."""
    known = ("MaxLengthCriteria", "EosTokenCriteria", "MaxTimeCriteria")
    return [one for one in criteria if type(one).__name__ not in known]


def _undo_expand(value: Any, repeats: int, lines: int) -> Any:
    """A batch of which every line was repeated, each line once."""
    if isinstance(value, Tensor) and value.ndim and len(value) == lines:
        return value[::repeats]
    if hasattr(value, "last_hidden_state"):
        return (value.last_hidden_state[::repeats],)
    return value
