"""What a server offers: a model behind an engine, its tokenizer, and requests made of bodies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Final, NamedTuple, TypeVar

from descant.config.generation_config import GenerationConfig
from descant.engine.async_engine import AsyncEngine
from descant.engine.request import Request
from descant.serve.api_errors import ApiError
from descant.serve.chat_template import ChatTemplate
from descant.serve.exchange import Exchange
from descant.serve.generation import PromptRun
from descant.serve.parameters import BodyParameters, RequestLimits, RequestParameters, max_new_tokens
from descant.serve.prompts import PromptEncoder, PromptRoom
from descant.serve.schema.common import GenerationBody
from descant.serve.settings import ServerSettings
from descant.serve.template_process import NUM_PROCESSES
from descant.serve.trace_store import TraceStore
from descant.tokenization.token_bytes import TokenBytes

__all__ = ["EncodedPrompts", "ServedModel", "reserve_tokens"]

Result = TypeVar("Result")


_NUM_ENCODER_THREADS: Final = 2
_PROMPTS_OF_A_LEVEL: Final = 4  # prompts of a body with the same priority


class EncodedPrompts(NamedTuple):
    """The prompts of a body as tokens."""

    prompts: list[list[int]]
    negative: list[int] | None = None  # of `guidance_scale`
    num_logprobs: int | None = None  # alternatives of each prompt token; None: no log-probabilities


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

    def read_parameters(
        self, exchange: Exchange, body: GenerationBody, implied: Mapping[str, Any], *, is_chat: bool
    ) -> BodyParameters:
        """The generation parameters of a body, whose model name was checked."""
        assert exchange.key is not None
        exchange.model_name = body.model
        scheduler = self.engine.scheduler_config
        pool = None if scheduler.num_blocks is None else scheduler.num_blocks * scheduler.block_size
        limits = RequestLimits(pool, exchange.key.limits.tokens_per_minute)
        return self.parameters.read(body, implied, is_chat=is_chat, limits=limits)

    def runs(
        self, exchange: Exchange, body: GenerationBody, parameters: BodyParameters, prompts: EncodedPrompts
    ) -> list[PromptRun]:
        """The run of each prompt of a body."""
        if body.priority is not None and body.priority < 0:
            raise ApiError(400, f"`priority` must be >= 0, got {body.priority}", param="priority")
        salt = exchange.salt + (body.cache_salt or "").encode("utf-8", "surrogatepass")
        negative = prompts.negative
        runs = []
        for index, whole in enumerate(prompts.prompts):
            prompt = parameters.truncate(whole, body.truncate_prompt_tokens)
            config = parameters.config(max(len(prompt), len(negative or ())))
            request = Request(
                prompt,
                config,
                inputs={} if negative is None else {"negative_prompt_ids": negative},
                tokenizer=self.tokenizer,
                # So that a body of many prompts does not make the requests behind it wait for all of them.
                priority=(body.priority or 0) + index // _PROMPTS_OF_A_LEVEL,
                deadline=self.settings.max_request_seconds,
                cache_salt=salt,
                config_merged=True,
                prompt_logprobs=prompts.num_logprobs,
                **self._extras(config),
            )
            trace = self.traces.new_tracer(self.tokenizer) if body.trace else None
            choices, skips = parameters.num_choices, body.skip_special_tokens
            runs.append(PromptRun(self.engine, request, choices, trace, skips))
        return runs

    def _extras(self, config: GenerationConfig) -> dict[str, Any]:
        """What the server adds to a request: its draft model, for methods that can use one."""
        extras = dict(self.settings.request_extras)
        if "assistant_model" in extras and not _can_draft(config):
            extras.pop("assistant_model")
            extras.pop("assistant_tokenizer", None)
        return extras


def reserve_tokens(exchange: Exchange, runs: Sequence[PromptRun]) -> None:
    """Reserve the tokens of all prompts of a body and of the most that may follow them."""
    prompts = [run.num_prompt_tokens for run in runs]
    new = [
        run.num_choices * max(0, max_new_tokens(run.request.generation_config, len(run.request.prompt)))
        for run in runs
    ]
    exchange.reserve(sum(prompts), sum(new))


def _can_draft(config: GenerationConfig) -> bool:
    """Whether a draft model can guess for a request, which has no other drafter."""
    others = ("prompt_lookup_num_tokens", "suffix_lookup_num_tokens", "assistant_early_exit")
    return (
        (config.num_beams or 1) == 1
        and not config.penalty_alpha
        and not config.banned_phrases
        and not any(getattr(config, name) for name in others)
    )
