"""Whisper's own arguments of generate(): language, task, fallback thresholds, returned values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from descant.config.generation_config import GenerationConfig
from descant.errors import ConfigError, InputError
from descant.models.audio.whisper import WhisperAdapter, language_codes

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
    """The settings of a transcription."""

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


DetectLanguages = Callable[[Sequence[int]], list[int]]  # language tokens -> the token of each audio


def init_tokens(
    whisper: WhisperAdapter,
    options: WhisperOptions,
    config: GenerationConfig,
    batch: int,
    detect: DetectLanguages,
) -> list[list[int]]:
    """The initial tokens of each audio: start, language, task, no-timestamps."""
    start = config.decoder_start_token_id
    if not isinstance(start, int):
        raise ConfigError("decoder_start_token_id", "must be one token for Whisper", start)
    known: Mapping[str, int] = config.extra.get("lang_to_id") or {}
    tasks: Mapping[str, int] = config.extra.get("task_to_id") or {}
    _validate_multilingual(options, known, tasks)
    forced = [] if options.language or options.task else _forced_tokens(whisper.forced_decoder_ids)
    languages: Sequence[int | None] = [None] * batch
    if options.language is not None:
        languages = _language_tokens(options.language, known, batch)
    elif known and forced[:1] in ([], [None]):
        languages = detect(sorted(known.values()))
    elif forced:
        languages = forced[:1] * batch
    task = options.task or ("transcribe" if options.language is not None and tasks else None)
    rest = [*forced[1:], *([tasks[task]] if task else [])]
    no_timestamps = config.no_timestamps_token_id
    prompts = []
    for language in languages:
        tokens = [token for token in (start, language, *rest) if token is not None]
        tokens = tokens[:-1] if tokens[-1] == no_timestamps else tokens
        if not config.return_timestamps and no_timestamps is not None:
            tokens.append(no_timestamps)
        prompts.append(tokens)
    return prompts


def _validate_multilingual(
    options: WhisperOptions, known: Mapping[str, int], tasks: Mapping[str, int]
) -> None:
    """Raise for a language or a task that the model has no token for."""
    for name, table in (("language", known), ("task", tasks)):
        value = getattr(options, name)
        if value is None:
            continue
        if options.is_multilingual is False:
            do = "leave it out; if the model is multilingual, pass is_multilingual=True"
            raise ConfigError(name, "must be None for a model of one language", value, do)
        if not table:
            entry = "lang_to_id" if name == "language" else "task_to_id"
            do = f"add `{entry}` to the model's generation config"
            raise ConfigError(name, f"needs `{entry}`, the table of its tokens", value, do)


def _forced_tokens(pairs: Sequence[Sequence[int | None]] | None) -> list[int | None]:
    """The tokens that an old config forces from position 1 on."""
    tokens = []
    for expected, (position, token) in enumerate(pairs or (), 1):
        if position != expected:
            must = "must name every position from 1 on"
            raise ConfigError("forced_decoder_ids", must, pairs, "set language and task instead")
        tokens.append(token)
    return tokens


def _language_tokens(language: str | Sequence[str], known: Mapping[str, int], batch: int) -> list[int]:
    """The language token of each audio, given by name, code or token text."""
    if isinstance(language, str):
        return [_language_token(language, known)] * batch
    if not isinstance(language, list | tuple) or len(language) != batch:
        raise ConfigError(
            "language", f"must be one string, or a list of {batch} with one for each audio", language
        )
    return [_language_token(name, known) for name in language]


def _language_token(name: Any, known: Mapping[str, int]) -> int:
    if not isinstance(name, str):
        raise ConfigError("language", "must be a name like 'english' or a code like 'en'", name)
    lower = name.lower()
    for token in (lower, f"<|{language_codes().get(lower, lower)}|>"):
        if token in known:
            return known[token]
    codes = sorted(token.strip("<|>") for token in known)
    do = "choose from " + ", ".join(codes[:8]) + (f" and {len(codes) - 8} more" if len(codes) > 8 else "")
    raise ConfigError("language", "must be a language of the model", name, do)


class PromptHistory:
    """Tokens before the initial tokens: the user's prompt and the segments of earlier windows."""

    def __init__(self, whisper: WhisperAdapter, options: WhisperOptions, config: GenerationConfig) -> None:
        no_timestamps = config.no_timestamps_token_id
        self._first_timestamp_id = whisper.vocab_size if no_timestamps is None else no_timestamps + 1
        self._max_tokens = whisper.max_target_positions // 2 - 1
        self._prev_sot_id = _prev_sot_token_id(config)
        self._prompt_every_window = options.prompt_condition_type == "all-segments"
        self.prompt = [] if options.prompt_ids is None else options.prompt_ids.tolist()
        unknown = [token for token in self.prompt if not 0 <= token < whisper.vocab_size]
        if unknown:
            must = f"must hold ids from 0 to {whisper.vocab_size - 1}"
            raise InputError("prompt_ids", must, unknown[0])

    @property
    def initial_segments(self) -> list[list[int]]:
        """Segments that every audio is treated as having before its first window."""
        if not self.prompt or self._prompt_every_window:
            return []
        return [self.prompt[1:] if self.prompt[0] == self._prev_sot_id else self.prompt]

    def previous_tokens(self, segments: Sequence[Sequence[int]], use_segments: bool) -> list[int]:
        """The previous tokens of a window: those of the segments, or else the user's prompt."""
        if not use_segments or not segments:
            return self.prompt
        tokens: list[int] = []
        for segment in segments:
            ends_in_pair = len(segment) > 2 and segment[-2] >= self._first_timestamp_id
            tokens += segment[:-1] if ends_in_pair else segment
        marker = [] if self._prev_sot_id is None else [self._prev_sot_id]
        prefix = self.prompt if self._prompt_every_window and self.prompt else marker
        return prefix + tokens[-self._max_tokens :]


def _prev_sot_token_id(config: GenerationConfig) -> int | None:
    """The token that marks previous text (`<|startofprev|>`)."""
    marker = config.extra.get("prev_sot_token_id")
    if marker is None and config.suppress_tokens is not None and len(config.suppress_tokens) >= 2:
        # A config without this entry has the token second to last in `suppress_tokens`.
        marker = config.suppress_tokens[-2]
    return None if marker is None else int(marker)
