"""The command as a process: signals, pipes, and an installation without the extra."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch

from descant.cli import main
from tests.support.pretrained import ROOT

ENTRY = "from descant.cli import main; main()"
ENDLESS = ("--eos-token-id", "none", "--max-new-tokens", "100000")


@pytest.fixture(autouse=True)
def _interrupts():
    """The handler of interrupts, which `main` changes at its end."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def process(*arguments: str, code: str = ENTRY) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )


@pytest.mark.parametrize(
    ("arguments", "times"), [(["--version"], 0), (["recipe", "list"], 0), (["explain", "--seed", "3"], 1)]
)
def test_a_process_that_may_draw_has_a_seed_of_its_own(monkeypatch, arguments, times):
    seeded = []
    monkeypatch.setattr(torch, "seed", lambda: seeded.append(True))
    monkeypatch.setattr(sys, "argv", ["descant", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, len(seeded)) == (0, times)


def test_an_interrupt_ends_it_quietly(stories):
    # What a shell runs in the background starts with interrupts ignored, and so would its children.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); " + ENTRY
    with process("generate", stories, "Once", *ENDLESS, code=code) as running:
        first = running.stdout.read(1)  # it streams: this comes long before the end
        running.send_signal(signal.SIGINT)
        rest, errors = running.communicate(timeout=120)
    assert (running.returncode, errors) == (130, b"")
    assert first
    assert (first + rest).endswith(b"\n")


INTERRUPTIBLE = "import atexit, signal, time; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
AT_EXIT = "atexit.register(lambda: (print('exit', flush=True), time.sleep(60)))\n"


def test_an_interrupt_at_the_exit_shows_no_traceback():
    with process("--version", code=INTERRUPTIBLE + AT_EXIT + ENTRY) as running:
        while running.stdout.readline() != b"exit\n":
            pass
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=120)
    assert (running.returncode, errors) == (-signal.SIGINT, b"")


def test_a_reader_that_leaves_ends_it_quietly(stories):
    with process("generate", stories, "Once", *ENDLESS) as running:
        first = running.stdout.read(1)
        running.stdout.close()
        errors = running.stderr.read()
        running.wait(timeout=120)
    assert (first != b"", running.returncode, errors) == (True, 141, b"")


def test_without_the_extra_the_error_names_the_command():
    # A None in sys.modules makes an import fail as if the package were not there.
    code = "import sys; sys.modules.update(rich=None, typer=None); import descant; " + ENTRY
    with process("--version", code=code) as running:
        output, errors = running.communicate(timeout=120)
    assert (running.returncode, output) == (1, b"")
    assert errors.decode() == "error: the command line needs the extra `cli`: pip install descant[cli]\n"
