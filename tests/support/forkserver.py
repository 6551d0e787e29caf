"""A process that has imported torch, transformers and Descant once, and forks a child for every program.

Importing them costs several seconds of CPU; a fork costs milliseconds. A program that runs here is isolated
as in a process of its own: its memory, folder, environment, arguments and standard streams are its own.
Three things differ. Libraries read the environment of the server at import, for example OMP_NUM_THREADS; the
settings of huggingface_hub are read again for each program. A module that Descant imports lazily may be
imported already. Hash seeds are those of the server.

    with ForkServer() as server:
        done = server.run(["examples/chat.py"], folder=tmp_path)

`ForkServer.programs` is a folder with the commands `python` and `descant`, for shells: put it first in PATH.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Finished", "ForkServer"]

DESCANT = "import sys; sys.argv[0] = 'descant'; from descant.cli import main; main()"
# Written into `programs`: hands its arguments and streams to the server, and exits as the program did.
# What the server cannot run (any other option of Python) goes to Python itself.
CLIENT = """#!{python} -IS
import json, os, socket, sys
arguments = {prefix!r} + sys.argv[1:]
if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-m", "-c")):
    os.execv({python!r}, [{python!r}, *arguments])
connection = socket.socket(socket.AF_UNIX)
connection.connect({address!r})
job = {{"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}}
socket.send_fds(connection, [b"!"], [0, 1, 2])
connection.sendall(json.dumps(job).encode() + b"\\n")
with connection.makefile() as answers:
    answers.readline()
    last = answers.readline()
sys.exit(json.loads(last)["code"] if last else 70)
"""


@dataclass(frozen=True)
class Finished:
    """What a program left: its exit code (negative: the signal), its output, and its CPU seconds."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float


class ForkServer:
    """The tests' side: starts the server at the first program and ends it with the context."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fork")
        self._address = str(Path(self._folder.name) / "socket")
        self._process: subprocess.Popen[bytes] | None = None
        self._programs: Path | None = None

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server, and its programs with it."""
        if self._process is not None:
            if self._process.stdin is not None:
                self._process.stdin.close()
            self._process.wait(timeout=60)
            self._process = None
        self._folder.cleanup()

    @property
    def programs(self) -> Path:
        """A folder with `python` and `descant`, which run in the server."""
        self._start()
        if self._programs is None:
            folder = Path(self._folder.name) / "bin"
            folder.mkdir()
            for name, prefix in {"python": [], "descant": ["-c", DESCANT]}.items():
                text = CLIENT.format(python=sys.executable, prefix=prefix, address=self._address)
                (folder / name).write_text(text, encoding="utf-8")
                (folder / name).chmod(0o755)
            self._programs = folder
        return self._programs

    def run(
        self,
        arguments: Sequence[str | os.PathLike[str]],
        *,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        text: str = "",
        timeout: float = 600,
    ) -> Finished:
        """Run `python *arguments` (a script, `-m module` or `-c code`) to its end; `text` is its input."""
        self._start()
        with contextlib.ExitStack() as stack:
            given, out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
            given.write(text.encode())
            given.seek(0)
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(self._address)
                socket.send_fds(connection, [b"!"], [given.fileno(), out.fileno(), err.fileno()])
                job = {
                    "arguments": [os.fspath(one) for one in arguments],
                    "folder": str(folder or Path.cwd()),
                    "environment": dict(os.environ if environment is None else environment),
                }
                connection.sendall(json.dumps(job).encode() + b"\n")
                answer = _wait(connection, timeout)
            out.seek(0)
            err.seek(0)
            printed, blamed = out.read().decode(errors="replace"), err.read().decode(errors="replace")
        return Finished(answer["code"], printed, blamed, answer["seconds"])

    def _start(self) -> None:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, __file__, self._address], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            assert self._process.stdout is not None
            ready = self._process.stdout.readline()
            self._process.stdout.close()
            if not ready:
                raise RuntimeError(f"the fork server did not start: exit code {self._process.wait()}")


def _wait(connection: socket.socket, timeout: float) -> Any:
    """The reply of the server at the end of a program; ends the program after its timeout."""
    connection.settimeout(timeout)
    with connection.makefile() as answers:
        process = json.loads(answers.readline())["process"]
        try:
            return json.loads(answers.readline())
        except TimeoutError:
            os.kill(process, signal.SIGKILL)
            raise


# ------------------------------------------------------------------------ the server's side
def _serve(address: str) -> None:
    """Accept programs until standard input ends."""
    import select

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen(16)
        os.write(1, b"ready\n")
        os.close(1)
        while True:
            readable = select.select([listening, 0], [], [], 1)[0]
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if listening in readable:
                connection = listening.accept()[0]
                if os.fork() == 0:
                    listening.close()
                    _watch(connection)
                connection.close()
            elif 0 in readable:
                return  # nothing is ever written there: the tests have ended


def _watch(connection: socket.socket) -> None:
    """Fork the program, wait for its end and tell; never returns."""
    streams = socket.recv_fds(connection, 1, 3)[1]
    with connection.makefile() as lines:
        job = json.loads(lines.readline())
    process = os.fork()
    if process == 0:
        connection.close()
        _run(job, streams)
    connection.sendall(json.dumps({"process": process}).encode() + b"\n")
    _, status, used = os.wait4(process, 0)
    end = {"code": os.waitstatus_to_exitcode(status), "seconds": used.ru_utime + used.ru_stime}
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(json.dumps(end).encode() + b"\n")
    os._exit(0)


def _run(job: Mapping[str, Any], streams: Sequence[int]) -> None:
    """Be the program; never returns."""
    import atexit
    import importlib
    import random
    import runpy
    import threading
    import traceback

    import huggingface_hub.constants
    import numpy as np

    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    encoding = os.environ.get("PYTHONIOENCODING") or "utf-8"
    # Standard streams stay open until the end.
    sys.stdin = open(0, encoding=encoding, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding=encoding, closefd=False)  # noqa: SIM115
    sys.stderr = open(  # noqa: SIM115
        2, "w", encoding=encoding, errors="backslashreplace", closefd=False, buffering=1
    )
    # A new process has random numbers of its own.
    random.seed()
    np.random.seed()  # noqa: NPY002 - the state that a library would use
    time.tzset()
    importlib.reload(huggingface_hub.constants)
    code = 0
    first, *others = job["arguments"]
    try:
        if first == "-c":
            sys.argv, sys.path[0] = ["-c", *others[1:]], ""
            exec(compile(others[0], "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102
        elif first == "-m":
            sys.argv, sys.path[0] = list(others), os.getcwd()
            runpy.run_module(others[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = list(job["arguments"]), str(Path(first).resolve().parent)
            runpy.run_path(first, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    import gc

    import torch

    torch.set_num_threads(1)
    import transformers  # noqa: F401 - imported once for all programs
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig  # noqa: F401

    import descant.testing
    from descant import *  # noqa: F403 - all that a program could use
    from descant.cli.application import COMMAND_GROUPS, COMMANDS

    for commands in (COMMANDS, *(grouped for _, grouped in COMMAND_GROUPS.values())):
        for entry in commands.values():
            entry.load()
    import descant.cli.application
    import descant.cli.chat.command
    import descant.cli.chat.conversation
    import descant.cli.jsonl
    import descant.jobs  # noqa: F401

    gc.freeze()  # no program traverses, and so copies, what the imports made
    _serve(sys.argv[1])
