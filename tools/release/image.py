"""Run the steps of deploy/Dockerfile in an empty folder, for machines without a container engine.

    python -m tools.release.image --python python3.12

The files that COPY names come from the commit, the commands of RUN that call pip go into a fresh venv,
and the program of ENTRYPOINT is asked for its help. So a file that the image lacks is found. Commands
that need the image's own system (useradd, chown) are printed and not run. `--replace OLD NEW` changes the
text of a command, such as the address of an index.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.release.builds import ROOT, git


def instructions(text: str, variant: str) -> Iterator[tuple[str, str]]:
    """The instructions of the last stage and of the stages that it is built on, in order."""
    stages: dict[str, tuple[str, list[tuple[str, str]]]] = {}
    name = ""
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    for instruction in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        keyword, _, rest = instruction.replace("${VARIANT}", variant).partition(" ")
        if keyword == "FROM":
            base, _, name = rest.partition(" AS ")
            stages[name] = (base, [])
        elif keyword and name:
            stages[name][1].append((keyword, rest))
    chain = [name]
    while stages[chain[0]][0] in stages:
        chain.insert(0, stages[chain[0]][0])
    for stage in chain:
        yield from stages[stage][1]


def copy_files(tree: Path, arguments: str, folder: Path) -> None:
    """COPY into the working folder: files, or the contents of a folder."""
    *sources, target = arguments.split()
    for source in sources:
        path, to = tree / source, folder / target
        if path.is_dir():
            to.parent.mkdir(parents=True, exist_ok=True)
            path.rename(to)
        else:
            to.mkdir(parents=True, exist_ok=True)
            path.rename(to / path.name)


def run_steps(folder: Path, python: str, variant: str, replaced: Sequence[Sequence[str]]) -> None:
    """Every step of the image, below a folder."""
    tree, work = folder / "tree", folder / "work"
    with tarfile.open(fileobj=io.BytesIO(git("archive", "--format=tar", "HEAD"))) as archive:
        archive.extractall(tree, filter="data")
    subprocess.run([python, "-m", "venv", str(folder / "venv")], check=True)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment["PATH"] = f"{folder / 'venv' / 'bin'}:{environment['PATH']}"
    work.mkdir()
    for keyword, rest in instructions((tree / "deploy" / "Dockerfile").read_text("utf-8"), variant):
        if keyword == "ENV":
            environment |= dict(pair.split("=", 1) for pair in rest.split())
        elif keyword == "COPY":
            print(f"COPY {rest}", flush=True)
            copy_files(tree, rest, work)
        elif keyword == "RUN":
            for command in rest.split(" && "):
                print(f"{'RUN' if command.startswith('pip ') else 'not run:'} {command}", flush=True)
                for old, new in replaced:
                    command = command.replace(old, new)
                if command.startswith("pip "):
                    quiet = command.replace("pip install", "pip install --quiet")
                    subprocess.run(["bash", "-c", quiet], cwd=work, env=environment, check=True)
        elif keyword == "ENTRYPOINT":
            print(f"ENTRYPOINT {rest} --help", flush=True)
            program = [*json.loads(rest), "--help"]
            subprocess.run(program, cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=True)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="the interpreter; the image has 3.12")
    parser.add_argument("--variant", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--replace", nargs=2, action="append", default=[], metavar=("OLD", "NEW"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_steps(Path(folder), options.python, options.variant, options.replace)
    print(f"the steps of {(ROOT / 'deploy' / 'Dockerfile').relative_to(ROOT)} end well")
    return 0


if __name__ == "__main__":
    sys.exit(main())
