"""`/v1/chat/completions`."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest

from descant.serve.exchange import Exchange, read_json
from descant.serve.generation import ChoiceUpdate, TraceUpdate
from descant.serve.grammar_fields import grammar_of
from descant.serve.json_response import JsonResponse, encode_json
from descant.serve.logprob_format import chat_logprobs
from descant.serve.run_group import RunGroup
from descant.serve.schema.chat import ChatBody
from descant.serve.schema.common import parse_body
from descant.serve.served_model import EncodedPrompts, ServedModel, reserve_tokens
from descant.serve.settings import check_model_name
from descant.serve.streaming import EventStream, last_chunks, trace_chunk, until_disconnect, usage_field
from descant.serve.tool_stream import ToolCallStream, tool_call_json

__all__ = ["ChatCall", "chat_completions"]


@dataclass
class _ChatChoice:
    """One answer as it grows."""

    text: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    tools: ToolCallStream | None = None
    finish_reason: str | None = None


class ChatCall:
    """One conversation on its way through the engine, for the endpoints that answer conversations."""

    def __init__(self, model: ServedModel, exchange: Exchange, body: ChatBody) -> None:
        self.model, self.exchange, self.body = model, exchange, body
        self.id = f"chatcmpl-{exchange.id}"
        self.created = int(time.time())
        self.group: RunGroup | None = None
        self.choices: list[_ChatChoice] = []
        self.trace_id: str | None = None

    async def start(self) -> None:
        """Encode the conversation and check all parameters."""
        body, model = self.body, self.model
        check_model_name(model.settings, body.model)
        grammar = grammar_of(body)
        implied = {} if grammar is None else {"grammar": grammar}
        parameters = model.read_parameters(self.exchange, body, implied, is_chat=True)
        room = parameters.prompt_room(body.truncate_prompt_tokens)
        prompt = await model.encode_chat(
            room,
            body.messages,
            body.tools or (),
            variables=body.template_variables,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
        )
        if model.settings.log_prompts:
            self.exchange.prompt = [message.text for message in body.messages]
        negative = None
        if body.negative_prompt is not None:
            negative = await model.in_encoder_thread(partial(model.encode_negative, body, room.limit))
        [run] = model.runs(self.exchange, body, parameters, EncodedPrompts([prompt], negative))
        reserve_tokens(self.exchange, [run])
        self.group = RunGroup(self.exchange, [run])
        has_calls = grammar is not None and "tools" in grammar
        self.choices = [
            _ChatChoice(tools=ToolCallStream() if has_calls else None) for _ in range(run.num_choices)
        ]

    async def deltas(self) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        """What each answer gains: content, tool calls, log-probabilities and in the end a finish reason.

        Trace records have the index -1.
        """
        assert self.group is not None
        async with aclosing(self.group.updates()) as updates:  # type: ignore[type-var]
            async for _, update in updates:
                if isinstance(update, TraceUpdate):
                    yield -1, {"trace": update.records}
                    continue
                choice = self.choices[update.choice]
                if choice.finish_reason is not None:
                    continue  # it has ended after its first call
                delta = self._delta(choice, update)
                if delta:
                    yield update.choice, delta
                if all(one.finish_reason is not None for one in self.choices):
                    break
        run = self.group.runs[0]
        if run.trace is not None:
            assert self.exchange.key is not None
            self.trace_id = self.model.traces.add(self.exchange.key, run.trace)

    def _delta(self, choice: _ChatChoice, update: ChoiceUpdate) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        content, ended = update.text, update.finish_reason is not None
        if choice.tools is not None:
            content, calls = choice.tools.put(update.text)
            if ended:
                content += choice.tools.end()
            if calls:
                if not self.body.parallel_tool_calls:
                    calls, ended = calls[:1], True
                first = len(choice.calls)
                new = [tool_call_json(call, first + number) for number, call in enumerate(calls)]
                choice.calls += new
                delta["tool_calls"] = new
        if content:
            choice.text.append(content)
            delta["content"] = content
        if self.body.return_token_ids:
            choice.token_ids += update.tokens
            delta["token_ids"] = list(update.tokens)
        if self.body.logprobs:
            entries = chat_logprobs(self.model, update.tokens, update.logprobs)
            choice.logprobs += entries
            delta["logprobs"] = entries
        if ended:
            choice.finish_reason = "tool_calls" if choice.calls else update.finish_reason
            delta["finish_reason"] = choice.finish_reason
        return delta

    def message(self, choice: _ChatChoice) -> dict[str, Any]:
        """A whole answer."""
        text = "".join(choice.text)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if choice.calls:
            message["content"] = text or None
            message["tool_calls"] = [
                {name: value for name, value in call.items() if name != "index"} for call in choice.calls
            ]
        return message

    async def answer(self) -> dict[str, Any]:
        """The response without streaming."""
        await self.start()
        async for _ in self.deltas():
            pass
        assert self.group is not None
        choices = [self._choice_json(index, choice) for index, choice in enumerate(self.choices)]
        answer = {**self._head("chat.completion"), "choices": choices, "usage": self.group.usage}
        if self.body.return_token_ids:
            answer["prompt_token_ids"] = list(self.group.runs[0].request.prompt)
        return answer

    def _choice_json(self, index: int, choice: _ChatChoice) -> dict[str, Any]:
        one = {
            "index": index,
            "message": self.message(choice),
            "logprobs": {"content": choice.logprobs, "refusal": None} if self.body.logprobs else None,
            "finish_reason": choice.finish_reason,
        }
        return {**one, "token_ids": choice.token_ids} if self.body.return_token_ids else one

    def _head(self, kind: str) -> dict[str, Any]:
        name = self.model.settings.model_name
        head = {"id": self.id, "object": kind, "created": self.created, "model": name}
        return head if self.trace_id is None else {**head, "trace_id": self.trace_id}

    async def events(self) -> AsyncIterator[bytes]:
        """The response as server-sent events."""
        await self.start()
        assert self.group is not None
        head = json.dumps(self._head("chat.completion.chunk"))[:-1].encode()
        options = self.body.stream_options
        has_usage = options is not None and options.usage_in_chunks
        has_role: set[int] = set()
        async with aclosing(self.deltas()) as deltas:  # type: ignore[type-var]
            async for index, delta in deltas:
                if index < 0:
                    yield trace_chunk(head, delta["trace"])
                    continue
                if index not in has_role:
                    has_role.add(index)
                    delta["role"] = "assistant"
                usage = usage_field(self.group.usage) if has_usage else b""
                yield b'data: %b, "choices": [%b]%b}\n\n' % (head, _chunk_choice(index, delta), usage)
        usage_at_end = self.group.usage if options is not None and options.include_usage else None
        for chunk in last_chunks(head, self.trace_id, usage_at_end):
            yield chunk


def _chunk_choice(index: int, delta: dict[str, Any]) -> bytes:
    """One choice of a chunk."""
    reason, logprobs = delta.pop("finish_reason", None), delta.pop("logprobs", None)
    ids = delta.pop("token_ids", None)
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
    if ids is not None:
        choice["token_ids"] = ids
    if logprobs is not None:
        choice["logprobs"] = {"content": logprobs, "refusal": None}
    return encode_json(choice)


async def chat_completions(http: HttpRequest) -> Any:
    """Answer a conversation."""
    model: ServedModel = http.app.state.model
    exchange = Exchange.of(http.scope)
    body = parse_body(ChatBody, await read_json(http, model.settings.max_body_bytes))
    exchange.field_names = body.field_names
    call = ChatCall(model, exchange, body)
    if body.stream:
        return EventStream(call.events())
    return JsonResponse(await until_disconnect(http.receive, call.answer()))
