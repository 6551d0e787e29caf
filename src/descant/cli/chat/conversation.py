"""A conversation: messages, parameters, replies, commands such as /set, and the files that keep it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from descant.api.chat_prompt import ChatPrompt, Message, user_messages
from descant.api.stream import stream
from descant.cli import options, terminal
from descant.cli.options import SECRET_FIELDS, cli_fields
from descant.cli.output import LENGTH_FIELDS, FunctionRecipe, StreamPrinter
from descant.config.generation_config import FIELDS, GenerationConfig
from descant.config.registry import unknown_field_error
from descant.core.atomic_file import write_bytes
from descant.decoding.grammars.json_schema import parse_tool_calls
from descant.engine.planning.planner import as_model
from descant.errors import ConfigError, DescantError, InputError, file_errors
from descant.tokenization.response_syntax import ToolCall

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
        """The question that the next line answers, if it is the result of a call."""
        if not self.calls:
            return None
        call = self.calls[len(self.results)]
        return f"{call.name}({json.dumps(call.arguments, ensure_ascii=False)}): the next line is its result"

    # -------------------------------------------------------------------- parameters
    def merged_config(self) -> GenerationConfig:
        """The config that would run."""
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


_VERSION: Final = 1
_ROLES: Final = ("system", "user", "assistant", "tool")
_MAX_BYTES: Final = 64 * 2**20


def save_transcript(conversation: Conversation, path: Path, *, overwrite: bool = False) -> None:
    """Write a conversation to a new file that only its owner can read; a watermark key is left out."""
    data = {
        "version": _VERSION,
        "model": str(getattr(conversation.model, "name_or_path", "")),
        "system": conversation.prompt.system,
        "settings": {name: value for name, value in conversation.values.items() if name not in SECRET_FIELDS},
        "messages": [dict(message) for message in conversation.messages],
    }
    text = json.dumps(data, indent=2, ensure_ascii=False, default=_plain) + "\n"
    with file_errors("FILE", path, "written"):
        try:
            write_bytes(path, text.encode("utf-8", "backslashreplace"), private=True, exclusive=not overwrite)
        except FileExistsError:
            do = "give another name, or /save --overwrite FILE"
            raise InputError("FILE", "must be new", str(path), do) from None


def load_transcript(conversation: Conversation, path: Path) -> None:
    """Continue the conversation of a file with its system prompt and settings; an error changes nothing."""
    data = _read(path)
    messages, settings, system = data.get("messages"), data.get("settings", {}), data.get("system")
    if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
        raise _format_error(path, 'its "messages" are objects with "role" and "content"')
    if not isinstance(settings, dict) or not settings.keys() <= cli_fields().keys():
        raise _format_error(path, 'its "settings" are generation parameters')
    if not (system is None or isinstance(system, str)):
        raise _format_error(path, 'its "system" is text or null')
    secrets = {name: value for name, value in conversation.values.items() if name in SECRET_FIELDS}
    conversation.replace_values({**settings, **secrets})
    conversation.set_system(system)
    conversation.replace_messages(messages)


def _read(path: Path) -> dict[str, Any]:
    with file_errors("FILE", path), open(path, "rb") as file:
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise InputError("FILE", f"must have at most {_MAX_BYTES} bytes", str(path))
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict) or data.get("version") != _VERSION:
        raise _format_error(path, f'it is a JSON object of "version" {_VERSION}')
    return data


def _is_message(message: object) -> bool:
    return (
        isinstance(message, dict)
        and message.get("role") in _ROLES
        and all(isinstance(value, str) for value in message.values())
        and "content" in message
    )


def _plain(value: object) -> object:
    """A mapping as JSON's object."""
    return dict(value) if isinstance(value, Mapping) else repr(value)


def _format_error(path: Path, reason: str) -> InputError:
    return InputError("FILE", f"must be written by /save: {reason}", str(path))


_VARIABLE: Final = "XDG_STATE_HOME"


def state_folder() -> Path:
    """The folder of files that are kept from run to run, of this user only."""
    base = os.environ.get(_VARIABLE)
    if base and os.path.isabs(base):  # the XDG standard says that a relative path is ignored
        return Path(base) / "descant"
    if os.name == "nt":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "descant"
    return Path.home() / ".local" / "state" / "descant"


def history_file() -> Path | None:
    """The file of typed lines, which only its owner can read; None where it cannot be written."""
    path = state_folder() / "chat-history"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
        try:
            if hasattr(os, "fchmod"):
                os.fchmod(descriptor, 0o600)  # a file that others could read
        finally:
            os.close(descriptor)
    except OSError:
        return None
    return path


def rescue_file() -> Path:
    """A new name for a conversation that ends by an error."""
    folder = state_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder / f"chat-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.json"


@contextlib.contextmanager
def rescued(conversation: Conversation) -> Iterator[None]:
    """Save the conversation of a user if the block raises, or if a signal ends the process."""
    if not conversation.is_interactive:
        yield
        return
    previous = {kind: signal.signal(kind, _leave) for kind in _ending_signals()}
    try:
        yield
    except BaseException:
        if conversation.messages:
            _save(conversation)
        raise
    finally:
        for kind, handler in previous.items():
            signal.signal(kind, handler)


def _ending_signals() -> list[signal.Signals]:
    """The signals that end a process: of `kill`, and of a terminal that closes."""
    return [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


def _leave(number: int, _: Any) -> None:
    for kind in _ending_signals():  # a terminal may send several, and the next would interrupt the saving
        signal.signal(kind, signal.SIG_IGN)
    sys.exit(128 + number)  # as shells do


def _save(conversation: Conversation) -> None:
    with contextlib.suppress(OSError):  # the terminal may be closed
        try:
            path = rescue_file()
            save_transcript(conversation, path)
        except (OSError, DescantError) as error:
            terminal.print_error(f"the conversation cannot be saved: {error}")
        else:
            terminal.print_info(f"the conversation is saved: /load {path}")


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
            name, equals, value = (text.strip() for text in part.partition("="))
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
    """The completions of the text before the cursor: the part to replace, the new text, its meaning."""
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
