"""The pictures of docs/guide/architecture.md: the rooms and their layers, a step, and the way of a request.

    python tools/docs/architecture_pictures.py             write rooms.svg, step.svg and request.svg
    python tools/docs/architecture_pictures.py --check     fail if a file differs

The rooms come from the import contract in pyproject.toml and from the docstring of each package. The step
names interfaces and records of `descant.core`; a test checks that they exist. The way of a request is a list
of classes with the first sentences of their docstrings.
"""

from __future__ import annotations

import argparse
import ast
import html
import re
import sys
import textwrap
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"
SOURCE = ROOT / "src" / "descant"

STYLE = """<style>
text { font: 13px system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif; fill: #1f2328 }
.name { font: 600 14px ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace }
.note { font-size: 11.5px; fill: #57606a }
.box { fill: #f3f5f8; stroke: #aab3bd }
.flow { stroke: #57606a; fill: none }
.head { fill: #57606a }
.paper { fill: #ffffff }
@media (prefers-color-scheme: dark) {
text { fill: #e2e7ee } .note { fill: #9aa4b0 } .box { fill: #1a212b; stroke: #3b4550 }
.flow { stroke: #9aa4b0 } .head { fill: #9aa4b0 } .paper { fill: #0d1117 }
}
</style>
<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">
<path class="head" d="M0 0L8 4L0 8z"/></marker></defs>"""

WIDTH = 900
MARGIN = 16
LINE = 15  # height of a line of notes


def layers() -> list[list[str]]:
    """The existing rooms of each layer, top first, as import-linter enforces them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    [contract] = [one for one in settings["tool"]["importlinter"]["contracts"] if one["id"] == "layers"]
    rows = [re.findall(r"\w+", line) for line in contract["layers"]]
    rows = [[room for room in row if exists(room)] for row in rows]
    return [row for row in rows if row]


def exists(room: str) -> bool:
    """Whether a room of the contract exists."""
    return (SOURCE / room / "__init__.py").is_file() or (SOURCE / f"{room}.py").is_file()


def summary(room: str) -> str:
    """The first sentence of a room's docstring."""
    path = SOURCE / room / "__init__.py"
    path = path if path.is_file() else SOURCE / f"{room}.py"
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    sentence = doc.split("\n\n")[0].replace("\n", " ").replace("`", "")
    return re.sub(r"(?<=\w)[.]$", "", sentence)


def box(at: tuple[float, float], size: tuple[float, float], name: str, notes: Sequence[str]) -> str:
    """A named box with lines of notes."""
    (x, y), (width, height) = at, size
    parts = [f'<rect class="box" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"/>']
    parts.append(f'<text class="name" x="{x + 10:g}" y="{y + 20:g}">{html.escape(name)}</text>')
    parts += [
        f'<text class="note" x="{x + 10:g}" y="{y + 37 + LINE * number:g}">{html.escape(note)}</text>'
        for number, note in enumerate(notes)
    ]
    return "\n".join(parts)


def document(height: float, title: str, parts: Sequence[str]) -> str:
    """A whole SVG file."""
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}" '
        f'viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{html.escape(title)}">',
        STYLE,
        f'<rect class="paper" width="{WIDTH}" height="{height:g}"/>',
        *parts,
        "</svg>\n",
    ])  # fmt: skip


def rooms_svg() -> str:
    """The rooms, one band a layer; a room imports only from layers below it."""
    parts, y, gap = [], float(MARGIN), 12.0
    for row in layers():
        width = (WIDTH - 2 * MARGIN - 60 - gap * (len(row) - 1)) / len(row)
        notes = {room: textwrap.wrap(summary(room), int((width - 20) / 6.1)) for room in row}
        height = 30 + LINE * max(map(len, notes.values())) + 6
        for number, room in enumerate(row):
            name = f"{room}/" if (SOURCE / room).is_dir() else f"{room}.py"
            parts.append(box((MARGIN + number * (width + gap), y), (width, height), name, notes[room]))
        y += height + gap
    x = WIDTH - MARGIN - 26
    parts.append(f'<path class="flow" d="M{x} {MARGIN + 8}V{y - gap - 8:g}" marker-end="url(#arrow)"/>')
    middle = (MARGIN + y) / 2
    parts.append(
        f'<text class="note" transform="rotate(90 {x + 12} {middle:g})" x="{x + 12}" y="{middle:g}" '
        'text-anchor="middle">imports run downward only</text>'
    )
    return document(y - gap + MARGIN, "The rooms of Descant and their layers", parts)


@dataclass(frozen=True)
class Phase:
    """One phase of a step: which interface acts, and which record or call leaves it."""

    name: str
    interface: str
    result: str
    notes: tuple[str, ...]


PHASES = (
    Phase("propose", "Strategy", "Proposal", ("rows to run; drafts", "come from a Drafter")),
    Phase("forward", "Model", "ForwardOutput", ("one batched forward", "for all rows")),
    Phase("process", "Processor", "Tensor", ("logits to scores,", "in processor order")),
    Phase("select", "Strategy", "Selection", ("parents, accepted", "drafts, next tokens")),
    Phase("commit", "RowCache", "Rows", ("rows.take(parents)", "cache.commit(...)")),
)


def step_svg() -> str:
    """The five phases of a step from left to right, with the table they start from and end in."""
    gap, height, top = 22.0, 96.0, 46.0
    width = (WIDTH - 2 * MARGIN - gap * (len(PHASES) - 1)) / len(PHASES)
    parts = [f'<text class="note" x="{MARGIN}" y="28">rows [R]: tokens, lengths, parameters, state</text>']
    for number, phase in enumerate(PHASES):
        x = MARGIN + number * (width + gap)
        parts.append(
            box((x, top), (width, height), phase.name, (f"{phase.interface} interface", *phase.notes))
        )
        if number < len(PHASES) - 1:
            line = f"M{x + width:g} {top + height / 2:g}h{gap - 2:g}"
            parts.append(f'<path class="flow" d="{line}" marker-end="url(#arrow)"/>')
        result = "scores [N, V]" if phase.result == "Tensor" else phase.result
        middle = x + width / 2
        parts.append(
            f'<text class="note" x="{middle:g}" y="{top + height + 18:g}" text-anchor="middle">'
            f"{html.escape(result)}</text>"
        )
    last, first = WIDTH - MARGIN - width / 2, MARGIN + width / 2
    y = top + height + 30
    back = f"M{last:g} {y:g}v22H{first:g}V{top + height + 24:g}"
    parts.append(f'<path class="flow" d="{back}" marker-end="url(#arrow)"/>')
    parts.append(
        f'<text class="note" x="{WIDTH / 2:g}" y="{y + 38:g}" text-anchor="middle">'
        "the next step; finished rows leave, admitted requests join</text>"
    )
    return document(y + 54, "One step: propose, forward, process, select, commit", parts)


# The classes that a prompt passes, in this order, each with its file.
STATIONS = (
    ("CallOptions", "api/call.py"),
    ("Request", "engine/request.py"),
    ("DecodingPlan", "engine/planning/planner.py"),
    ("ResolvedRequest", "engine/request.py"),
    ("Placement", "engine/tables/table_set.py"),
    ("RunningRequest", "engine/tables/running_requests.py"),
    ("Rows", "core/rows.py"),
    ("Selection", "core/records.py"),
    ("Finished", "engine/protocol.py"),
)
_COLUMNS = 3


def sentence(name: str, file: str) -> str:
    """The first sentence of a class's docstring."""
    tree = ast.parse((SOURCE / file).read_text(encoding="utf-8"))
    [node] = [one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == name]
    text = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ").replace("`", "")
    return re.split(r"(?<=\w)[.](?:\s|$)", text)[0]


def request_svg() -> str:
    """The way of a request: the classes that a prompt passes, from the arguments of a call to its result."""
    gap, width = 30.0, (WIDTH - 2 * MARGIN - 2 * 30.0) / _COLUMNS
    texts = [textwrap.wrap(sentence(name, file), int((width - 20) / 6.1)) for name, file in STATIONS]
    height = 30 + LINE * (1 + max(map(len, texts))) + 8
    parts = []
    for number, (name, file) in enumerate(STATIONS):
        row, column = divmod(number, _COLUMNS)
        x, y = MARGIN + column * (width + gap), MARGIN + row * (height + gap)
        parts.append(box((x, y), (width, height), name, (file, *texts[number])))
        if number == len(STATIONS) - 1:
            continue
        if column < _COLUMNS - 1:
            line = f"M{x + width:g} {y + height / 2:g}h{gap - 2:g}"
        else:  # to the first box of the next row
            below = y + height + gap / 2
            line = f"M{x + width / 2:g} {y + height:g}V{below:g}H{MARGIN + width / 2:g}v{gap / 2 - 2:g}"
        parts.append(f'<path class="flow" d="{line}" marker-end="url(#arrow)"/>')
    rows = -(-len(STATIONS) // _COLUMNS)
    bottom = MARGIN + rows * (height + gap) - gap + MARGIN
    return document(bottom, "The way of a request, from the arguments of a call to its result", parts)


PICTURE_FILES = {
    PICTURES / "rooms.svg": rooms_svg,
    PICTURES / "step.svg": step_svg,
    PICTURES / "request.svg": request_svg,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pictures, or check them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="fail if a picture differs from what is drawn")
    options = parser.parse_args(arguments)
    stale = [
        path
        for path, draw in PICTURE_FILES.items()
        if not path.is_file() or path.read_text("utf-8") != draw()
    ]
    if options.check:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is stale: run `python tools/docs/architecture_pictures.py`")
        return int(bool(stale))
    for path in stale:
        path.write_text(PICTURE_FILES[path](), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
