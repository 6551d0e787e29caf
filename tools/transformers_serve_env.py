"""Build a venv with `transformers serve`, which `python -m bench.server --transformers` compares with.

Run `python tools/transformers_serve_env.py [folder]`; it takes a few minutes and 1 GB. The packages have the
versions of constraints.txt, torch and transformers among them; FastAPI, which is not in it, has one here.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
CONSTRAINTS: Final = ROOT / "constraints.txt"
FASTAPI: Final = "fastapi==0.162.7"  # the one package of the extra that constraints.txt has not


def build(folder: Path) -> Path:
    """Create the venv; returns its interpreter."""
    if folder.exists() and not (folder / "pyvenv.cfg").exists():
        sys.exit(f"{folder} exists and is not a venv: name another folder")
    python = folder / "bin" / "python"
    venv.create(folder, with_pip=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--no-input", "--no-compile", "-c", CONSTRAINTS]
    subprocess.run([*pip, "transformers[serving]", "jinja2", FASTAPI], check=True)
    check = "from transformers.utils.import_utils import is_serve_available as f; raise SystemExit(not f())"
    subprocess.run([python, "-c", check], check=True)
    return python


def main() -> None:
    """Build the venv that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / ".transformers-serve")
    print(build(parser.parse_args().folder.absolute()))


if __name__ == "__main__":
    main()
