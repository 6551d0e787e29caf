"""SVG elements, and colours for light and dark mode."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final
from xml.sax.saxutils import escape, quoteattr

from descant.tokenization.display import TextPiece, escape_invisible, join_pieces

FONT_SIZE: Final = 13  # of tokens
CELL_WIDTH: Final = 7.9  # width of a character in the widest of the usual fonts
NUM_GROUP_COLOURS: Final = 8  # colours of beam groups; more groups reuse them with other letters

_MONO: Final = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono','Liberation Mono',monospace"
_SANS: Final = "system-ui,-apple-system,'Segoe UI',Roboto,'Noto Sans',sans-serif"

# Colours by name, for light and dark; text has a contrast of at least 4.5 to its background.
_COLOURS: Final = {
    "paper": ("#ffffff", "#0d1117"),
    "frame": ("#d8dee4", "#2b323b"),
    "sheet": ("#f3f5f8", "#1a212b"),
    "ink": ("#1c2128", "#e2e7ee"),
    "quiet": ("#57606a", "#9aa4b0"),
    "faint": ("#6a737d", "#848d97"),
    "rule": ("#aab3bd", "#4b5563"),
    "accent": ("#2f5fd0", "#8fb0ff"),
    "wash": ("#e8eefb", "#1c2a4a"),
    "good": ("#1b7a48", "#6fcf9b"),
    "calm": ("#e3f4ea", "#15301f"),
    "bad": ("#b3261e", "#ff8f85"),
    "warm": ("#9a5b00", "#f0b866"),
    "shade1": ("#fdf3df", "#2c2516"),
    "shade2": ("#fae3b6", "#46361c"),
    "shade3": ("#f6cd86", "#62471f"),
    "shade4": ("#f0b15c", "#825a24"),
    "g0": ("#2f5fd0", "#8fb0ff"),
    "g1": ("#b3470b", "#ff9e64"),
    "g2": ("#187a54", "#6fcf9b"),
    "g3": ("#8a3fb0", "#cf9bf0"),
    "g4": ("#a8325f", "#ff8fb5"),
    "g5": ("#6b6a00", "#d0cf5c"),
    "g6": ("#00768a", "#5fcfe0"),
    "g7": ("#6d5241", "#d0ab93"),
}
_GROUPS: Final = range(NUM_GROUP_COLOURS)
# Colours of CSS classes: those of their own names, and others.
_FILLS: Final = {
    **{name: name for name in ("sheet", "wash", "ink", "quiet", "faint", "accent", "good", "bad", "warm")},
    **{f"shade{level}": f"shade{level}" for level in range(1, 5)},
    **{f"f{group}": f"g{group}" for group in _GROUPS},
    "paper": "paper", "hole": "paper", "shade0": "paper", "m": "faint", "bar": "rule", "calm": "calm",
    "fine": "good",
}  # fmt: skip
_STROKES: Final = {
    "paper": "frame", "rule": "rule", "frame": "frame", "strong": "accent", "firm": "quiet", "right": "good",
    "wrong": "bad", "shadow": "warm", **{f"g{group}": f"g{group}" for group in _GROUPS},
}  # fmt: skip
_BASE_STYLE: Final = (
    f"text{{font:{FONT_SIZE}px {_MONO};white-space:pre;direction:ltr;unicode-bidi:isolate}}"
    "tspan{unicode-bidi:isolate}"
    f".s{{font-family:{_SANS}}}"
    ".big{font-size:15px;font-weight:600}.small{font-size:10.5px}.note{font-size:11.5px}"
    ".bold{font-weight:700}.gone{text-decoration:line-through}"
    "path,line,.empty{fill:none}"
    ".dash{stroke-dasharray:3 3}.dots{stroke-dasharray:1 2.5;stroke-linecap:round}"
)


def element(tag: str, *children: str, **attributes: object) -> str:
    """An element with escaped children; `class_` becomes class, `data_x` data-x, None is left out."""
    attribute_text = "".join(
        f" {name.rstrip('_').replace('_', '-')}={quoteattr(_format_attribute(value))}"
        for name, value in attributes.items()
        if value is not None
    )
    return f"<{tag}{attribute_text}>{''.join(children)}</{tag}>" if children else f"<{tag}{attribute_text}/>"


def text(
    content: str | Sequence[TextPiece], x: float, y: float, kind: str = "ink", anchor: str | None = None
) -> str:
    """A line of text: token pieces, or a string, which is escaped here."""
    pieces = escape_invisible(content) if isinstance(content, str) else content
    spans = "".join(
        element("tspan", escape(part), class_="m") if is_escaped else escape(part)
        for part, is_escaped in pieces
    )
    return element("text", spans, x=x, y=y, class_=kind, text_anchor=anchor) if spans else ""


def caption(content: str, x: float, y: float, kind: str = "quiet", anchor: str | None = None) -> str:
    """A line of text in the picture's caption font."""
    return text(content, x, y, f"s note {kind}", anchor)


def box(x: float, y: float, width: float, height: float, kind: str, **attributes: object) -> str:
    """A box with round corners."""
    return element(
        "rect", x=x, y=y, width=width, height=height, rx=attributes.pop("rx", 6), class_=kind, **attributes
    )


def line(x1: float, y1: float, x2: float, y2: float, kind: str, width: float = 1) -> str:
    """A straight line."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=kind, stroke_width=width)


def path(d: str, kind: str, width: float = 1) -> str:
    """A curve."""
    return element("path", d=d, class_=kind, stroke_width=width)


def titled_group(title: str | Iterable[str], *children: str, **attributes: object) -> str:
    """A group with a tooltip of one or more lines."""
    lines = [title] if isinstance(title, str) else title
    tooltip = "\n".join(join_pieces(escape_invisible(line)) for line in lines)
    return element("g", element("title", escape(tooltip)), *children, **attributes)


def svg_document(body: Sequence[str], width: float, height: float, title: str, description: str) -> str:
    """The whole picture on its own background, so that it is readable on any page."""
    width, height = round(width), round(height)
    inner = "\n".join(body)
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img" aria-labelledby="title description">',
            element("title", escape(join_pieces(escape_invisible(title))), id="title"),
            element("desc", escape(join_pieces(escape_invisible(description))), id="description"),
            f"<style>{_stylesheet(inner)}</style>",
            box(0.5, 0.5, width - 1, height - 1, "paper", rx=10),
            inner,
            "</svg>\n",
        )
    )


def _stylesheet(body: str) -> str:
    """The rules for the classes in use, for light and dark."""
    used = {"paper"} | {name for classes in re.findall(r' class="([^"]*)"', body) for name in classes.split()}
    light, dark = (
        "".join(
            f".{name}{{{attribute}:{_COLOURS[colour][shade]}}}"
            for attribute, colours in (("fill", _FILLS), ("stroke", _STROKES))
            for name, colour in colours.items()
            if name in used
        )
        for shade in (0, 1)
    )
    return f"{_BASE_STYLE}{light}@media (prefers-color-scheme:dark){{{dark}}}"


def _format_attribute(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1f}".removesuffix(".0")
    return str(value)
