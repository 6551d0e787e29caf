"""A model behind an engine, its tokenizer, its traces, and the parameters of requests made of bodies."""

from __future__ import annotations

import asyncio
import difflib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Final, NamedTuple, TypeVar

from descant.config.generation_config import FIELDS, STEP_OUTPUT_FIELDS, GenerationConfig
from descant.config.registry import DRAFTER_FIELDS
from descant.engine.serving.async_engine import AsyncEngine
from descant.serve.bodies import GenerationBody
from descant.serve.http.errors import ApiError, invalid_value
from descant.serve.http.keys import ApiKey
from descant.serve.model.prompts import NUM_PROCESSES, ChatTemplate, PromptEncoder, PromptRoom, too_long_error
from descant.serve.settings import ServerSettings
from descant.tokenization.token_bytes import TokenBytes
from descant.trace.trace import Trace
from descant.trace.tracer import Tracer

_MAX_VALUES: Final = 4096  # in lists and objects of any depth
_MAX_TEXTS: Final = 64  # each is matched against the whole vocabulary
_MAX_TEXT_CHARS: Final = 1024
_MAX_FORCED_WORDS: Final = 32  # the time of a step grows with the square of their number
# Of a watermark: every step computes something for each key, and remembers that many contexts.
_WATERMARK_LIMITS: Final = {"keys": 64, "context_history_size": 65_536, "ngram_len": 64, "depth": 64}


def check_size(name: str, value: Any) -> None:
    """Raise for very many values, very long texts, or texts that are no Unicode; grammars have own limits."""
    if name == "grammar":
        return
    texts, count, pending = 0, 0, [value]
    while pending:
        part = pending.pop()
        if isinstance(part, Mapping):
            pending += [*part.keys(), *part.values()] if name != "logit_bias" else part.values()
        elif isinstance(part, list | tuple):
            pending += part
        else:
            count += 1
            texts += isinstance(part, str)
            if isinstance(part, str):
                _check_text(name, part)
        if count + len(pending) > _MAX_VALUES or (texts > _MAX_TEXTS and name != "sequence_bias"):
            limit = _MAX_TEXTS if texts > _MAX_TEXTS else _MAX_VALUES
            raise _size_error(name, f"must have at most {limit} values")
    if name == "force_words_ids" and isinstance(value, list) and len(value) > _MAX_FORCED_WORDS:
        raise _size_error(name, f"must have at most {_MAX_FORCED_WORDS} items")
    if name == "watermarking_config" and isinstance(value, Mapping):
        _check_watermark(name, value)


def _check_text(name: str, text: str) -> None:
    if len(text) > _MAX_TEXT_CHARS:
        raise _size_error(name, f"must have texts of at most {_MAX_TEXT_CHARS} characters")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _size_error(name, "must hold whole characters, without lone surrogates") from None


def _check_watermark(name: str, settings: Mapping[str, Any]) -> None:
    for part, limit in _WATERMARK_LIMITS.items():
        value = settings.get(part)
        size = len(value) if isinstance(value, list) else value
        if isinstance(size, int) and size > limit:
            raise _size_error(name, f"must have at most {limit} as `{part}`")


def _size_error(name: str, must: str) -> ApiError:
    return invalid_value(name, f"`{name}` {must}")


# Fields that a request must not set, and what to do instead.
_REFUSED: Final = {
    **dict.fromkeys((*STEP_OUTPUT_FIELDS, "return_dict_in_generate"), "use `logprobs`"),
    "logprobs_support": "use `descant.Session`",
    **dict.fromkeys(("compile_config", "disable_compile", "prefill_chunk_size"), "it is set by the server"),
    **dict.fromkeys(("use_cache", "return_legacy_cache"), "leave it out"),
    **dict.fromkeys(("prefix_allowed_tokens_fn", "constraints"), "it holds Python objects; use `grammar`"),
    # A regular expression of Python's may take for ever, and every request would wait for it.
    "stop_regex": "use `grammar` or `stop`",
    "generation_kwargs": "give the fields themselves",
}
# Names that OpenAI's fields stand for.
_STANDARD_NAMES: Final = {
    "max_new_tokens": "max_tokens",
    "num_return_sequences": "n",
    "stop_strings": "stop",
    "eos_token_id": "ignore_eos",
}
_DEFAULT_COMPLETION_TOKENS: Final = 16  # as in OpenAI's API
_DEFAULT_CONTEXT: Final = 4096  # of a model that knows no limit
_SAMPLING_FIELDS: Final = tuple(name for name, parameter in FIELDS.items() if parameter.group == "sampling")


@dataclass(frozen=True)
class RequestParameters:
    """Reads the generation parameters of bodies."""

    settings: ServerSettings
    model_config: GenerationConfig
    max_positions: int | None

    def read(
        self,
        body: GenerationBody,
        implied: Mapping[str, Any],
        *,
        is_chat: bool,
        pool_tokens: int | None = None,
        key_tokens: int | None = None,
    ) -> BodyParameters:
        """The parameters of a body.

        `implied` holds what other fields of the body stand for, such as the grammar of a response format. The
        tokens of the KV pool, and those a minute of the key, bound the length of a request that sets none.
        """
        values = self._given(body)
        for name, value in implied.items():
            if name in values:
                raise ApiError(400, f"`{name}` must not be given twice in different forms", param=name)
            values[name] = value
        self._check_counts(values)
        self._choose_sampling(values)
        num_choices = values.get("num_return_sequences", 1)
        is_single = values.get("do_sample") is False and not _names_beams(values)
        if is_single:  # a request without randomness has one sequence, whatever the number of its choices
            values.pop("num_return_sequences", None)
        return BodyParameters(self, values, num_choices, is_chat, pool_tokens, key_tokens)

    def merge(self, values: Mapping[str, Any]) -> GenerationConfig:
        """The whole config of some values."""
        return GenerationConfig.merge(values, self.settings.generation_config, self.model_config)

    def _choose_sampling(self, values: dict[str, Any]) -> None:
        """As in OpenAI's API a request samples, unless its temperature is 0 or its method does not sample."""
        if "do_sample" in values:
            return
        if values.get("temperature") == 0:
            # Many clients send `top_p` with every request.
            for name in _SAMPLING_FIELDS:
                values.pop(name, None)
            values["do_sample"] = False
            return
        if self._defaults.source("do_sample") == "default" and not self._names_search(values):
            values["do_sample"] = True

    @cached_property
    def _defaults(self) -> GenerationConfig:
        """The config of a request that sets nothing."""
        return self.merge({})

    def _names_search(self, values: Mapping[str, Any]) -> bool:
        """Whether a request names a method that does not sample by itself."""
        names = ("num_beams", "penalty_alpha", "force_words_ids")
        beams, alpha, words = (values.get(name, getattr(self._defaults, name)) for name in names)
        return (isinstance(beams, int) and beams > 1) or bool(alpha) or bool(words)

    def _given(self, body: GenerationBody) -> dict[str, Any]:
        """The parameters of a body's own fields and of those beside them."""
        values = body.parameters()
        for name, value in body.extra_parameters.items():
            check_parameter_name(name, (*FIELDS, *type(body).model_fields))
            if name in values:
                given = "use_beam_search" if name == "num_beams" else _STANDARD_NAMES.get(name, name)
                raise invalid_value(name, f"`{name}` must not be given together with `{given}`")
            values[name] = value
        for name, value in values.items():
            check_size(name, value)
        return values

    def _check_counts(self, values: Mapping[str, Any]) -> None:
        """Raise for counts that are none, or so large that checking them any further costs too much."""
        limits = {
            "num_return_sequences": self.settings.max_sequences,
            "num_beams": self.settings.max_beams,
        }
        for name, limit in limits.items():
            if name not in values:
                continue
            GenerationConfig(**{name: values[name]})
            if values[name] > limit:
                shown = _STANDARD_NAMES.get(name, name)
                raise invalid_value(shown, f"`{shown}` must be at most {limit}, got {values[name]}")


@dataclass(frozen=True)
class BodyParameters:
    """The parameters of one body; its prompts differ in their lengths only."""

    reader: RequestParameters
    values: Mapping[str, Any]
    num_choices: int
    is_chat: bool
    pool_tokens: int | None
    key_tokens: int | None
    _configs: dict[int | None, GenerationConfig] = field(default_factory=dict)  # by default length

    def config(self, prompt_tokens: int) -> GenerationConfig:
        """The whole config of a prompt of that many tokens."""
        length = None if self._has_length else self._default_length(prompt_tokens)
        config = self._configs.get(length)
        if config is None:
            lengths = {} if length is None else {"max_new_tokens": length}
            config = self._configs[length] = self.reader.merge({**self.values, **lengths})
        self._check_length(config, prompt_tokens)
        return config

    def truncate(self, prompt: list[int], num_tokens: int | None) -> list[int]:
        """The last tokens of a prompt; -1: as many as fit before the output, None: all."""
        kept = self.prompt_room(num_tokens).kept
        return prompt if kept is None else prompt[-kept:]

    def prompt_room(self, num_kept: int | None = None) -> PromptRoom:
        """The part of each prompt that is used; `num_kept` as in `truncate`."""
        settings, pool = self.reader.settings, self.pool_tokens
        limits = [size for size in (settings.max_prompt_tokens, self.reader.max_positions, pool) if size]
        kept = self._prompt_room if num_kept == -1 else num_kept
        return PromptRoom(min(limits, default=None), kept)

    @cached_property
    def _prompt_room(self) -> int | None:
        """The most prompt tokens that the context and the server's limit allow; None: there is no limit."""
        most, positions = self.reader.settings.max_prompt_tokens, self.reader.max_positions
        new = 1 if self.is_chat else _DEFAULT_COMPLETION_TOKENS
        if self._has_length:
            config = self.reader.merge(self.values)
            new = config.max_new_tokens or 1
            if config.max_new_tokens is None:  # `max_length` counts the prompt as well
                positions = min(config.max_length, positions or config.max_length)
        rooms = [most, None if positions is None else max(1, positions - new)]
        return min((room for room in rooms if room is not None), default=None)

    @property
    def _has_length(self) -> bool:
        if "max_new_tokens" in self.values or "max_length" in self.values:
            return True
        own = self.reader.settings.generation_config
        return own is not None and own.source("max_new_tokens") != "default"

    @property
    def _num_rows(self) -> int:
        beams = self.values.get("num_beams", 1)
        return max(self.num_choices, beams if isinstance(beams, int) else 1)

    def _default_length(self, prompt_tokens: int) -> int:
        """The number of new tokens of a request that sets none: as many as all limits allow."""
        positions, most = self.reader.max_positions, self.reader.settings.max_output_tokens
        rooms = [_DEFAULT_CONTEXT if positions is None else positions - prompt_tokens]
        if most is not None:
            rooms.append(most)
        if self.pool_tokens is not None:
            # Each row may end in a block of its own.
            rooms.append(self.pool_tokens // self._num_rows - prompt_tokens - 64)
        if self.key_tokens is not None:
            rooms.append((self.key_tokens - prompt_tokens) // self.num_choices)
        room = max(1, min(rooms))
        return room if self.is_chat else min(_DEFAULT_COMPLETION_TOKENS, room)

    def _check_length(self, config: GenerationConfig, prompt_tokens: int) -> None:
        """Raise for a prompt that is too long, alone or with what may follow it."""
        settings, total = self.reader.settings, self.reader.max_positions
        if settings.max_prompt_tokens is not None and prompt_tokens > settings.max_prompt_tokens:
            raise too_long_error(settings.max_prompt_tokens, prompt_tokens)
        new, most = max_new_tokens(config, prompt_tokens), settings.max_output_tokens
        if most is not None and new > most:
            raise invalid_value("max_tokens", f"`max_tokens` must be at most {most}, got {new}")
        if total is not None and prompt_tokens + max(new, 0) > total:
            message = (
                f"this model's context has {total} tokens, and the request needs {prompt_tokens} for its "
                f"prompt and {new} for its output: shorten the prompt or lower `max_tokens`"
            )
            raise ApiError(400, message, param="max_tokens", code="context_length_exceeded")


def max_new_tokens(config: GenerationConfig, prompt_tokens: int) -> int:
    """The most new tokens of one sequence."""
    if config.max_new_tokens is not None:
        return int(config.max_new_tokens)
    return int(config.max_length) - prompt_tokens


def _names_beams(values: Mapping[str, Any]) -> bool:
    return isinstance(values.get("num_beams"), int) and values["num_beams"] > 1


def check_parameter_name(name: str, known: Collection[str]) -> None:
    """Raise for a name that is no parameter, or one that a request must not set."""
    if name in _REFUSED:
        message = f"`{name}` must not be set by a request: {_REFUSED.get(name, 'leave it out')}"
        raise ApiError(400, message, param=name, code="unsupported_parameter")
    if name not in known:
        raise _unknown_name_error(name, known)


def _unknown_name_error(name: str, known: Collection[str]) -> ApiError:
    close = difflib.get_close_matches(name, sorted(set(known)), n=1) if len(name) <= 80 else []
    do = f"did you mean `{close[0]}`?" if close else "leave it out"
    shown = name if len(name) <= 80 else name[:77] + "..."
    return ApiError(
        400, f"`{shown}` is not a parameter of this endpoint: {do}", param=shown, code="unknown_parameter"
    )


class _StoredTrace(NamedTuple):
    key: str  # the name of the key it belongs to
    trace: Trace


class TraceStore:
    """The last finished traces."""

    def __init__(self, size: int, max_bytes: int) -> None:
        self._size, self._max_bytes = size, max_bytes
        self._traces: OrderedDict[str, _StoredTrace] = OrderedDict()

    def __len__(self) -> int:
        return len(self._traces)

    def new_tracer(self, tokenizer: Any) -> Tracer:
        """The recorder of a new trace."""
        if not self._size:
            message = "this server records no traces: start it with --traces"
            raise ApiError(400, message, param="trace", code="traces_disabled")
        return Tracer(limit=self._max_bytes, tokenizer=tokenizer)

    def add(self, key: ApiKey, tracer: Tracer) -> str:
        """Keep the trace of a finished request; returns its id."""
        trace_id = secrets.token_urlsafe(18)
        self._traces[trace_id] = _StoredTrace(key.name, tracer.trace)
        while len(self._traces) > self._size:
            self._traces.popitem(last=False)
        return trace_id

    def get(self, key: ApiKey, trace_id: str) -> Trace:
        """A trace of that key; another key's is not found."""
        stored = self._traces.get(trace_id)
        if stored is None or stored.key != key.name:
            raise ApiError(404, "there is no such trace", code="trace_not_found")
        return stored.trace


Result = TypeVar("Result")


_NUM_ENCODER_THREADS: Final = 2


@dataclass(eq=False)
class ServedModel:
    """A model that a server offers, under its names."""

    engine: AsyncEngine
    tokenizer: Any
    settings: ServerSettings
    model_config: GenerationConfig
    context_size: int | None = None  # the positions that the model was trained for
    chat_template: str | None = None  # in place of the tokenizer's
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        traits = self.engine.traits
        limits = [size for size in (traits.max_positions, self.context_size) if size is not None]
        self.max_positions = min(limits, default=None)
        template = ChatTemplate.of_tokenizer(self.tokenizer, self.chat_template)
        self.prompts = PromptEncoder(self.tokenizer, traits.vocab_size, template)
        self.parameters = RequestParameters(self.settings, self.model_config, self.max_positions)
        # Read now: the first request with a text to match would make all others wait for it.
        self.token_bytes = TokenBytes.from_tokenizer(self.tokenizer)
        self.traces = TraceStore(self.settings.traces, self.settings.max_trace_bytes)

    @property
    def is_healthy(self) -> bool:
        """Whether its engine runs."""
        return self.engine.is_healthy

    @property
    def is_full(self) -> bool:
        """Whether its engine would refuse a request."""
        return self.engine.is_full

    def close(self) -> None:
        """End the engine and the processes that render; callers that wait get an error."""
        self.engine.close()
        if self.prompts.template is not None:
            self.prompts.template.close()
        self._chat_threads.shutdown(wait=False)
        self._encoder_threads.shutdown(wait=False)

    async def in_encoder_thread(self, work: Callable[[], Result]) -> Result:
        """The result of a function that encodes texts.

        In few threads: the tokenizers library has a cache of words for each.
        """
        return await asyncio.get_running_loop().run_in_executor(self._encoder_threads, work)

    async def encode_chat(self, room: PromptRoom, *args: Any, **options: Any) -> list[int]:
        """The tokens of a conversation; further arguments are those of `PromptEncoder.chat_text`."""
        # Threads of their own: texts without a template need not wait for templates that take long.
        render = partial(self.prompts.chat_text, *args, **options)
        text = await asyncio.get_running_loop().run_in_executor(self._chat_threads, render)
        # The template writes special tokens itself.
        return await self.in_encoder_thread(partial(self.prompts.text, text, room, add_special_tokens=False))

    def encode_negative(self, body: GenerationBody, limit: int | None) -> list[int] | None:
        """The tokens of the negative prompt."""
        text = body.negative_prompt
        return None if text is None else self.prompts.text(text, PromptRoom(limit))

    def token_text(self, token: int) -> str:
        """The text of one token; bytes that are no characters are replaced."""
        text = self._token_texts.get(token)
        if text is None:
            data = self.token_data(token)
            is_plain = data and token not in self.token_bytes.special_ids
            text = data.decode("utf-8", "replace") if is_plain else self.prompts.decode([token])
            self._token_texts[token] = text
        return text

    def token_data(self, token: int) -> bytes:
        """The bytes of one token."""
        return self.token_bytes.bytes[token] if token < self.token_bytes.size else b""

    @cached_property
    def _token_texts(self) -> dict[int, str]:
        return {}  # of the tokens that were shown

    @cached_property
    def _encoder_threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_NUM_ENCODER_THREADS, thread_name_prefix="encoder")

    @cached_property
    def _chat_threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(NUM_PROCESSES, thread_name_prefix="chat-template")

    def extras(self, config: GenerationConfig) -> dict[str, Any]:
        """The server's additions to a request: its draft model, for methods that can use one."""
        extras = dict(self.settings.request_extras)
        if "assistant_model" in extras and not _can_draft(config):
            extras.pop("assistant_model")
            extras.pop("assistant_tokenizer", None)
        return extras


def _can_draft(config: GenerationConfig) -> bool:
    """Whether a draft model can guess for a request, which has no other drafter."""
    return (
        (config.num_beams or 1) == 1
        and not config.penalty_alpha
        and not config.banned_phrases
        and not any(getattr(config, name) for name in DRAFTER_FIELDS)
    )
