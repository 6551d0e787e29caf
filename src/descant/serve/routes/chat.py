"""`/v1/chat/completions`."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from typing import Any, ClassVar, Final

from descant.engine.protocol import TokenLogprobs
from descant.serve.bodies import AllowedTools, ChatBody, GenerationBody, ResponseFormat
from descant.serve.http.errors import ApiError, encode_json, invalid_value
from descant.serve.model.served_model import ServedModel
from descant.serve.routes.generation import ChoiceUpdate, GenerationCall, PromptRun
from descant.tokenization.response_syntax import HERMES, ResponseSyntax, ToolCall


def tool_call_json(call: ToolCall, index: int | None = None) -> dict[str, Any]:
    """A call in OpenAI's form; with its index in a stream."""
    # Not as ASCII, and with lone surrogates escaped, so that the text can be encoded.
    arguments = encode_json(call.arguments).decode()
    function = {"name": call.name, "arguments": arguments}
    shown = {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
    return shown if index is None else {"index": index, **shown}


def grammar_of(body: ChatBody) -> dict[str, Any] | None:
    """The grammar of a body's response format or tools; None: its text is free."""
    grammar = format_grammar(body.response_format)
    tools = _tool_grammar(body)
    if grammar is None or tools is None:
        return grammar if tools is None else tools
    # The format is that of an answer without calls.
    return {**tools, "answer": grammar["json_schema"]} if tools["tool_choice"] == "auto" else tools


def format_grammar(form: ResponseFormat | None) -> dict[str, Any] | None:
    """The grammar of a response format."""
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"json_schema": {"type": "object"}}
    if form.json_schema is None:
        message = "`response_format.json_schema` must be given with the type `json_schema`"
        raise ApiError(400, message, param="response_format", code="missing_required_parameter")
    return {"json_schema": form.json_schema.schema_}


def _tool_grammar(body: ChatBody) -> dict[str, Any] | None:
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise invalid_value("tool_choice", "`tool_choice` has no use without `tools`")
        return None
    if choice == "none":
        return None
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools]
    if isinstance(choice, AllowedTools):
        allowed = {tool.function.name for tool in choice.allowed_tools.tools}
        unknown = sorted(allowed - {tool.function.name for tool in body.tools})
        if unknown or not allowed:
            got = f"`{unknown[0]}`" if unknown else "no names"
            raise invalid_value("tool_choice", f"`allowed_tools` must name some of the `tools`, got {got}")
        tools = [tool for tool in tools if tool["function"]["name"] in allowed]
        return {"tools": tools, "tool_choice": choice.allowed_tools.mode}
    plain = choice if choice is None or isinstance(choice, str) else choice.model_dump()
    return {"tools": tools, "tool_choice": plain or "auto"}


_LEAST: Final = -9999.0  # JSON has no infinity; OpenAI's API writes this number


def finite_logprob(logprob: float) -> float:
    """A log-probability as JSON can hold it."""
    return logprob if isfinite(logprob) else _LEAST


def chat_logprobs(
    model: ServedModel, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> list[dict[str, Any]]:
    """The entries of `logprobs.content`: of the model itself, before temperature and processors."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text, data = model.token_text(token), list(model.token_data(token))
        return {"token": text, "logprob": finite_logprob(logprob), "bytes": data}

    return [
        {
            **entry(token, logprob.raw),
            "top_logprobs": [entry(other, raw) for other, raw, _ in logprob.top],
        }
        for token, logprob in zip(tokens, logprobs, strict=True)
    ]


_TEXTS: Final = ("reasoning", "content")
_REASONING_NAMES: Final = ("reasoning_content", "reasoning")  # the older name, and that of newer clients


@dataclass
class _ChatChoice:
    """One answer as it grows."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    has_role: bool = False  # whether a chunk has named the role


class ChatCall(GenerationCall):
    """One conversation on its way through the engine, for the endpoints that answer conversations."""

    body: ChatBody
    body_type: ClassVar[type[GenerationBody]] = ChatBody
    is_chat = True
    id_prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    async def encode(self) -> list[PromptRun]:
        """The run of the conversation."""
        body, model = self.body, self.model
        grammar = grammar_of(body)
        parameters = self.read_parameters(grammar)
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
            self.state.prompt = [message.text for message in body.messages]
        negative = None
        if body.negative_prompt is not None:
            negative = await model.in_encoder_thread(partial(model.encode_negative, body, room.limit))
        has_calls = grammar is not None and "tools" in grammar
        return self.make_runs(parameters, [prompt], negative, syntax=self._syntax(has_calls))

    def _syntax(self, has_calls: bool) -> ResponseSyntax | None:
        """The regions of the answer: the calls of the grammar, and the thought unless it is content."""
        own = ResponseSyntax.of_tokenizer(self.model.tokenizer) or ResponseSyntax()
        thought = own.thought if self.body.separate_reasoning else None
        calls = HERMES if has_calls else None
        return None if thought is None and calls is None else ResponseSyntax(thought, calls)

    def new_choice(self, run: PromptRun) -> _ChatChoice:  # noqa: ARG002 - a method of the base
        """An answer without text."""
        return _ChatChoice()

    def piece(self, choice: _ChatChoice, update: ChoiceUpdate) -> dict[str, Any]:
        """The content, tool calls and log-probabilities that an answer gains, in the end a finish reason."""
        delta: dict[str, Any] = {}
        ended = update.finish_reason is not None
        texts = {name: "".join(part.text for part in update.parts if part.region == name) for name in _TEXTS}
        content = update.text + texts["content"]
        if texts["reasoning"] and self.body.include_reasoning:
            choice.reasoning.append(texts["reasoning"])
            delta |= dict.fromkeys(_REASONING_NAMES, texts["reasoning"])
        calls = [call for part in update.parts for call in part.calls]
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
        if choice.reasoning:
            message |= dict.fromkeys(_REASONING_NAMES, "".join(choice.reasoning))
        if choice.calls:
            message["content"] = text or None
            message["tool_calls"] = [
                {name: value for name, value in call.items() if name != "index"} for call in choice.calls
            ]
        return message

    async def answer(self) -> dict[str, Any]:
        """The response without streaming."""
        answer = await super().answer()
        if self.body.return_token_ids:
            answer["prompt_token_ids"] = list(self.runs[0].request.prompt)
        return answer

    def choice_json(self, index: int, choice: _ChatChoice) -> dict[str, Any]:
        """A whole answer with its message."""
        answer = {
            "index": index,
            "message": self.message(choice),
            "logprobs": {"content": choice.logprobs, "refusal": None} if self.body.logprobs else None,
            "finish_reason": choice.finish_reason,
        }
        return {**answer, "token_ids": choice.token_ids} if self.body.return_token_ids else answer

    def chunk_json(self, index: int, piece: dict[str, Any]) -> dict[str, Any]:
        """A piece of an answer, the first with the role."""
        if not self.choices[index].has_role:
            self.choices[index].has_role = True
            piece["role"] = "assistant"
        reason, logprobs = piece.pop("finish_reason", None), piece.pop("logprobs", None)
        ids = piece.pop("token_ids", None)
        content = None if logprobs is None else {"content": logprobs, "refusal": None}
        chunk = {"index": index, "delta": piece, "logprobs": content, "finish_reason": reason}
        return chunk if ids is None else {**chunk, "token_ids": ids}
