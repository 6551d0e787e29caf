"""`descant chat`: a conversation with a model, turn by turn."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer

from descant.api.stream import stream
from descant.cli import options, terminal
from descant.cli.command import FAILURE, Decoder
from descant.cli.function_recipe import Function
from descant.cli.prompt import Message, encoded, refuse_without_template, said
from descant.cli.stream_printer import Shown
from descant.config.generation_config import FIELDS, GenerationConfig
from descant.config.parameters import unknown
from descant.engine.planner import adapt
from descant.errors import ConfigError, DescantError, InputError

__all__ = ["Chat"]

DEFAULT_NEW_TOKENS: Final = 512  # of an answer, when no length is given anywhere
LENGTHS: Final = frozenset({"max_new_tokens", "max_length"})

HELP: Final = """\
/set FIELD=VALUE   change a generation parameter, written as on the command line
/config            show what would run, and where each value comes from
/reset             begin the conversation again
/exit              leave
/help              show this
"""


@dataclass(frozen=True, kw_only=True)
class Chat(Decoder):
    """Talk to a model: each line is a turn, and /help lists commands.

    Answers end after 512 tokens unless a length is given.
    """

    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="What the model is told first.")
    ] = None

    def run(self) -> int:
        """Answer until the input ends."""
        _refuse_useless(self.values)
        model, tokenizer = self.load()
        refuse_without_template(tokenizer, self.model)
        talk = Conversation(model, tokenizer, self.argument(), self.parameters, self.system, self.brought())
        terminal.note("/help lists commands, /exit leaves")
        for line in _lines():
            if not talk.take(line):
                break
        # A person has seen the error; a program reads the code.
        return FAILURE if talk.failed and not _person() else 0


class Conversation:
    """The turns so far and the parameters for the next."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        argument: GenerationConfig | None,
        values: Mapping[str, Any],
        system: str | None,
        brought: Mapping[str, Any] | None = None,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.brought = dict(brought or {})
        self.argument, self.system = argument, system
        self.theirs = GenerationConfig.from_transformers(model.generation_config)
        self.messages: list[Message] = []
        self.failed = False
        given = {*values, *(() if argument is None else argument.given), *self.theirs.given}
        self.values = {**({} if given & LENGTHS else {"max_new_tokens": DEFAULT_NEW_TOKENS}), **values}

    def take(self, line: str) -> bool:
        """Answer a line or obey it; whether to go on."""
        line = line.strip()
        if line == "/exit":
            return False
        try:
            if line.startswith("/"):
                self._obey(line)
            elif line:
                self._answer(line)
        except DescantError as error:
            self.failed = True
            terminal.blame(error)
        return True

    def _obey(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        if command == "/set":
            self._set(rest)
        elif command == "/config":
            merged = GenerationConfig.merge(self.values, self.argument, self.theirs)
            terminal.note(merged.explain(adapt(self.model)))
        elif command == "/reset":
            self.messages = []
        elif command == "/help":
            terminal.note(HELP.rstrip())
        else:
            raise InputError("command", "must be one of /set, /config, /reset, /exit, /help", command)

    def _set(self, text: str) -> None:
        name, equals, value = (part.strip() for part in text.partition("="))
        name = name.removeprefix("--").replace("-", "_")
        if not equals:
            raise InputError("/set", "must be FIELD=VALUE", text, "for instance /set temperature=0.7")
        if name not in options.offered():
            raise unknown(name, value) if name not in FIELDS else _unsayable(name, value)
        values = options.overlaid(self.values, {name: options.read(FIELDS[name], [value])})
        options.refuse_tensors(values)
        _refuse_useless(values)
        GenerationConfig.merge(values, self.argument, self.theirs)
        self.values = values

    def _answer(self, line: str) -> None:
        """Take a turn; one that fails has not been said."""
        turns = [*self.messages, *said(line, None if self.messages else self.system)]
        given = encoded(self.tokenizer, turns) | self.brought
        shown, parts = Shown(), []
        function = Function.of(given, self.model, self.tokenizer)
        with contextlib.closing(
            stream(self.model, None, self.tokenizer, self.argument, **given, **self.values)
            if function is None
            else function.events(given, self.argument, self.values)
        ) as events:
            try:
                for event in events:
                    shown.take(event)
                    parts.append(event.text or "")
            except KeyboardInterrupt:
                if not _person():
                    raise
                # The answer ends here, and what there is of it was said.
            finally:
                shown.end()
        self.messages = [*turns, {"role": "assistant", "content": "".join(parts)}]


def _person() -> bool:
    """Whether somebody types."""
    return sys.stdin.isatty()


def _refuse_useless(values: Mapping[str, Any]) -> None:
    """Raise for what a conversation has no place for."""
    if values.get("num_return_sequences", 1) not in (None, 1):
        got = values["num_return_sequences"]
        raise ConfigError("num_return_sequences", "must be 1 in a conversation", got)
    if values.get("logprobs") is not None:
        raise ConfigError("logprobs", "has no use in a conversation", values["logprobs"], "leave it out")


def _lines() -> Iterator[str]:
    """What is typed, with a prompt, or what a pipe brings."""
    if not _person():
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


def _unsayable(name: str, value: str) -> ConfigError:
    return ConfigError(name, "cannot be set from a command line", value, "leave it out")
