"""A trace as one page that needs nothing else: no network, no other file."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import zlib
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from descant.trace.pictures.page_data import DetailLevel, build_page_data

if TYPE_CHECKING:
    from descant.trace.trace import Trace

__all__ = ["MAX_PAGE_BYTES", "render_page"]

MAX_PAGE_BYTES: Final = 2_000_000  # bytes of a page
_MAX_NOSCRIPT_CHARS: Final = 100_000  # letters of the picture for those without scripts
_MAX_TITLE_BYTES: Final = 2_000  # bytes that a title has at most

_SCRIPTS: Final = (
    "page.js", "masthead.js", "layout.js", "hypotheses.js", "hand.js", "tree.js",
    "token.js", "text.js", "processors.js", "speculation.js", "beside.js",
)  # fmt: skip
_STYLES: Final = ("page.css", "tree.css", "views.css")

# What a page is told, and what it says of that: the first that fits.
_DETAIL_LEVELS: Final = (
    (DetailLevel(), ()),
    (DetailLevel(max_candidates=4), ("To keep this page small, four alternatives are shown at each place.",)),
    (
        DetailLevel(max_candidates=4, with_processors=False),
        ("To keep this page small, four alternatives are shown at each place, and not what processors did.",),
    ),
    (
        DetailLevel(max_candidates=0, with_processors=False, max_prompt_tokens=2_000),
        ("To keep this page small, only what was taken is shown, without alternatives and processors.",),
    ),
    (
        DetailLevel(with_choices=False, with_processors=False, max_prompt_tokens=2_000),
        ("To keep this page small, it is without probabilities, alternatives and processors.",),
    ),
)

_PAGE_TEMPLATE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<div id="app"><p class="loading">One moment.</p></div>
<noscript><pre>{text}</pre></noscript>
<svg id="blank" width="0" height="0" aria-hidden="true"></svg>
<script type="application/octet-stream" id="scene">{scene}</script>
<script>{script}</script>
</body>
</html>
"""


def render_page(trace: Trace, beside: Trace | None = None, title: str | None = None) -> str:
    """All pictures of a trace, or of two side by side, in one page of at most `LIMIT` bytes."""
    script, style = _read_assets(_SCRIPTS), _read_assets(_STYLES)
    parts = {
        "policy": _content_policy(script, style),
        "style": style,
        "text": html.escape(_noscript_text(trace)),
        "script": script,
    }
    room = (
        MAX_PAGE_BYTES
        - _MAX_TITLE_BYTES
        - sum(len(one.encode("utf-8")) for one in (_PAGE_TEMPLATE, *parts.values()))
    )
    told, packed = _fit_page_data(trace, beside, title, room)
    return _PAGE_TEMPLATE.format(title=html.escape(told["title"]), scene=packed, **parts)


def _fit_page_data(
    trace: Trace, beside: Trace | None, title: str | None, room: int
) -> tuple[dict[str, Any], str]:
    """The scene that tells the most and fits, and as it is packed."""
    for detail, notes in _DETAIL_LEVELS:
        told, packed = _pack_page_data(trace, beside, title, detail, notes)
        if len(packed) <= room:
            return told, packed
    # What is left is more than its choices: fewer steps of fewer requests, until it is little enough.
    steps, requests = max(len(one.steps) for one in (trace, beside or trace)), len(trace.requests)
    while True:
        steps, requests = steps // 2, max(1, requests // 2)
        detail = DetailLevel(0, False, False, max_prompt_tokens=500, max_steps=steps, max_requests=requests)
        said = f"the first {steps} steps of the first {requests} requests are shown, without their choices"
        told, packed = _pack_page_data(
            trace, beside, title, detail, (f"To keep this page small, only {said}.",)
        )
        if len(packed) <= room or not steps:
            return told, packed


def _pack_page_data(
    trace: Trace, beside: Trace | None, title: str | None, detail: DetailLevel, notes: tuple[str, ...]
) -> tuple[dict[str, Any], str]:
    told = {**build_page_data(trace, beside, title, detail), "notes": list(notes)}
    said = json.dumps(told, separators=(",", ":"), allow_nan=False).encode("ascii")
    return told, base64.b64encode(zlib.compress(said, 6)).decode("ascii")


def _noscript_text(trace: Trace) -> str:
    """What is there to read where no script runs."""
    if not trace.requests:
        return "This trace has no requests."
    text = trace.text()
    return text if len(text) <= _MAX_NOSCRIPT_CHARS else text[:_MAX_NOSCRIPT_CHARS] + "\n…"


def _content_policy(script: str, style: str) -> str:
    """Nothing may be loaded, and nothing but the page's own script and style is obeyed."""
    return (
        f"default-src 'none'; script-src {_csp_hash(script)}; style-src {_csp_hash(style)}; "
        "base-uri 'none'; form-action 'none'"
    )


def _csp_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}'"


@cache
def _read_assets(names: tuple[str, ...]) -> str:
    """Files of the page in their order."""
    folder = files("descant.trace.pictures") / "assets"
    return "\n" + "\n".join((folder / name).read_text("utf-8") for name in names)
