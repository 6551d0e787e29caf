"""`/v1/completions`."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest

from descant.serve.api_errors import ApiError
from descant.serve.exchange import Exchange, read_json
from descant.serve.generation import ChoiceUpdate, PromptRun, TraceUpdate, sequence_logprobs
from descant.serve.grammar_fields import format_grammar
from descant.serve.json_response import JsonResponse, encode_json
from descant.serve.logprob_format import CompletionLogprobs
from descant.serve.parameters import BodyParameters
from descant.serve.run_group import RunGroup
from descant.serve.schema.chat import ResponseFormat
from descant.serve.schema.common import parse_body
from descant.serve.schema.completion import CompletionBody
from descant.serve.served_model import EncodedPrompts, ServedModel, reserve_tokens
from descant.serve.settings import check_model_name
from descant.serve.streaming import EventStream, last_chunks, trace_chunk, until_disconnect, usage_field

__all__ = ["completions"]


@dataclass
class _Completion:
    """One text as it grows."""

    run: PromptRun
    logprobs: CompletionLogprobs | None
    text: list[str] = field(default_factory=list)
    entries: list[dict[str, Any]] = field(default_factory=list)  # of its log-probabilities, piece by piece
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    held: list[ChoiceUpdate] = field(default_factory=list)  # that wait for the prompt's log-probabilities


class CompletionCall:
    """The prompts of one request on their way through the engine."""

    def __init__(self, model: ServedModel, exchange: Exchange, body: CompletionBody) -> None:
        self.model, self.exchange, self.body = model, exchange, body
        self.id = f"cmpl-{exchange.id}"
        self.created = int(time.time())
        self.group: RunGroup | None = None
        self.completions: list[_Completion] = []
        self.trace_id: str | None = None

    async def start(self) -> None:
        """Encode the prompts and check all parameters."""
        body, model = self.body, self.model
        check_model_name(model.settings, body.model)
        self._check()
        grammar = None
        if body.response_format is not None:
            grammar = format_grammar(parse_body(ResponseFormat, body.response_format))
        implied = {} if grammar is None else {"grammar": grammar}
        parameters = model.read_parameters(self.exchange, body, implied, is_chat=False)
        if model.settings.log_prompts:
            self.exchange.prompt = body.prompts
        # In a thread: so many prompts may be long, each with texts to encode and parameters to merge.
        runs = await model.in_encoder_thread(partial(self._make_runs, parameters))
        reserve_tokens(self.exchange, runs)
        self.group = RunGroup(self.exchange, runs)
        for run in runs:
            for _ in range(run.num_choices):
                logprobs = None if body.logprobs is None else CompletionLogprobs(model)
                self.completions.append(_Completion(run, logprobs))

    def _check(self) -> None:
        body, settings = self.body, self.model.settings
        if len(body.prompts) > settings.max_prompts or not body.prompts:
            message = f"`prompt` must hold 1 to {settings.max_prompts} prompts, got {len(body.prompts)}"
            raise ApiError(400, message, param="prompt", code="invalid_value")
        if body.trace and len(body.prompts) > 1:
            raise ApiError(400, "`trace` must have one prompt", param="trace", code="invalid_value")

    def _make_runs(self, parameters: BodyParameters) -> list[PromptRun]:
        model, body, encoder = self.model, self.body, self.model.prompts
        room = parameters.prompt_room(body.truncate_prompt_tokens)
        prompts = [
            encoder.text(prompt, room, add_special_tokens=body.add_special_tokens)
            if isinstance(prompt, str)
            else encoder.ids(prompt, room)
            for prompt in body.prompts
        ]
        negative = model.encode_negative(body, room.limit)
        encoded = EncodedPrompts(prompts, negative, body.logprobs if body.echo else None)
        return model.runs(self.exchange, body, parameters, encoded)

    async def pieces(self) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        """What each text gains, by the index of its choice; trace records have the index -1."""
        assert self.group is not None
        num_choices = self.group.runs[0].num_choices
        async with aclosing(self.group.updates()) as updates:  # type: ignore[type-var]
            async for prompt, update in updates:
                if isinstance(update, TraceUpdate):
                    yield -1, {"trace": update.records}
                    continue
                index = prompt * num_choices + update.choice
                piece = self._piece(self.completions[index], update)
                if piece:
                    yield index, piece
        run = self.group.runs[0]
        if run.trace is not None:
            assert self.exchange.key is not None
            self.trace_id = self.model.traces.add(self.exchange.key, run.trace)

    def _piece(self, one: _Completion, update: ChoiceUpdate) -> dict[str, Any]:
        """The next piece of a text; the prompt comes first where it is echoed."""
        if self.body.echo and one.logprobs is not None:
            # The prompt's log-probabilities are first and known last.
            one.held.append(update)
            if update.finish_reason is None:
                return {}
            update = _joined(one.held)
        if self._is_scoring:
            update = update._replace(text="", tokens=(), logprobs=())
        text = update.text
        if self.body.echo and not one.text:
            text = self._echo(one) + text
        piece: dict[str, Any] = {}
        if one.logprobs is not None:
            for token, entry in zip(update.tokens, update.logprobs, strict=True):
                one.logprobs.add(token, entry)
            piece["logprobs"] = one.logprobs.take()
            one.entries.append(piece["logprobs"])
        if self.body.return_token_ids:
            one.token_ids += update.tokens
            piece["token_ids"] = list(update.tokens)
        if text or update.finish_reason is not None:
            one.text.append(text)
            piece["text"] = text
        if update.finish_reason is not None:
            one.finish_reason = piece["finish_reason"] = update.finish_reason
        return piece

    def _echo(self, one: _Completion) -> str:
        """The text of the prompt; its tokens are added to the log-probabilities."""
        ids = list(one.run.request.prompt)
        if one.logprobs is not None:
            for token, entry in zip(ids, (None, *sequence_logprobs(one.run.prompt_logprobs)), strict=True):
                one.logprobs.add(int(token), entry)
        return self.model.prompts.decode(ids, skip_special_tokens=True)

    @property
    def _is_scoring(self) -> bool:
        """Whether only the prompt is wanted, so that the one token that is generated is dropped."""
        return self.body.echo and self.body.max_tokens == 0

    @property
    def _usage(self) -> dict[str, Any]:
        assert self.group is not None
        usage = self.group.usage
        if self._is_scoring:
            usage = {**usage, "completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage

    def _head(self) -> dict[str, Any]:
        name = self.model.settings.model_name
        head = {"id": self.id, "object": "text_completion", "created": self.created, "model": name}
        return head if self.trace_id is None else {**head, "trace_id": self.trace_id}

    async def answer(self) -> dict[str, Any]:
        """The response without streaming."""
        await self.start()
        async for _ in self.pieces():
            pass
        choices = [self._choice_json(index, one) for index, one in enumerate(self.completions)]
        return {**self._head(), "choices": choices, "usage": self._usage}

    def _choice_json(self, index: int, one: _Completion) -> dict[str, Any]:
        choice = {
            "index": index,
            "text": "".join(one.text),
            "logprobs": None if one.logprobs is None else _join_entries(one.entries),
            "finish_reason": one.finish_reason,
        }
        if self.body.return_token_ids:
            choice |= {"token_ids": one.token_ids, "prompt_token_ids": list(one.run.request.prompt)}
        return choice

    async def events(self) -> AsyncIterator[bytes]:
        """The response as server-sent events."""
        await self.start()
        head = json.dumps(self._head())[:-1].encode()
        options = self.body.stream_options
        has_usage = options is not None and options.usage_in_chunks
        async with aclosing(self.pieces()) as pieces:  # type: ignore[type-var]
            async for index, piece in pieces:
                if index < 0:
                    yield trace_chunk(head, piece["trace"])
                    continue
                choice = {"index": index, "text": "", "logprobs": None, "finish_reason": None, **piece}
                usage = usage_field(self._usage) if has_usage else b""
                yield b'data: %b, "choices": [%b]%b}\n\n' % (head, encode_json(choice), usage)
        usage_at_end = self._usage if options is not None and options.include_usage else None
        for chunk in last_chunks(head, self.trace_id, usage_at_end):
            yield chunk


def _joined(updates: list[ChoiceUpdate]) -> ChoiceUpdate:
    """Several updates of one sequence as one."""
    return updates[-1]._replace(
        text="".join(one.text for one in updates),
        tokens=tuple(token for one in updates for token in one.tokens),
        logprobs=tuple(entry for one in updates for entry in one.logprobs),
    )


def _join_entries(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [entry for piece in pieces for entry in piece[name]] for name in names}


async def completions(http: HttpRequest) -> Any:
    """Continue prompts."""
    model: ServedModel = http.app.state.model
    exchange = Exchange.of(http.scope)
    body = parse_body(CompletionBody, await read_json(http, model.settings.max_body_bytes))
    exchange.field_names = body.field_names
    call = CompletionCall(model, exchange, body)
    if body.stream:
        return EventStream(call.events())
    return JsonResponse(await until_disconnect(http.receive, call.answer()))
