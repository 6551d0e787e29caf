"""The decoder's prompt: what was said before, then language, task and whether to tell the time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from descant.api.whisper.options import WhisperOptions
from descant.config.generation_config import GenerationConfig
from descant.errors import ConfigError, InputError
from descant.models.whisper import WhisperAdapter, language_codes

__all__ = ["PromptHistory", "init_tokens"]

DetectLanguages = Callable[[Sequence[int]], list[int]]  # of the tokens of all languages, that of each audio


def init_tokens(
    listener: WhisperAdapter,
    options: WhisperOptions,
    config: GenerationConfig,
    batch: int,
    detect: DetectLanguages,
) -> list[list[int]]:
    """What the decoder of each audio begins with: start, language, task, no timestamps."""
    start = config.decoder_start_token_id
    if not isinstance(start, int):
        raise ConfigError("decoder_start_token_id", "must be one token for a model that hears", start)
    known: Mapping[str, int] = config.extra.get("lang_to_id") or {}
    tasks: Mapping[str, int] = config.extra.get("task_to_id") or {}
    _validate_multilingual(options, known, tasks)
    forced = [] if options.language or options.task else _forced_tokens(listener.forced_decoder_ids)
    first: Sequence[int | None] = [None] * batch
    if options.language is not None:
        first = _language_tokens(options.language, known, batch)
    elif known and forced[:1] in ([], [None]):
        first = detect(sorted(known.values()))
    elif forced:
        first = forced[:1] * batch
    task = options.task or ("transcribe" if options.language is not None and tasks else None)
    rest = [*forced[1:], *([tasks[task]] if task else [])]
    timeless = config.no_timestamps_token_id
    made = []
    for one in first:
        tokens = [token for token in (start, one, *rest) if token is not None]
        tokens = tokens[:-1] if tokens[-1] == timeless else tokens
        if not config.return_timestamps and timeless is not None:
            tokens.append(timeless)
        made.append(tokens)
    return made


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
            raise ConfigError(name, "must not be given to a model of one language", value, do)
        if not table:
            entry = "lang_to_id" if name == "language" else "task_to_id"
            do = f"add `{entry}` to the model's generation config"
            raise ConfigError(name, f"needs `{entry}`, the tokens to say it with", value, do)


def _forced_tokens(pairs: Sequence[Sequence[int | None]] | None) -> list[int | None]:
    """The tokens that an older config forces from position 1 on."""
    tokens = []
    for place, (position, token) in enumerate(pairs or (), 1):
        if position != place:
            must = "must name every position from 1 on"
            raise ConfigError("forced_decoder_ids", must, pairs, "set language and task instead")
        tokens.append(token)
    return tokens


def _language_tokens(language: str | Sequence[str], known: Mapping[str, int], batch: int) -> list[int]:
    """The token of each audio's language, by its name, its code or its token."""
    if isinstance(language, str):
        return [_language_token(language, known)] * batch
    if not isinstance(language, list | tuple) or len(language) != batch:
        raise ConfigError("language", f"must be one for all, or {batch}, one for each audio", language)
    return [_language_token(one, known) for one in language]


def _language_token(name: Any, known: Mapping[str, int]) -> int:
    if not isinstance(name, str):
        raise ConfigError("language", "must be a name like 'english' or a code like 'en'", name)
    plain = name.lower()
    for token in (plain, f"<|{language_codes().get(plain, plain)}|>"):
        if token in known:
            return known[token]
    codes = sorted(token.strip("<|>") for token in known)
    do = "choose from " + ", ".join(codes[:8]) + (f" and {len(codes) - 8} more" if len(codes) > 8 else "")
    raise ConfigError("language", "must be one that the model knows", name, do)


class PromptHistory:
    """What stands before the beginning: the user's prompt, and what was heard in earlier windows."""

    def __init__(self, listener: WhisperAdapter, options: WhisperOptions, config: GenerationConfig) -> None:
        stamp = config.no_timestamps_token_id
        self._first_timestamp_id = listener.vocab_size if stamp is None else stamp + 1
        self._max_tokens = listener.max_target_positions // 2 - 1
        self._prev_sot_id = _prev_sot_token_id(config)
        self._prompt_every_window = options.prompt_condition_type == "all-segments"
        self.prompt = [] if options.prompt_ids is None else options.prompt_ids.tolist()
        unknown = [token for token in self.prompt if not 0 <= token < listener.vocab_size]
        if unknown:
            must = f"must hold ids from 0 to {listener.vocab_size - 1}"
            raise InputError("prompt_ids", must, unknown[0])

    @property
    def initial_segments(self) -> list[list[int]]:
        """The segments that an audio counts as having before it begins."""
        if not self.prompt or self._prompt_every_window:
            return []
        return [self.prompt[1:] if self.prompt[0] == self._prev_sot_id else self.prompt]

    def previous_tokens(self, segments: Sequence[Sequence[int]], follows: bool) -> list[int]:
        """The tokens before the beginning: of these segments if the window follows them, else the prompt."""
        if not follows or not segments:
            return self.prompt
        said: list[int] = []
        for segment in segments:
            cut_off = (
                len(segment) > 2 and segment[-2] >= self._first_timestamp_id
            )  # it ends on both timestamps of a pair
            said += segment[:-1] if cut_off else segment
        marker = [] if self._prev_sot_id is None else [self._prev_sot_id]
        return (self.prompt if self._prompt_every_window and self.prompt else marker) + said[
            -self._max_tokens :
        ]


def _prev_sot_token_id(config: GenerationConfig) -> int | None:
    """The token that says: this was said before."""
    marker = config.extra.get("prev_sot_token_id")
    if marker is None and config.suppress_tokens is not None and len(config.suppress_tokens) >= 2:
        # Configs that do not name it suppress it as the last but one of their special tokens.
        marker = config.suppress_tokens[-2]
    return None if marker is None else int(marker)
