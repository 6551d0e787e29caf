"""A trace as one self-contained HTML page."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import zlib
from functools import cache
from importlib.resources import files
from typing import Any, Final

from descant.trace.pictures.page_data import DetailLevel, build_page_data
from descant.trace.pictures.selection import TraceSelection
from descant.trace.pictures.terminal import render_terminal
from descant.trace.trace_data import TraceData

__all__ = ["MAX_PAGE_BYTES", "render_page"]

MAX_PAGE_BYTES: Final = 2_000_000
_MAX_NOSCRIPT_CHARS: Final = 100_000
_MAX_TITLE_BYTES: Final = 2_000

_SCRIPTS: Final = (
    "page.js", "masthead.js", "layout.js", "hypotheses.js", "hand.js", "tree.js",
    "token.js", "text.js", "processors.js", "speculation.js", "beside.js",
)  # fmt: skip
_STYLES: Final = ("page.css", "tree.css", "views.css")

# Levels of detail with the note that the page shows: the first that fits is used.
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


def render_page(trace: TraceData, beside: TraceData | None = None, title: str | None = None) -> str:
    """All pictures of a trace, or of two side by side, in one page of at most `MAX_PAGE_BYTES`."""
    script, style = _read_assets(_SCRIPTS), _read_assets(_STYLES)
    parts = {
        "policy": _content_policy(script, style),
        "style": style,
        "text": html.escape(_noscript_text(trace)),
        "script": script,
    }
    max_bytes = (
        MAX_PAGE_BYTES
        - _MAX_TITLE_BYTES
        - sum(len(one.encode("utf-8")) for one in (_PAGE_TEMPLATE, *parts.values()))
    )
    data, packed = _fit_page_data(trace, beside, title, max_bytes)
    return _PAGE_TEMPLATE.format(title=html.escape(data["title"]), scene=packed, **parts)


def _fit_page_data(
    trace: TraceData, beside: TraceData | None, title: str | None, max_bytes: int
) -> tuple[dict[str, Any], str]:
    """The most detailed page data that fits, and its packed form."""
    for detail, notes in _DETAIL_LEVELS:
        data, packed = _pack_page_data(trace, beside, title, detail, notes)
        if len(packed) <= max_bytes:
            return data, packed
    # Still too large: halve the steps and requests until it fits.
    steps, requests = max(len(one.steps) for one in (trace, beside or trace)), len(trace.requests)
    while True:
        steps, requests = steps // 2, max(1, requests // 2)
        detail = DetailLevel(0, False, False, max_prompt_tokens=500, max_steps=steps, max_requests=requests)
        scope = f"the first {steps} steps of the first {requests} requests are shown, without their choices"
        data, packed = _pack_page_data(
            trace, beside, title, detail, (f"To keep this page small, only {scope}.",)
        )
        if len(packed) <= max_bytes or not steps:
            return data, packed


def _pack_page_data(
    trace: TraceData, beside: TraceData | None, title: str | None, detail: DetailLevel, notes: tuple[str, ...]
) -> tuple[dict[str, Any], str]:
    data = {**build_page_data(trace, beside, title, detail), "notes": list(notes)}
    encoded = json.dumps(data, separators=(",", ":"), allow_nan=False).encode("ascii")
    return data, base64.b64encode(zlib.compress(encoded, 6)).decode("ascii")


def _noscript_text(trace: TraceData) -> str:
    """The page's text for browsers without scripts."""
    if not trace.requests:
        return "This trace has no requests."
    text = render_terminal(trace, "tree", TraceSelection().resolve(trace)).removesuffix("\n")
    return text if len(text) <= _MAX_NOSCRIPT_CHARS else text[:_MAX_NOSCRIPT_CHARS] + "\n…"


def _content_policy(script: str, style: str) -> str:
    """A content security policy that allows only the page's own script and style."""
    return (
        f"default-src 'none'; script-src {_csp_hash(script)}; style-src {_csp_hash(style)}; "
        "base-uri 'none'; form-action 'none'"
    )


def _csp_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}'"


@cache
def _read_assets(names: tuple[str, ...]) -> str:
    """The contents of asset files, joined in order."""
    folder = files("descant.trace.pictures") / "assets"
    return "\n" + "\n".join((folder / name).read_text("utf-8") for name in names)
