"""Follow the README in an empty environment, from its install line to the picture of a beam search.

    python tools/first_run.py
    python tools/first_run.py --replace '"descant[cli]"' '"$CHECKOUT/dist/NAME.whl[cli]"'

It runs the first bash block of the README line by line, its first python block, and the bash block that
writes the page. For each step it prints its seconds and the megabytes it has added to the folder, which has
the venv and the model. `--replace` changes the text of a line, for a version that is not published or a
machine without access to an index; `$CHECKOUT` is the root of this checkout. pip's cache is not used.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the working directory may be any

from tools.docs import doc_blocks  # noqa: E402

PAGE = "run.html"


def megabytes(folder: Path) -> float:
    """The size of the files below a folder."""
    sizes = (path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return float(sum(sizes) / 10**6)


def block(language: str, number: int) -> str:
    """A block of the README, counted from 1."""
    found = [one for one in doc_blocks.read(ROOT / "README.md") if one.language == language]
    return found[number - 1].text


def steps(replaced: Sequence[Sequence[str]]) -> Iterator[tuple[str, list[str]]]:
    """What to run in order: a name, and a command."""
    for line in block("bash", 1).splitlines():
        for old, new in replaced:
            line = line.replace(old, new)
        yield line.partition("  #")[0], ["bash", "-euo", "pipefail", "-c", line]
    yield "the first example", ["python", "-I", "-c", block("python", 1)]
    yield f"the commands that write {PAGE}", ["bash", "-euo", "pipefail", "-c", block("bash", 2)]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replace", nargs=2, action="append", default=[], metavar=("OLD", "NEW"))
    replaced = parser.parse_args().replace
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        environment["PATH"] = f"{folder / 'venv' / 'bin'}:{environment['PATH']}"
        environment |= {"PIP_NO_CACHE_DIR": "1", "PIP_QUIET": "1", "CHECKOUT": str(ROOT)}
        began = last = time.monotonic()
        held = megabytes(folder)
        for title, command in steps(replaced):
            subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
            now, size = time.monotonic(), megabytes(folder)
            print(f"{now - last:7.1f} s {size - held:8.1f} MB  {title}", flush=True)
            last, held = now, size
        page = (folder / PAGE).read_text(encoding="utf-8")
        if "<svg" not in page and "data-node" not in page:
            print(f"{PAGE} has no picture", file=sys.stderr)
            return 1
        print(f"{last - began:7.1f} s {held:8.1f} MB  from an empty venv to {PAGE} of {len(page)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
