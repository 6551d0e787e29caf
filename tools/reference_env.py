"""Build the reference venv: transformers 4.52.4 with the torch version of the tests.

Run `python tools/reference_env.py [folder]`. It installs nothing if the venv already has the right
versions.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PINS = {"transformers": "4.52.4"}
UNPINNED = ("accelerate", "sentencepiece", "protobuf", "optimum-quanto", "hqq")


def required_versions() -> dict[str, str]:
    """Packages with an exact version: the torch of the tests, and the reference itself."""
    found = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    if found is None:
        sys.exit("constraints.txt names no torch version: add a line `torch==...`")
    return {"torch": found[1], **PINS}


def installed_versions(python: Path) -> dict[str, str]:
    """Version by package in the venv of `python`; empty if there is no such venv."""
    if not python.exists():
        return {}
    listing = subprocess.run(
        [python, "-m", "pip", "list", "--format=json"], check=False, capture_output=True, text=True
    )
    if listing.returncode != 0:
        return {}
    return {p["name"].lower(): p["version"].split("+")[0] for p in json.loads(listing.stdout)}


def is_complete(python: Path) -> bool:
    """Whether the venv has every package at its version."""
    versions = installed_versions(python)
    return required_versions().items() <= versions.items() and versions.keys() >= set(UNPINNED)


def build(folder: Path) -> None:
    """Create or repair the venv in `folder`."""
    python = folder / "bin" / "python"
    if is_complete(python):
        print(f"{folder} is complete")
        return
    if folder.exists() and not (folder / "pyvenv.cfg").exists():
        sys.exit(f"{folder} exists and is not a venv: name another folder")
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--no-input"]
    versions = required_versions()
    subprocess.run([*pip, f"torch=={versions.pop('torch')}"], check=True)
    subprocess.run([*pip, *(f"{n}=={v}" for n, v in versions.items()), *UNPINNED], check=True)
    if not is_complete(python):
        sys.exit(f"{folder} is incomplete after installation: {installed_versions(python)}")
    print(f"{folder} is built")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / ".reference")
    build(parser.parse_args().folder)
