"""The prompt at a terminal: history, completion, pasted paragraphs, and what its keys do.

Enter sends, Alt-Enter begins a new line, and a pasted paragraph is one turn. Ctrl-C clears what is typed; at
an empty prompt a second one leaves, as Ctrl-D does.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import FileHistory, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output.defaults import create_output

from descant.cli.chat.conversation import FILE_ARGUMENT, command_of, completions

PROMPT: Final = "> "
CONTINUATION: Final = ". "
LEAVE_SECONDS: Final = 3.0  # between two presses of Ctrl-C at an empty prompt, the second of which leaves
LEAVE_HINT: Final = "Ctrl-C again or Ctrl-D leaves"


def build_session(history: Path | None) -> PromptSession[str]:
    """A prompt whose history is in a file, or in memory without one."""
    keys = _PromptKeys()
    return PromptSession(
        PROMPT,
        placeholder=lambda: [("class:placeholder fg:ansibrightblack", keys.hint())],
        multiline=True,
        prompt_continuation=lambda width, *_: CONTINUATION.rjust(width),
        history=InMemoryHistory() if history is None else FileHistory(str(history)),
        key_bindings=keys.bindings(),
        completer=_LineCompleter(),
        complete_while_typing=False,  # only at Tab: a menu that opens by itself moves the screen
        # Standard output may be a file for the replies.
        output=create_output(stdout=sys.stdout if sys.stdout.isatty() else sys.stderr),
    )


class _PromptKeys:
    """The keys that differ from those of other prompts."""

    def __init__(self) -> None:
        self._last_interrupt = float("-inf")

    def bindings(self) -> KeyBindings:
        bindings = KeyBindings()
        at_prompt = has_focus(DEFAULT_BUFFER)  # and not in a search of the history
        bindings.add("enter", filter=at_prompt)(self._send)
        bindings.add("escape", "enter", filter=at_prompt)(self._begin_line)
        bindings.add("c-c", filter=at_prompt)(self._interrupt)
        return bindings

    def _send(self, event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    def _begin_line(self, event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    def _interrupt(self, event: KeyPressEvent) -> None:
        now = time.monotonic()
        if event.current_buffer.text:
            event.current_buffer.reset()
        elif now - self._last_interrupt < LEAVE_SECONDS:
            event.app.exit(exception=EOFError)
        else:
            self._last_interrupt = now

    def hint(self) -> str:
        """The text shown at an empty prompt."""
        return LEAVE_HINT if time.monotonic() - self._last_interrupt < LEAVE_SECONDS else ""


class _LineCompleter(Completer):
    """Completes commands, fields of /set and files."""

    def __init__(self) -> None:
        self._files = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
        """The completions of the text before the cursor."""
        text = document.text_before_cursor
        command = command_of(text)
        if command is not None and command.argument == FILE_ARGUMENT:
            typed = text.partition(" ")[2].lstrip()
            yield from self._files.get_completions(Document(typed), event)
            return
        for replaced, new, meaning in completions(text):
            yield Completion(new, start_position=-len(replaced), display_meta=meaning)
