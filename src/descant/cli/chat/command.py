"""The command `descant chat`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import typer

from descant.cli import terminal
from descant.cli.exit_codes import FAILURE
from descant.cli.grammar_command import GrammarCommand, read_json
from descant.config.grammar_spec import TOOL_CHOICES
from descant.errors import InputError

__all__ = ["ChatCommand"]


@dataclass(frozen=True, kw_only=True)
class ChatCommand(GrammarCommand):
    """Talk to a model: each line is a turn, and /help lists commands.

    Answers end after 512 tokens unless a length is given. With --tools the model may call functions; the
    lines after a call are their results, one for each.
    """

    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="The system prompt.")] = None
    tools: Annotated[
        str | None,
        typer.Option("--tools", metavar="FILE", help="Functions to call: a JSON list in OpenAI's form."),
    ] = None

    tool_choice: Annotated[
        str | None,
        typer.Option(
            "--tool-choice",
            metavar="TEXT",
            help="auto, required (answers to you are calls), or a name.",
        ),
    ] = None

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
        from descant.api.chat_prompt import ChatPrompt
        from descant.api.prompt import require_chat_template
        from descant.cli.chat.conversation import Conversation, check_values, input_lines, is_interactive

        check_values(self.values)
        model, tokenizer = self.load()
        require_chat_template(tokenizer, self.model)
        prompt = ChatPrompt(tokenizer, self.system, self.tool_list)
        conversation = Conversation(model, prompt, self.file_config(), self.parameters, self.request_extras())
        terminal.print_info("/help lists commands, /exit leaves")
        for line in input_lines():
            if not conversation.handle_line(line):
                break
        # The exit code is for programs: a user has seen the error.
        return FAILURE if conversation.has_failed and not is_interactive() else 0
