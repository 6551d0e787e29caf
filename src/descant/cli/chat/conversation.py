"""A conversation: its messages, and the parameters of the next reply."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
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
from descant.engine.planner import as_model
from descant.errors import ConfigError, DescantError, InputError

__all__ = ["Conversation", "check_values", "input_lines", "is_interactive"]

DEFAULT_NEW_TOKENS: Final = 512  # per reply, if no length is given

HELP: Final = """\
/set FIELD=VALUE   change a generation parameter, written as on the command line
/config            show what would run, and where each value comes from
/reset             start a new conversation
/exit              leave
/help              show this
"""


class Conversation:
    """The messages so far, and the generation parameters of the next reply."""

    def __init__(
        self,
        model: Any,
        prompt: ChatPrompt,
        file_config: GenerationConfig | None,
        values: Mapping[str, Any],
        request_extras: Mapping[str, Any] | None = None,
    ) -> None:
        self.model, self.prompt, self.file_config = model, prompt, file_config
        self.request_extras = dict(request_extras or {})
        self.model_config = GenerationConfig.from_transformers(model.generation_config)
        self.messages: list[Message] = []
        self.calls: list[ToolCall] = []  # of the last reply, whose results come next
        self.results: list[Message] = []  # of the first of these calls
        self.has_failed = False
        given_fields = {
            *values,
            *(() if file_config is None else file_config.given),
            *self.model_config.given,
        }
        self.values = {
            **({} if given_fields & LENGTH_FIELDS else {"max_new_tokens": DEFAULT_NEW_TOKENS}),
            **values,
        }

    def handle_line(self, line: str) -> bool:
        """Reply to a line or run it as a command; whether to continue."""
        line = line.strip()
        if line == "/exit":
            return False
        try:
            if line.startswith("/"):
                self._run_command(line)
            elif line and self.calls:
                self._add_result(line)
            elif line:
                self._generate_reply(user_messages(line))
        except DescantError as error:
            self.has_failed = True
            terminal.print_error(error)
        if self.calls:
            call = self.calls[len(self.results)]
            arguments = json.dumps(call.arguments, ensure_ascii=False)
            terminal.print_info(f"{call.name}({arguments}): the next line is its result")
        return True

    def _run_command(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        if command == "/set":
            self._set(rest)
        elif command == "/config":
            merged = GenerationConfig.merge(self.values, self.file_config, self.model_config)
            terminal.print_info(merged.explain(as_model(self.model)))
        elif command == "/reset":
            self.messages, self.calls, self.results = [], [], []
        elif command == "/help":
            terminal.print_info(HELP.rstrip())
        else:
            raise InputError("command", "must be one of /set, /config, /reset, /exit, /help", command)

    def _set(self, text: str) -> None:
        name, equals, value = (part.strip() for part in text.partition("="))
        name = name.removeprefix("--").replace("-", "_")
        if not equals:
            raise InputError("/set", "must be FIELD=VALUE", text, "for instance /set temperature=0.7")
        if name not in options.cli_fields():
            raise unknown_field_error(name, value) if name not in FIELDS else _not_settable_error(name, value)
        values = options.override_values(self.values, {name: options.parse_value(FIELDS[name], [value])})
        options.reject_tensor_fields(values)
        check_values(values)
        GenerationConfig.merge(values, self.file_config, self.model_config)
        self.values = values

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
        with contextlib.closing(
            stream(self.model, None, tokenizer, self.file_config, **request_args, **values)
            if function is None
            else function.stream_events(request_args, self.file_config, values)
        ) as events:
            try:
                for event in events:
                    printer.print_event(event)
                    parts.append(event.text or "")
            except KeyboardInterrupt:
                if not is_interactive():
                    raise
                # The reply ends here and is kept.
            finally:
                printer.end_line()
        # A call stays in the text as it was generated: templates differ in how they write calls.
        text = "".join(parts)
        self.messages = [*turns, {"role": "assistant", "content": text}]
        self.calls = parse_tool_calls(text)[1] if self.prompt.tools else []


def _with_free_tool_choice(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Parameters of a reply to results, which may be text even where calls are required."""
    grammar = values.get("grammar")
    if not isinstance(grammar, Mapping) or "tools" not in grammar:
        return values
    return {**values, "grammar": {**grammar, "tool_choice": "auto"}}


def is_interactive() -> bool:
    """Whether standard input is a terminal."""
    return sys.stdin.isatty()


def check_values(values: Mapping[str, Any]) -> None:
    """Raise ConfigError for parameters that a conversation does not support."""
    if values.get("num_return_sequences", 1) not in (None, 1):
        value = values["num_return_sequences"]
        raise ConfigError("num_return_sequences", "must be 1 in a conversation", value)
    if values.get("logprobs") is not None:
        raise ConfigError("logprobs", "has no use in a conversation", values["logprobs"], "leave it out")


def input_lines() -> Iterator[str]:
    """Lines typed at a prompt, or lines of a pipe."""
    if not is_interactive():
        for line in sys.stdin:  # noqa: UP028 - delegating would close standard input with the iterator
            yield line
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - lets `input` edit and recall lines
    while True:
        try:
            yield input("> ")
        except EOFError:
            terminal.write("\n")
            return


def _not_settable_error(name: str, value: str) -> ConfigError:
    return ConfigError(name, "cannot be set from a command line", value, "leave it out")
