"""A model behind an engine, its tokenizer, its traces, and requests made of bodies."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Final, NamedTuple, TypeVar

from descant.config.generation_config import GenerationConfig
from descant.engine.serving.async_engine import AsyncEngine
from descant.serve.http.errors import ApiError
from descant.serve.http.keys import ApiKey
from descant.serve.model.parameters import RequestParameters
from descant.serve.model.prompts import NUM_PROCESSES, ChatTemplate, PromptEncoder, PromptRoom
from descant.serve.schema.bodies import GenerationBody
from descant.serve.settings import ServerSettings
from descant.tokenization.token_bytes import TokenBytes
from descant.trace.trace import Trace
from descant.trace.tracer import Tracer

__all__ = ["ServedModel", "TraceStore"]


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
        number = secrets.token_urlsafe(18)
        self._traces[number] = _StoredTrace(key.name, tracer.trace)
        while len(self._traces) > self._size:
            self._traces.popitem(last=False)
        return number

    def get(self, key: ApiKey, number: str) -> Trace:
        """A trace of that key; another key's is not found."""
        stored = self._traces.get(number)
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
        limits = [one for one in (traits.max_positions, self.context_size) if one is not None]
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
            text = self._token_texts[token] = self._make_token_text(token)
        return text

    def _make_token_text(self, token: int) -> str:
        data = self.token_data(token)
        if not data or token in self.token_bytes.special_ids:
            return self.prompts.decode([token])
        return data.decode("utf-8", "replace")

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
        """What the server adds to a request: its draft model, for methods that can use one."""
        extras = dict(self.settings.request_extras)
        if "assistant_model" in extras and not _can_draft(config):
            extras.pop("assistant_model")
            extras.pop("assistant_tokenizer", None)
        return extras


def _can_draft(config: GenerationConfig) -> bool:
    """Whether a draft model can guess for a request, which has no other drafter."""
    others = ("prompt_lookup_num_tokens", "suffix_lookup_num_tokens", "assistant_early_exit")
    return (
        (config.num_beams or 1) == 1
        and not config.penalty_alpha
        and not config.banned_phrases
        and not any(getattr(config, name) for name in others)
    )
