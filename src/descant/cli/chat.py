"""`descant chat`: a conversation with a model."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer

from descant.api.stream import stream
from descant.cli import options, terminal
from descant.cli.command import FAILURE, DecodingCommand
from descant.cli.function_recipe import FunctionRecipe
from descant.cli.prompt import Message, encode_prompt, require_chat_template, user_messages
from descant.cli.stream_printer import StreamPrinter
from descant.config.generation_config import FIELDS, GenerationConfig
from descant.config.registry import unknown_field_error
from descant.engine.planner import as_model
from descant.errors import ConfigError, DescantError, InputError

__all__ = ["ChatCommand"]

DEFAULT_NEW_TOKENS: Final = 512  # per reply, if no length is given
LENGTH_FIELDS: Final = frozenset({"max_new_tokens", "max_length"})

HELP: Final = """\
/set FIELD=VALUE   change a generation parameter, written as on the command line
/config            show what would run, and where each value comes from
/reset             start a new conversation
/exit              leave
/help              show this
"""


@dataclass(frozen=True, kw_only=True)
class ChatCommand(DecodingCommand):
    """Talk to a model: each line is a turn, and /help lists commands.

    Answers end after 512 tokens unless a length is given.
    """

    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="The system prompt.")] = None

    def run(self) -> int:
        """Answer until the input ends."""
        _check_values(self.values)
        model, tokenizer = self.load()
        require_chat_template(tokenizer, self.model)
        conversation = Conversation(
            model, tokenizer, self.file_config(), self.parameters, self.system, self.request_extras()
        )
        terminal.print_info("/help lists commands, /exit leaves")
        for line in _input_lines():
            if not conversation.handle_line(line):
                break
        # The exit code is for programs: a user has seen the error.
        return FAILURE if conversation.has_failed and not _is_interactive() else 0


class Conversation:
    """The messages so far, and the generation parameters of the next reply."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        file_config: GenerationConfig | None,
        values: Mapping[str, Any],
        system: str | None,
        request_extras: Mapping[str, Any] | None = None,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.request_extras = dict(request_extras or {})
        self.file_config, self.system = file_config, system
        self.model_config = GenerationConfig.from_transformers(model.generation_config)
        self.messages: list[Message] = []
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
            elif line:
                self._generate_reply(line)
        except DescantError as error:
            self.has_failed = True
            terminal.print_error(error)
        return True

    def _run_command(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        if command == "/set":
            self._set(rest)
        elif command == "/config":
            merged = GenerationConfig.merge(self.values, self.file_config, self.model_config)
            terminal.print_info(merged.explain(as_model(self.model)))
        elif command == "/reset":
            self.messages = []
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
        _check_values(values)
        GenerationConfig.merge(values, self.file_config, self.model_config)
        self.values = values

    def _generate_reply(self, line: str) -> None:
        """Generate a reply; on an error the messages are unchanged."""
        turns = [*self.messages, *user_messages(line, None if self.messages else self.system)]
        request_args = encode_prompt(self.tokenizer, turns) | self.request_extras
        printer, parts = StreamPrinter(), []
        function = FunctionRecipe.from_request(request_args, self.model, self.tokenizer)
        with contextlib.closing(
            stream(self.model, None, self.tokenizer, self.file_config, **request_args, **self.values)
            if function is None
            else function.stream_events(request_args, self.file_config, self.values)
        ) as events:
            try:
                for event in events:
                    printer.print_event(event)
                    parts.append(event.text or "")
            except KeyboardInterrupt:
                if not _is_interactive():
                    raise
                # The reply ends here and is kept.
            finally:
                printer.end_line()
        self.messages = [*turns, {"role": "assistant", "content": "".join(parts)}]


def _is_interactive() -> bool:
    """Whether standard input is a terminal."""
    return sys.stdin.isatty()


def _check_values(values: Mapping[str, Any]) -> None:
    """Raise ConfigError for parameters that a conversation does not support."""
    if values.get("num_return_sequences", 1) not in (None, 1):
        value = values["num_return_sequences"]
        raise ConfigError("num_return_sequences", "must be 1 in a conversation", value)
    if values.get("logprobs") is not None:
        raise ConfigError("logprobs", "has no use in a conversation", values["logprobs"], "leave it out")


def _input_lines() -> Iterator[str]:
    """Lines typed at a prompt, or lines of a pipe."""
    if not _is_interactive():
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
