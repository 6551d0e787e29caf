"""The commands of a conversation, such as /set: what each does, and the words that complete them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from descant.cli import options, terminal
from descant.cli.chat.conversation import Conversation, load_transcript, save_transcript
from descant.engine.planning.planner import as_model
from descant.errors import DescantError, InputError

__all__ = ["COMMANDS", "FILE_ARGUMENT", "ChatCommands", "command_of", "completions", "help_text"]

EXIT: Final = "/exit"
OVERWRITE: Final = "--overwrite"
FILE_ARGUMENT: Final = "FILE"


@dataclass(frozen=True)
class LineCommand:
    """A line that begins with `/`: its name, the placeholder of its argument, and what it does."""

    name: str
    argument: str
    summary: str
    run: Callable[[ChatCommands, str], None]


class ChatCommands:
    """Reads the lines of a conversation: turns for the model, and commands."""

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.has_failed = False

    def handle_line(self, line: str) -> bool:
        """Reply to a line or run it as a command; whether to continue."""
        line = line.strip()
        name, _, rest = line.partition(" ")
        if line == EXIT:
            return False
        try:
            # A pasted paragraph may begin with a slash.
            if line.startswith("/") and (name in COMMANDS or "\n" not in line):
                self._run_command(name, rest.strip())
            elif line:
                self.conversation.take_turn(line)
        except DescantError as error:
            self.has_failed = True
            terminal.print_error(error)
        except (Exception, KeyboardInterrupt) as error:
            # Whatever ends a turn, a user goes on with the conversation; a program gets the error.
            if not self.conversation.is_interactive:
                raise
            if isinstance(error, KeyboardInterrupt):
                terminal.print_info("interrupted before a reply came: the turn is not kept")
            else:
                terminal.print_error(f"{type(error).__name__}: {error}")
        if self.conversation.question is not None:
            terminal.print_info(self.conversation.question)
        return True

    def _run_command(self, name: str, rest: str) -> None:
        command = COMMANDS.get(name)
        if command is None:
            raise InputError("command", f"must be one of {', '.join(COMMANDS)}", name)
        if not command.argument and rest:
            raise InputError(name, "takes no argument", rest)
        command.run(self, rest)

    def show_help(self, _: str) -> None:
        """Print the commands."""
        terminal.print_info(help_text())

    def set(self, text: str) -> None:
        """Change parameters, all or none."""
        # A value may hold spaces: the next parameter begins with a word that is a field, and `=`.
        names = "|".join(name.replace("_", "[-_]") for name in options.cli_fields())
        parts = re.split(rf"\s+(?=(?:--)?(?:{names})\s*=)", text)
        changes = {}
        for part in parts:
            name, equals, value = (one.strip() for one in part.partition("="))
            if not equals:
                raise InputError("/set", "must be FIELD=VALUE", part, "for instance /set temperature=0.7")
            changes[name.removeprefix("--").replace("-", "_")] = value
        self.conversation.set_parameters(changes)

    def show_config(self, _: str) -> None:
        """Print what would run."""
        terminal.print_info(self.conversation.merged_config().explain(as_model(self.conversation.model)))

    def set_system(self, text: str) -> None:
        """Change the system prompt; without text there is none."""
        self.conversation.set_system(text or None)
        terminal.print_info("the system prompt is changed" if text else "there is no system prompt now")

    def regenerate(self, _: str) -> None:
        """Reply again."""
        is_new, config = self.conversation.regenerate(), self.conversation.merged_config()
        if not is_new and (not config.do_sample or config.seed is not None):
            terminal.print_info("the reply is the same: without a seed, do_sample=true gives others")

    def undo(self, _: str) -> None:
        """Remove the last turn."""
        terminal.print_info(f"removed: {self.conversation.undo()}")

    def reset(self, _: str) -> None:
        """Start anew, with the same system prompt and parameters."""
        self.conversation.replace_messages(())

    def save(self, text: str) -> None:
        """Write the conversation to a file."""
        words = _split("/save", text)
        paths = [word for word in words if word != OVERWRITE]
        if len(paths) != 1 or len(words) > 2:
            raise InputError("/save", f"must be /save FILE or /save {OVERWRITE} FILE", text)
        path = Path(paths[0]).expanduser()
        save_transcript(self.conversation, path, overwrite=OVERWRITE in words)
        terminal.print_info(f"{len(self.conversation.messages)} messages are saved in {path}")

    def load(self, text: str) -> None:
        """Continue the conversation of a file."""
        words = _split("/load", text)
        if len(words) != 1:
            raise InputError("/load", "must be /load FILE", text)
        load_transcript(self.conversation, Path(words[0]).expanduser())
        terminal.print_info(f"{len(self.conversation.messages)} messages are loaded")

    def leave(self, _: str) -> None:
        """Nothing: `handle_line` ends the conversation."""


_ROWS: Final[tuple[tuple[str, str, str, Callable[[ChatCommands, str], None]], ...]] = (
    ("/set", "FIELD=VALUE ...", "change parameters, written as on the command line", ChatCommands.set),
    ("/config", "", "show what would run, and where each value comes from", ChatCommands.show_config),
    ("/system", "TEXT", "change the system prompt; without TEXT remove it", ChatCommands.set_system),
    ("/regenerate", "", "reply to the last turn again", ChatCommands.regenerate),
    ("/undo", "", "remove the last turn and its reply", ChatCommands.undo),
    ("/save", FILE_ARGUMENT, "write the conversation and its settings to a new file", ChatCommands.save),
    ("/load", FILE_ARGUMENT, "continue a conversation that was saved", ChatCommands.load),
    ("/reset", "", "start a new conversation", ChatCommands.reset),
    (EXIT, "", "leave", ChatCommands.leave),
    ("/help", "", "show this", ChatCommands.show_help),
)
COMMANDS: Final = {row[0]: LineCommand(*row) for row in _ROWS}


def help_text() -> str:
    """All commands, one in a line."""
    usages = {command: f"{command.name} {command.argument}".strip() for command in COMMANDS.values()}
    width = max(map(len, usages.values()))
    return "\n".join(f"{usage:<{width}}  {command.summary}" for command, usage in usages.items())


def command_of(text: str) -> LineCommand | None:
    """The command whose argument is being typed."""
    name, space, _ = text.partition(" ")
    return COMMANDS.get(name) if space else None


def completions(text: str) -> Iterator[tuple[str, str, str]]:
    """What may follow the text before the cursor: the part to replace, the new text, and its meaning."""
    name, space, rest = text.partition(" ")
    if not space:
        if name.startswith("/"):
            for command in COMMANDS.values():
                if command.name.startswith(name):
                    yield name, command.name + (" " if command.argument else ""), command.summary
    elif name == "/set":
        word = rest.rpartition(" ")[2]
        typed = word.removeprefix("--").replace("-", "_")
        for field in options.cli_fields().values():
            if field.name.startswith(typed):
                yield word, f"{field.name}=", field.doc


def _split(name: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InputError(name, f"must have quotation marks in pairs ({error})", text) from None
