"""A conversation: its messages, the parameters of the next reply, and the replies of the model."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from descant.api.chat_prompt import ChatPrompt
from descant.api.prompt import Message, user_messages
from descant.api.stream import stream
from descant.cli import options, terminal
from descant.cli.default_length import LENGTH_FIELDS
from descant.cli.function_recipe import FunctionRecipe
from descant.cli.stream_printer import StreamPrinter
from descant.config.generation_config import FIELDS, GenerationConfig
from descant.config.registry import unknown_field_error
from descant.decoding.grammars.tool_calls import ToolCall, parse_tool_calls
from descant.errors import ConfigError, InputError

__all__ = ["Conversation", "check_values"]

DEFAULT_NEW_TOKENS: Final = 512  # per reply, if no length is given


class Conversation:
    """The messages so far, and the generation parameters of the next reply.

    `is_interactive`: an interrupt ends a reply, whose text so far is kept; else it ends the run.
    """

    def __init__(
        self,
        model: Any,
        prompt: ChatPrompt,
        file_config: GenerationConfig | None,
        values: Mapping[str, Any],
        request_extras: Mapping[str, Any] | None = None,
        is_interactive: bool = False,
    ) -> None:
        self.model, self.prompt, self.file_config = model, prompt, file_config
        self.request_extras, self.is_interactive = dict(request_extras or {}), is_interactive
        self.model_config = GenerationConfig.from_transformers(model.generation_config)
        self.messages: list[Message] = []
        self.calls: list[ToolCall] = []  # of the last reply, whose results come next
        self.results: list[Message] = []  # of the first of these calls
        given_fields = {
            *values,
            *(() if file_config is None else file_config.given),
            *self.model_config.given,
        }
        self.values = {
            **({} if given_fields & LENGTH_FIELDS else {"max_new_tokens": DEFAULT_NEW_TOKENS}),
            **values,
        }

    # -------------------------------------------------------------------- turns
    def take_turn(self, text: str) -> None:
        """Reply to a user, or take the result of the next call of a function."""
        if self.calls:
            self._add_result(text)
        else:
            self._generate_reply(user_messages(text))

    def regenerate(self) -> bool:
        """Reply again to what the last reply answers; whether the reply is another.

        After an error the old reply is there.
        """
        messages, calls, results = list(self.messages), self.calls, self.results
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not messages:
            raise InputError("/regenerate", "needs a reply before it", "an empty conversation")
        before = len(messages)
        while before and messages[before - 1]["role"] != "assistant":
            before -= 1
        kept, self.messages = self.messages, messages[:before]
        self.calls, self.results = [], []
        try:
            self._generate_reply(messages[before:])
        except BaseException:
            self.messages, self.calls, self.results = kept, calls, results
            raise
        return self.messages != kept

    def undo(self) -> str:
        """Remove the last turn of the user and all that follows it; returns its text."""
        users = [index for index, message in enumerate(self.messages) if message["role"] == "user"]
        if not users:
            raise InputError("/undo", "needs a turn before it", "an empty conversation")
        removed = str(self.messages[users[-1]]["content"])
        self.replace_messages(self.messages[: users[-1]])
        return removed

    def replace_messages(self, messages: Sequence[Message]) -> None:
        """Continue with other messages; calls that wait for results are dropped."""
        self.messages, self.calls, self.results = list(messages), [], []

    def set_system(self, text: str | None) -> None:
        """Change the system prompt of the next reply."""
        self.prompt = dataclasses.replace(self.prompt, system=text)

    @property
    def question(self) -> str | None:
        """What the next line is asked for, if it is the result of a call."""
        if not self.calls:
            return None
        call = self.calls[len(self.results)]
        return f"{call.name}({json.dumps(call.arguments, ensure_ascii=False)}): the next line is its result"

    # -------------------------------------------------------------------- parameters
    def merged_config(self) -> GenerationConfig:
        """What would run."""
        return GenerationConfig.merge(self.values, self.file_config, self.model_config)

    def set_parameters(self, texts: Mapping[str, str]) -> None:
        """Change parameters, written as on the command line; on an error nothing changes.

        A parameter of sampling also switches sampling on, unless somebody has switched it off.
        """
        for name, text in texts.items():
            if name not in options.cli_fields():
                is_unknown = name not in FIELDS
                raise unknown_field_error(name, text) if is_unknown else _not_settable_error(name, text)
        change = {name: options.parse_value(FIELDS[name], [text]) for name, text in texts.items()}
        try:
            self.replace_values(options.override_values(self.values, change))
        except ConfigError as error:
            given = {*self.values, *change, *(() if self.file_config is None else self.file_config.given)}
            if error.field not in change or "`do_sample`" not in error.must or "do_sample" in given:
                raise
            self.replace_values(options.override_values(self.values, {**change, "do_sample": True}))
            terminal.print_info(f"do_sample=true is set too: {error.field} has no use without it")

    def replace_values(self, values: Mapping[str, Any]) -> None:
        """Continue with other parameters; raises for those that cannot run."""
        options.reject_tensor_fields(values)
        check_values(values)
        GenerationConfig.merge(values, self.file_config, self.model_config)
        self.values = dict(values)

    # -------------------------------------------------------------------- replies
    def _add_result(self, text: str) -> None:
        """Take the result of the next call, and reply to the results of all; on an error none are kept."""
        call = self.calls[len(self.results)]
        self.results.append({"role": "tool", "name": call.name, "content": text})
        if len(self.results) < len(self.calls):
            return
        results, self.results = self.results, []
        self._generate_reply(results)

    def _generate_reply(self, new: Sequence[Message]) -> None:
        """Generate a reply to new messages; on an error the messages are unchanged."""
        turns = [*self.messages, *new]
        tokenizer = self.prompt.tokenizer
        values = self.values if new[0]["role"] == "user" else _with_free_tool_choice(self.values)
        request_args = self.prompt.encode(turns) | self.request_extras
        printer, parts = StreamPrinter(), []
        function = FunctionRecipe.from_request(request_args, self.model, tokenizer)
        try:
            with contextlib.closing(
                stream(self.model, None, tokenizer, self.file_config, **request_args, **values)
                if function is None
                else function.stream_events(request_args, self.file_config, values)
            ) as events:
                for event in events:
                    printer.print_event(event)
                    parts.append(event.text or "")
        except KeyboardInterrupt:
            if not self.is_interactive or not parts:
                raise
            # The reply ends here and is kept.
        finally:
            printer.end_line()
        # A call stays in the text as it was generated: templates differ in how they write calls.
        text = "".join(parts)
        self.messages = [*turns, {"role": "assistant", "content": text}]
        self.calls = parse_tool_calls(text)[1] if self.prompt.tools else []


def check_values(values: Mapping[str, Any]) -> None:
    """Raise ConfigError for parameters that a conversation does not support."""
    if values.get("num_return_sequences", 1) not in (None, 1):
        value = values["num_return_sequences"]
        raise ConfigError("num_return_sequences", "must be 1 in a conversation", value)
    if values.get("logprobs") is not None:
        raise ConfigError("logprobs", "has no use in a conversation", values["logprobs"], "leave it out")


def _with_free_tool_choice(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Parameters of a reply to results, which may be text even where calls are required."""
    grammar = values.get("grammar")
    if not isinstance(grammar, Mapping) or "tools" not in grammar:
        return values
    return {**values, "grammar": {**grammar, "tool_choice": "auto"}}


def _not_settable_error(name: str, value: str) -> ConfigError:
    return ConfigError(name, "cannot be set from a command line", value, "leave it out")
