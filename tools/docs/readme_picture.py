"""The picture at the top of the README: the run of its first example, drawn by the library.

python tools/docs/readme_picture.py        write docs/pictures/beams.svg
"""

import contextlib
import io
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.docs import doc_blocks  # noqa: E402

PICTURE = ROOT / "docs" / "pictures" / "beams.svg"


def draw() -> str:
    """The beam tree of the README's first example as SVG."""
    [(first, _), *_] = doc_blocks.paired(ROOT / "README.md")
    names: dict[str, Any] = {}
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(first.text, first.where, "exec"), names)  # noqa: S102
    finally:
        os.chdir(before)
    picture: str = names["out"].trace.svg("tree")
    return picture


def main() -> int:
    """Command line."""
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(draw(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
