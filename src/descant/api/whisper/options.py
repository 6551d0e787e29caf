"""Whisper's own arguments of generate(): language, task, fallback thresholds, returned values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from descant.config.generation_config import GenerationConfig
from descant.errors import ConfigError, InputError

__all__ = ["WHISPER_ARGUMENTS", "WhisperOptions", "parse_options"]

TASKS: Final = ("transcribe", "translate")
CONDITION_TYPES: Final = ("first-segment", "all-segments")

# Arguments of a call only; the others may also be in a generation config.
_CALL_ONLY: Final = (
    "prompt_ids", "num_segment_frames", "time_precision", "time_precision_features", "return_segments",
    "force_unique_generate_call", "monitor_progress",
)  # fmt: skip
_CALL_OR_CONFIG: Final = (
    "language", "task", "is_multilingual", "prompt_condition_type", "condition_on_prev_tokens",
    "compression_ratio_threshold", "logprob_threshold", "no_speech_threshold", "return_token_timestamps",
)  # fmt: skip
WHISPER_ARGUMENTS: Final = frozenset((*_CALL_ONLY, *_CALL_OR_CONFIG))


@dataclass(frozen=True)
class WhisperOptions:
    """How to transcribe audio."""

    language: str | Sequence[str] | None = None  # for all audios, or one each; None: detected
    task: str | None = None
    is_multilingual: bool | None = None
    prompt_ids: Tensor | None = None  # [P] text to condition on
    prompt_condition_type: str = "first-segment"
    condition_on_prev_tokens: bool = False
    compression_ratio_threshold: float | None = None
    logprob_threshold: float | None = None
    no_speech_threshold: float | None = None
    num_segment_frames: int | None = None
    time_precision: float = 0.02  # seconds for each timestamp token
    time_precision_features: float = 0.01  # seconds for each frame
    return_segments: bool = False
    return_token_timestamps: bool = False
    force_unique_generate_call: bool = False
    monitor_progress: Callable[[Tensor], None] | None = None


def parse_options(given: Mapping[str, Any], config: GenerationConfig) -> WhisperOptions:
    """The options of a call, completed from its generation config and validated."""
    values = {name: config.extra[name] for name in _CALL_OR_CONFIG if config.extra.get(name) is not None}
    values |= {name: value for name, value in given.items() if value is not None}
    for name in ("is_multilingual", "condition_on_prev_tokens", "return_segments", "return_token_timestamps",
                 "force_unique_generate_call"):  # fmt: skip
        if name in values and not isinstance(values[name], bool):
            raise ConfigError(name, "must be True or False", values[name])
    _validate_choice("task", values, TASKS)
    _validate_choice("prompt_condition_type", values, CONDITION_TYPES)
    _validate_number("compression_ratio_threshold", values)
    _validate_number("logprob_threshold", values)
    _validate_number("no_speech_threshold", values, minimum=0.0)
    _validate_number("time_precision", values, minimum=0.0, exclusive=True)
    _validate_number("time_precision_features", values, minimum=0.0, exclusive=True)
    if "prompt_ids" in values:
        values["prompt_ids"] = _validate_prompt_ids(values["prompt_ids"])
    if "monitor_progress" in values and not callable(values["monitor_progress"]):
        raise InputError("monitor_progress", "must be callable", values["monitor_progress"])
    options = WhisperOptions(**values)
    if options.prompt_condition_type == "all-segments" and not options.condition_on_prev_tokens:
        must = "needs `condition_on_prev_tokens`, as every window gets the prompt and previous tokens"
        raise ConfigError("prompt_condition_type", must, "all-segments", "set condition_on_prev_tokens=True")
    if options.no_speech_threshold is not None and options.logprob_threshold is None:
        must = "needs `logprob_threshold`, as a silent window also has a low log-probability"
        raise ConfigError("no_speech_threshold", must, options.no_speech_threshold, "set both")
    return options


def _validate_choice(name: str, values: Mapping[str, Any], known: Sequence[str]) -> None:
    if name in values and values[name] not in known:
        raise ConfigError(name, f"must be one of {', '.join(map(repr, known))}", values[name])


def _validate_number(
    name: str, values: dict[str, Any], minimum: float | None = None, exclusive: bool = False
) -> None:
    if name not in values:
        return
    value = values[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(name, "must be a number", value)
    if minimum is not None and (value < minimum or (exclusive and value == minimum)):
        raise ConfigError(name, f"must be {'>' if exclusive else '>='} {minimum:g}", value)
    values[name] = float(value)


def _validate_prompt_ids(given: Any) -> Tensor:
    """The token ids of a prompt [P]."""
    try:
        ids = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        raise InputError("prompt_ids", "must be one sequence of token ids", given) from None
    if ids.ndim != 1 or not len(ids) or ids.is_floating_point() or ids.dtype == torch.bool:
        raise InputError("prompt_ids", "must be one sequence of token ids", given)
    return ids.long()
