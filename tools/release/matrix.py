"""Install the built package as a user does, with each extra alone, and run the README's first example.

    python -m tools.release.matrix --python python3.11 python3.12 python3.13

For each interpreter: a fresh venv, torch at the version of constraints.txt, then `descant` from the
folder `dist` and what it requires from the index that pip uses. Each extra has a venv of its own that
sees the first, so that its folder holds what the extra brings. Sizes are without byte code. The exit code
is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.docs import doc_blocks
from tools.first_run import megabytes

ROOT: Final = Path(__file__).resolve().parents[2]
INSTALL: Final = ("install", "--quiet", "--no-compile", "--disable-pip-version-check")


def extras() -> list[str]:
    """The extras of the package."""
    return list(
        tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    )


def torch_version() -> str:
    """torch as constraints.txt has it, the build for CPUs."""
    found = re.search(r"^torch==\S+$", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    if found is None:
        raise ValueError("constraints.txt has no version of torch: add a line `torch==...`")
    return found[0]


def readme_block(language: str) -> str:
    """The first block of a language in the README."""
    return next(block.text for block in doc_blocks.read(ROOT / "README.md") if block.language == language)


@dataclass(frozen=True)
class Environment:
    """A venv in which the package is installed, and tried."""

    folder: Path

    @classmethod
    def make(cls, interpreter: str, folder: Path, *, below: Environment | None = None) -> Environment:
        """A new venv; `below` is one whose packages it sees, and whose pip installs into it."""
        pip = ["--without-pip"] if below else []
        run([interpreter, "-m", "venv", *pip, str(folder)])
        made = cls(folder)
        if below:
            (made.packages / "below.pth").write_text(f"{below.packages}\n", encoding="utf-8")
        return made

    @property
    def python(self) -> str:
        """The interpreter."""
        return str(self.folder / "bin" / "python")

    @property
    def packages(self) -> Path:
        """The folder of installed packages."""
        [found] = self.folder.glob("lib/python*/site-packages")
        return found

    def install(self, pip: Environment, *requirements: str, links: Path) -> None:
        """Install requirements with the pip of an environment, and check that they fit together."""
        command = [pip.python, "-m", "pip", "--python", self.python]
        run([*command, *INSTALL, "--find-links", str(links), *requirements])
        run([*command, "check"])

    def run_example(self, models: Path) -> None:
        """Run the README's first example, and compare what it prints with the README."""
        with tempfile.TemporaryDirectory() as name:
            Path(name, "models").symlink_to(models)
            printed = run([self.python, "-I", "-c", readme_block("python")], folder=name)
        lines, expected = (
            [line.rstrip() for line in text.splitlines()] for text in (printed, readme_block("text"))
        )
        if lines != expected:
            raise ValueError(f"the README's first example must print what the README shows, got:\n{printed}")

    def brought(self) -> int:
        """The number of packages in it, those of the venv below not counted."""
        return len([*self.packages.glob("*.dist-info")])


def run(command: Sequence[str], folder: str | None = None) -> str:
    """Run a command; its output, or an error with what it said."""
    hidden = {"PYTHONPATH", "VIRTUAL_ENV"}
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:6])} ... failed:\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def rows(interpreter: str, options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, ...]]:
    """The lines of the table for an interpreter."""
    version = run([interpreter, "-c", "import platform; print(platform.python_version())"]).strip()
    base = Environment.make(interpreter, folder / "base")
    for name in ("torch", "descant", *options.extras):
        began = time.monotonic()
        here = (
            base if name in ("torch", "descant") else Environment.make(interpreter, folder / name, below=base)
        )
        before = (megabytes(here.packages), here.brought()) if here is base else (0.0, 0)
        wanted = {"torch": torch_version(), "descant": "descant"}.get(name, f"descant[{name}]")
        try:
            here.install(base, wanted, links=options.dist)
            brought = here.brought() - before[1], megabytes(here.packages) - before[0]
            if name != "torch":
                here.run_example(options.models)
        except (RuntimeError, ValueError) as error:
            yield version, name, "", "", f"{time.monotonic() - began:.0f}", f"FAILED: {error}"
            if here is base:
                return
        else:
            result = "" if name == "torch" else "ok"
            yield (
                version,
                name,
                str(brought[0]),
                f"{brought[1]:.0f}",
                f"{time.monotonic() - began:.0f}",
                result,
            )


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="interpreters, 3.11 or later")
    parser.add_argument("--extras", nargs="*", default=extras(), choices=extras(), metavar="EXTRA")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="the folder of the built wheel")
    parser.add_argument(
        "--models", type=Path, default=ROOT / "models", help="has smollm2: tools/models.py smollm2"
    )
    options = parser.parse_args()
    options.dist, options.models = options.dist.resolve(), options.models.resolve()
    print(
        "| Python | descant with | packages | MB | seconds | example |\n|---|---|---|---|---|---|", flush=True
    )
    failed = False
    for interpreter in options.python:
        with tempfile.TemporaryDirectory() as name:
            for row in rows(interpreter, options, Path(name)):
                failed |= row[-1].startswith("FAILED")
                print(f"| {' | '.join(row)} |", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
