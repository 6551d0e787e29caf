"""The command `descant chat`, and the lines that it reads."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from descant.cli import terminal
from descant.cli.command import GrammarCommand, read_json
from descant.cli.options import option
from descant.cli.terminal import FAILURE
from descant.config.grammar_spec import TOOL_CHOICES
from descant.errors import InputError, MissingExtra


def is_interactive() -> bool:
    """Whether a user types: standard input is a terminal, and a prompt can be shown."""
    return sys.stdin.isatty() and (sys.stdout.isatty() or sys.stderr.isatty())


def input_lines(*, keeps_history: bool) -> Iterator[str]:
    """Turns that a user types, or lines of a pipe."""
    if not is_interactive():
        for line in sys.stdin:  # noqa: UP028 - delegating would close standard input with the iterator
            yield line
        return
    try:
        from descant.cli.chat.conversation import history_file
        from descant.cli.chat.prompt_session import build_session
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "prompt_toolkit":
            raise
        raise MissingExtra("cli", "the prompt of `descant chat`") from error
    path = history_file() if keeps_history else None
    if keeps_history and path is None:
        terminal.print_warning("the history file cannot be written: this run keeps its lines to itself")
    session = build_session(path)
    while True:
        try:
            yield session.prompt()
        except KeyboardInterrupt:  # between two prompts, where nothing is typed yet
            continue
        except EOFError:
            return


@dataclass(frozen=True, kw_only=True)
class ChatCommand(GrammarCommand):
    """Talk to a model: each line is a turn, and /help lists commands.

    Answers end after 512 tokens unless a length is given. With --tools the model may call functions; the
    lines after a call are their results, one for each.
    """

    system: str | None = option("The system prompt.", metavar="TEXT")
    tools: str | None = option("Functions to call: a JSON list in OpenAI's form.", metavar="FILE")

    tool_choice: str | None = option("auto, required (answers to you are calls), or a name.", metavar="TEXT")

    no_history: bool = option("Neither read nor write the file of typed lines.", False)

    @cached_property
    def tool_list(self) -> Any:
        """The functions of `--tools`, as given."""
        return () if self.tools is None else read_json("tools", self.tools)

    def _grammars(self) -> dict[str, Mapping[str, Any]]:
        """The grammar of each option that is given, `--tools` included."""
        grammars, choice = super()._grammars(), self.tool_choice
        if self.tools is None:
            if choice is not None:
                raise InputError("tool_choice", "has no use without --tools", choice, "add --tools")
            return grammars
        named = {"type": "function", "function": {"name": choice}}
        chosen = {} if choice is None else {"tool_choice": choice if choice in TOOL_CHOICES else named}
        return {**grammars, "--tools": {"tools": self.tool_list, **chosen}}

    def run(self) -> int:
        """Answer until the input ends."""
        from descant.api.chat_prompt import ChatPrompt, require_chat_template
        from descant.cli.chat.conversation import ChatCommands, Conversation, check_values, rescued

        check_values(self.values)
        model, tokenizer = self.load()
        require_chat_template(tokenizer, self.model)
        prompt, interactive = ChatPrompt(tokenizer, self.system, self.tool_list), is_interactive()
        conversation = Conversation(
            model, prompt, self.file_config(), self.parameters, self.request_extras(), interactive
        )
        commands = ChatCommands(conversation)
        terminal.print_info("/help lists commands, /exit leaves")
        with rescued(conversation):
            for line in input_lines(keeps_history=not self.no_history):
                if not commands.handle_line(line):
                    break
        # The exit code is for programs: a user has seen the error.
        return FAILURE if commands.has_failed and not interactive else 0
