"""transformers GenerationConfig with all defaults filled in, for function recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import transformers
from torch import Tensor

from descant.config.generation_config import FIELDS, STEP_OUTPUT_FIELDS, GenerationConfig
from descant.errors import InputError

_LENGTH_FIELDS: Final = (("max_new_tokens", "max_length"), ("min_new_tokens", "min_length"))


def fill_defaults(model: Any, given: Any, call: Mapping[str, Any]) -> Any:
    """A transformers GenerationConfig: call arguments over the given config over the model's over defaults.

    transformers 5 leaves unset fields at None, which functions written for its documentation do not expect.
    Values are not validated: their meaning is up to the function. A list of configs is returned unchanged.
    """
    if isinstance(given, list | tuple):
        return given
    values: dict[str, Any] = {}
    for level in (_non_null_values(getattr(model, "generation_config", None)), _non_null_values(given), call):
        for new_tokens, total in _LENGTH_FIELDS:
            # Both names set the same limit, so a later level replaces either.
            for name, other in ((new_tokens, total), (total, new_tokens)):
                if level.get(name) is not None and level.get(other) is None:
                    values.pop(other, None)
        values |= {name: value for name, value in level.items() if value is not None}
    counterparts = dict(_LENGTH_FIELDS) | {total: new_tokens for new_tokens, total in _LENGTH_FIELDS}
    config: Any = transformers.GenerationConfig()  # type: ignore[no-untyped-call]
    missing = {
        name: FIELDS[name].default
        for name, value in vars(config).items()
        if name in FIELDS and value is None and name not in values and counterparts.get(name) not in values
    }
    for name, value in {**missing, **values}.items():
        setattr(config, name, value)
    explicit = _non_null_values(given).keys() | call.keys()
    config._filled = {name: value for name, value in vars(config).items() if name not in explicit}
    return config


def explicit_values(config: Any) -> dict[str, Any]:
    """The explicitly set values of a transformers GenerationConfig.

    Values that `fill_defaults` added are left out unless they were changed since: a function that passes its
    config on has not asked for them.
    """
    filled = getattr(config, "_filled", {})
    return {
        name: value
        for name, value in vars(config).items()
        if name not in filled or (filled[name] is not value and filled[name] != value)
    }


def _non_null_values(config: Any) -> dict[str, Any]:
    """The values of a Descant or transformers config that are not None."""
    if config is None:
        return {}
    if isinstance(config, GenerationConfig):
        return {name: value for name, value in config.to_dict().items() if value is not None}
    if not hasattr(config, "to_dict"):
        raise InputError("generation_config", "must be a GenerationConfig or a list of them", config)
    return {name: value for name, value in vars(config).items() if value is not None and name[0] != "_"}


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
