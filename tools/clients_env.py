"""Build the venv of the server's tests: client programs of others, and Ray with what a server needs.

Run `python tools/clients_env.py [folder]`; it takes a few minutes and 2.5 GB. `tools/clients.txt` has the
versions, Node's among them, which comes from PyPI. OpenAI's client for Node comes from npm into the folder
`node` of the venv. It installs nothing if the venv has been built from the same versions.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
REQUIREMENTS: Final = ROOT / "tools" / "clients.txt"
# What Descant and lm-eval run models with, at the versions of the other tests.
SHARED: Final = ("torch", "transformers", "accelerate", "llguidance", "starlette", "uvicorn", "httptools")
NODE_PACKAGES: Final = {"openai": "7.55.0", "zod": "4.6.7"}


def shared_versions() -> list[str]:
    """The packages that constraints.txt pins as well, torch first."""
    text = (ROOT / "constraints.txt").read_text()
    found = []
    for name in SHARED:
        line = re.search(rf"^{name}==\S+$", text, re.MULTILINE)
        if line is None:
            sys.exit(f"constraints.txt has no version of {name}: add a line `{name}==...`")
        found.append(line[0])
    return found


def fingerprint() -> str:
    """What a venv is built from."""
    parts = [REQUIREMENTS.read_text(), *shared_versions(), json.dumps(NODE_PACKAGES)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def install_node_packages(folder: Path, python: Path) -> None:
    """OpenAI's client for Node, from npm; no script of a package runs."""
    target = folder / "node"
    target.mkdir()
    (target / "package.json").write_text(
        json.dumps({"private": True, "type": "module", "dependencies": NODE_PACKAGES}, indent=2)
    )
    options = ["--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error"]
    # npm starts the `node` that it finds first.
    path = f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    subprocess.run(
        [python.parent / "npm", "install", *options],
        cwd=target,
        check=True,
        env={**os.environ, "PATH": path},
    )


def build(folder: Path) -> Path:
    """Create the venv; returns its interpreter."""
    python, mark = folder / "bin" / "python", folder / "built-from"
    if mark.exists() and mark.read_text() == fingerprint():
        return python
    if folder.exists() and not (folder / "pyvenv.cfg").exists():
        sys.exit(f"{folder} exists and is not a venv: name another folder")
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--no-input"]
    torch, *others = shared_versions()
    # By itself, so that what is found first is the build for CPUs.
    subprocess.run([*pip, torch], check=True)
    subprocess.run([*pip, torch, *others, "-r", REQUIREMENTS], check=True)
    install_node_packages(folder, python)
    mark.write_text(fingerprint())
    return python


def main() -> None:
    """Build the venv that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / ".clients")
    print(build(parser.parse_args().folder.absolute()))


if __name__ == "__main__":
    main()
