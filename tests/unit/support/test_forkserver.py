"""Programs in forks of one process behave as in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forkserver import ForkServer


@pytest.mark.parametrize(
    ("code", "returncode", "stderr"),
    [
        ("pass", 0, ""),
        ("import sys; sys.exit(3)", 3, ""),
        ("raise SystemExit('no')", 1, "no\n"),
        ("import os; os._exit(4)", 4, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
    ],
)
def test_a_program_ends_as_it_would_by_itself(
    fork_server: ForkServer, code: str, returncode: int, stderr: str
) -> None:
    done = fork_server.run(["-c", code])
    alone = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (returncode, "", stderr)
    assert (alone.returncode, alone.stdout, alone.stderr) == (returncode, "", stderr)


def test_a_program_that_raises_leaves_its_traceback(fork_server: ForkServer) -> None:
    done = fork_server.run(["-c", "print(1)\nraise OSError('gone')"])
    assert (done.returncode, done.stdout) == (1, "1\n")
    assert done.stderr.startswith("Traceback")
    assert done.stderr.endswith("OSError: gone\n")


def test_a_program_has_its_own_folder_arguments_environment_and_input(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    (tmp_path / "beside.py").write_text("value = 7\n", encoding="utf-8")
    program = tmp_path / "program.py"
    lines = (
        "import os, sys, beside",
        "print(sys.argv[1:], dict(os.environ), os.getcwd(), beside.value, input())",
    )
    program.write_text("\n".join(lines), encoding="utf-8")
    done = fork_server.run([program, "-x"], folder=tmp_path, environment={"ONE": "1"}, text="é\n")
    assert done.stdout == f"['-x'] {{'ONE': '1'}} {tmp_path} 7 é\n", done.stderr


def test_programs_share_nothing(fork_server: ForkServer) -> None:
    code = """
import random, sys, threading, tempfile, torch
print(hasattr(torch, "left"), threading.active_count(), random.random(), torch.rand(()).item())
torch.left = True
"""
    first, second = (fork_server.run(["-c", code]).stdout.split() for _ in range(2))
    assert first[:2] == second[:2] == ["False", "1"]
    assert first[2] != second[2]  # Python's numbers differ from process to process
    assert first[3] == second[3]  # torch's begin alike in every process


def test_what_is_registered_for_the_end_runs(fork_server: ForkServer) -> None:
    code = (
        "import atexit, threading, time; atexit.register(print, 'end')\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()"
    )
    assert fork_server.run(["-c", code]).stdout == "thread\nend\n"


def test_a_program_that_takes_too_long_is_ended(fork_server: ForkServer) -> None:
    with pytest.raises(TimeoutError):
        fork_server.run(["-c", "import time; time.sleep(600)"], timeout=0.5)
    assert fork_server.run(["-c", "print(1)"]).stdout == "1\n"


def test_a_shell_finds_the_programs(fork_server: ForkServer) -> None:
    text = "descant --version | python -c 'print(input().split()[0])'; python -V; python -c 'exit(5)'"
    path = os.pathsep.join((str(fork_server.programs), os.environ["PATH"]))
    done = subprocess.run(
        ["bash", "-c", text], env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )
    version = sys.version.partition(" ")[0]
    assert (done.stdout, done.stderr, done.returncode) == (f"descant\nPython {version}\n", "", 5)


def test_the_settings_of_the_hub_are_the_programs_own(fork_server: ForkServer) -> None:
    code = "from huggingface_hub import constants; print(constants.HF_HUB_OFFLINE, constants.ENDPOINT)"
    own = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}
    assert fork_server.run(["-c", code], environment=own).stdout == "False http://127.0.0.1:9\n"
    assert fork_server.run(["-c", code], environment={"HF_HUB_OFFLINE": "1"}).stdout.startswith("True ")
