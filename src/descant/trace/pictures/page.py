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

from descant.trace.pictures.scene import scene

if TYPE_CHECKING:
    from descant.trace.trace import Trace

__all__ = ["page"]

_SCRIPTS: Final = (
    "page.js", "layout.js", "hypotheses.js", "tree.js", "token.js", "text.js", "processors.js", "speculation.js", "beside.js",
)  # fmt: skip
_STYLES: Final = ("page.css", "tree.css", "views.css")

_PAGE: Final = """<!doctype html>
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


def page(trace: Trace, beside: Trace | None = None, title: str | None = None) -> str:
    """All pictures of a trace, or of two side by side, in one page."""
    told = scene(trace, beside, title)
    script, style = _joined(_SCRIPTS), _joined(_STYLES)
    return _PAGE.format(
        policy=_policy(script, style),
        title=html.escape(told["title"]),
        style=style,
        text=html.escape(_text(trace)),
        scene=_packed(told),
        script=script,
    )


def _text(trace: Trace) -> str:
    """What is there to read where no script runs."""
    try:
        return trace.text()
    except NotImplementedError:
        return ""


def _packed(told: dict[str, Any]) -> str:
    """A scene as its page holds it: JSON, deflated, in base 64."""
    said = json.dumps(told, separators=(",", ":"), allow_nan=False).encode("ascii")
    return base64.b64encode(zlib.compress(said, 9)).decode("ascii")


def _policy(script: str, style: str) -> str:
    """Nothing may be loaded, and nothing but the page's own script and style is obeyed."""
    return (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; "
        "base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}'"


@cache
def _joined(names: tuple[str, ...]) -> str:
    """Files of the page in their order."""
    folder = files("descant.trace.pictures") / "assets"
    found = [(folder / name).read_text("utf-8") for name in names if (folder / name).is_file()]
    return "\n" + "\n".join(found)
