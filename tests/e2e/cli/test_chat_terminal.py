"""`descant chat` in a real terminal: typing, pasting, interrupting, recalling and saving."""

from __future__ import annotations

import json
import os
import sys
import time

import pytest

from tests.support.pretrained import ROOT
from tests.support.tmux_terminal import SECONDS, Terminal, require_tmux

PARAGRAPH = "Tom has a dog.\nThe dog is red.\n\nWho has a dog?"
READY = "/help lists commands, /exit leaves"
ENDLESS = ("--eos-token-id", "none", "--max-new-tokens", "100000")


@pytest.fixture(autouse=True)
def _tmux():
    require_tmux()


def chat(talker, folder, *options):
    """A conversation in a terminal, with the state folder of a test."""
    path = os.pathsep.join([str(ROOT / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    command = [sys.executable, "-m", "descant.cli", "chat", talker, *options]
    return Terminal.running(command, XDG_STATE_HOME=str(folder / "state"), PYTHONPATH=path)


def prompts(screen):
    """How many lines of a screen begin with a prompt."""
    return sum(line.startswith(">") for line in screen.splitlines())


def ends_with_prompt(screen):
    return screen.endswith("\n>")


def test_a_conversation_and_its_recall_after_a_restart(talker, tmp_path):
    saved = tmp_path / "talk.json"
    with chat(talker, tmp_path, "--max-new-tokens", "5") as terminal:
        terminal.wait("the first prompt", lambda screen: READY in screen and ends_with_prompt(screen))

        terminal.type("a line that is not sent")
        terminal.wait("a line", lambda screen: screen.endswith("> a line that is not sent"))
        terminal.type("C-c")
        terminal.wait("Ctrl-C clears the line", ends_with_prompt)

        terminal.type("Who is Lily?", "Enter")
        terminal.wait("a turn", lambda screen: prompts(screen) == 2 and ends_with_prompt(screen))

        terminal.paste(PARAGRAPH)
        pasted = terminal.wait("a pasted paragraph", lambda screen: screen.endswith(". Who has a dog?"))
        assert "> Tom has a dog.\n. The dog is red.\n.\n. Who has a dog?" in pasted
        terminal.type("Enter")
        terminal.wait("its reply", lambda screen: prompts(screen) == 3 and ends_with_prompt(screen))

        terminal.type("first", "M-Enter", "second")
        terminal.wait("Alt-Enter is a new line", lambda screen: screen.endswith("> first\n. second"))
        terminal.type("C-c")
        terminal.wait("both lines are cleared", ends_with_prompt)

        terminal.type("/reg", "Tab")
        terminal.wait("completion", lambda screen: "> /regenerate" in screen)
        terminal.type("Enter")
        terminal.wait("the same reply", lambda screen: "the reply is the same" in screen)

        terminal.type(f"/save {saved}", "Enter")
        terminal.wait("saved", lambda screen: "4 messages are saved" in screen)
        terminal.type("C-d")
        terminal.wait("Ctrl-D leaves", lambda screen: "exit code 0" in screen)

    messages = json.loads(saved.read_text())["messages"]
    assert [one["content"] for one in messages if one["role"] == "user"] == ["Who is Lily?", PARAGRAPH]

    with chat(talker, tmp_path, "--max-new-tokens", "5") as terminal:
        terminal.wait("a restart", lambda screen: READY in screen and ends_with_prompt(screen))
        terminal.type("Up")
        terminal.wait("Up recalls the last line", lambda screen: f"> /save {saved}" in screen)
        terminal.type("C-c")
        terminal.wait("cleared", ends_with_prompt)
        terminal.type("C-r", "red")
        terminal.wait("Ctrl-R finds the paragraph", lambda screen: ". The dog is red." in screen)
        terminal.type("Enter")
        terminal.type("C-c")
        terminal.type(f"/load {saved}", "Enter")
        terminal.wait("loaded", lambda screen: "4 messages are loaded" in screen and ends_with_prompt(screen))
        terminal.type("C-c")
        terminal.wait("a first Ctrl-C at an empty prompt", lambda screen: "Ctrl-C again or Ctrl-D" in screen)
        terminal.type("C-c")
        terminal.wait("a second one leaves", lambda screen: "exit code 0" in screen)
    history = tmp_path / "state" / "descant" / "chat-history"
    assert history.stat().st_mode & 0o777 == 0o600
    assert "not sent" not in history.read_text()


def test_an_interrupt_ends_a_reply_and_a_hangup_saves_it(talker, tmp_path):
    with chat(talker, tmp_path, *ENDLESS) as terminal:
        terminal.wait("the first prompt", lambda screen: READY in screen and ends_with_prompt(screen))
        terminal.type("Tell me of Lily.", "Enter")
        terminal.wait("a reply", lambda screen: len(screen.partition("> Tell me of Lily.\n")[2]) > 20)
        terminal.type("C-c")
        cut = terminal.wait("Ctrl-C ends the reply", ends_with_prompt)
        terminal.tmux("kill-server")  # the terminal closes

    end = time.monotonic() + SECONDS
    while not (files := list((tmp_path / "state" / "descant").glob("chat-*.json"))):
        assert time.monotonic() < end, "nothing was saved"
        time.sleep(0.1)
    [user, reply] = json.loads(files[0].read_text())["messages"]
    assert user == {"role": "user", "content": "Tell me of Lily."}
    shown = cut.partition("> Tell me of Lily.\n")[2]
    assert "".join(reply["content"].split())[:15] == "".join(shown.split())[:15]
    assert files[0].stat().st_mode & 0o777 == 0o600


def test_standard_output_has_only_replies(talker, tmp_path):
    command = f"{sys.executable} -m descant.cli chat {talker} --max-new-tokens 5 --no-history"
    path = os.pathsep.join([str(ROOT / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    output = tmp_path / "out.txt"
    with Terminal.running(["sh", "-c", f"{command} > {output}"], PYTHONPATH=path) as terminal:
        terminal.wait("the first prompt", lambda screen: READY in screen and ends_with_prompt(screen))
        terminal.type("Who?", "Enter")
        terminal.wait("the next prompt", lambda screen: prompts(screen) == 2 and ends_with_prompt(screen))
        terminal.type("/exit", "Enter")
        terminal.wait("the end", lambda screen: "exit code 0" in screen)
    assert output.read_text().strip()
    assert "\x1b" not in output.read_text()
    assert ">" not in output.read_text()
