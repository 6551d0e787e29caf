"""A trace as one self-contained HTML page."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final

from descant.tokenization.display import TextPiece, escape_invisible, join_pieces
from descant.trace.pictures.drawing import render_terminal
from descant.trace.records import ChoiceRecord, RequestRecord, RowRecord, StepRecord, round_finite
from descant.trace.trace_data import (
    Node,
    TraceData,
    TraceSelection,
    num_accepted_drafts,
    text_pieces,
    token_pieces,
)

PAGE_DATA_VERSION: Final = 1
_MAX_TEXT_CHARS: Final = 1_000
_MAX_TITLE_CHARS: Final = 200
_MAX_TOKEN_CHARS: Final = 400
_MAX_SETTING_CHARS: Final = 1_000
_MAX_NESTING: Final = 20  # of lists in a setting
_MAX_PATH_NODES: Final = 400_000  # on the paths of all sequences of a request


@dataclass(frozen=True)
class DetailLevel:
    """The share of a trace that a page contains; None: everything."""

    max_candidates: int | None = None  # candidates per choice, in addition to chosen tokens
    with_processors: bool = True
    with_choices: bool = True
    max_prompt_tokens: int | None = None  # the last tokens of a prompt
    max_steps: int | None = None  # the first steps of a request
    max_requests: int | None = None  # the first requests


def build_page_data(
    trace: TraceData,
    beside: TraceData | None = None,
    title: str | None = None,
    detail: DetailLevel | None = None,
) -> dict[str, Any]:
    """The data of a page of one trace or of two, as JSON values."""
    detail = detail or DetailLevel()
    traces = [trace] if beside is None else [trace, beside]
    return {
        "version": PAGE_DATA_VERSION,
        "title": _clip_text(
            title or f"{'A run' if beside is None else 'Two runs'} of {trace.header.model}", _MAX_TITLE_CHARS
        ),
        "runs": [_run_data(run, detail) for run in traces],
    }


def _run_data(trace: TraceData, detail: DetailLevel) -> dict[str, Any]:
    """One trace, with the texts of the tokens that occur in it."""
    records = list(trace.requests.values())[: detail.max_requests]
    steps: dict[int, list[tuple[StepRecord, list[RowRecord]]]] = {record.request: [] for record in records}
    for step in trace.steps:
        rows: dict[int, list[RowRecord]] = {}
        for row in step.rows:
            rows.setdefault(row.request, []).append(row)
        for request, request_rows in rows.items():
            if request in steps:
                steps[request].append((step, request_rows))
    nodes: dict[int, list[Node]] = {record.request: [] for record in records}
    for node in trace.tree.nodes.values():
        if node.request in nodes:
            nodes[node.request].append(node)
    requests = [
        _RequestData(trace, record, steps[record.request][: detail.max_steps], detail).build(
            nodes[record.request]
        )
        for record in records
    ]
    tokens = set().union(*(_request_tokens(request) for request in requests))
    return {
        "model": _clip_text(trace.header.model),
        "descant": _clip_text(trace.header.descant),
        "texts": {
            token: _clip_pieces(token_pieces(trace, token))
            for token in sorted(tokens)
            if trace.texts.get(token)
        },
        "special": sorted(tokens & trace.special_tokens),
        "cuts": [{"step": cut.step, "what": _clip_text(cut.what)} for cut in trace.truncations],
        "requests": requests,
    }


class _RequestData:
    """Builds the data of one request; nodes are referred to by column index."""

    def __init__(
        self,
        trace: TraceData,
        request: RequestRecord,
        steps: Sequence[tuple[StepRecord, list[RowRecord]]],
        detail: DetailLevel,
    ):
        self.trace, self.request, self.steps, self.detail = trace, request, steps, detail
        self.choices: list[dict[str, Any]] = []
        self._choice_index: dict[int, int] = {}  # id() of a choice record -> index in `choices`

    def build(self, nodes: Iterable[Node]) -> dict[str, Any]:
        """The data of the request."""
        request, result = self.request, self.trace.results.get(self.request.request)
        last = self.steps[-1][0].step if self.steps else -1
        shown_nodes = sorted((node for node in nodes if node.step <= last), key=lambda node: node.number)
        self.node_index = {node.number: index for index, node in enumerate(shown_nodes)}
        taken = _taken_tokens(shown_nodes)
        steps = [self._step_data(step, rows, taken) for step, rows in self.steps]
        prompt = (
            request.prompt
            if self.detail.max_prompt_tokens is None
            else request.prompt[-self.detail.max_prompt_tokens :]
        )
        return {
            "request": request.request,
            "method": _clip_text(request.method),
            "config": {
                _clip_text(name): _setting_value(value) for name, value in list(request.config.items())[:200]
            },
            "stages": [_clip_text(name) for name in request.stages[:200]],
            "beams": request.beams,
            "groups": request.groups,
            "sequences": request.sequences,
            "drafter": None if request.drafter is None else _clip_text(request.drafter),
            "demands": request.demands,
            "prompt": list(prompt),
            "phrase": text_pieces(self.trace, prompt),
            "unshown": len(request.prompt) - len(prompt),
            "error": None if result is None or result.error is None else _clip_text(result.error),
            "nodes": self._node_columns(shown_nodes),
            "looks": self.choices,
            "steps": steps,
            "said": self._sequences(shown_nodes),
        }

    def _node_columns(self, nodes: Sequence[Node]) -> dict[str, list[Any]]:
        return {
            "number": [node.number for node in nodes],
            "parent": [-1 if node.parent is None else self.node_index[node.parent] for node in nodes],
            "token": [-1 if node.token is None else node.token for node in nodes],
            "depth": [node.depth for node in nodes],
            "born": [node.step for node in nodes],
            "left": [node.dropped_step for node in nodes],
            "slot": [node.slot for node in nodes],
            "group": [node.group for node in nodes],
            "raw": [round_finite(node.raw) for node in nodes],
            "processed": [round_finite(node.processed) for node in nodes],
            "score": [round_finite(node.score) for node in nodes],
            "met": [node.met for node in nodes],
            "guessed": [int(node.is_draft) for node in nodes],
            "state": [node.state for node in nodes],
            "reason": [None if node.reason is None else _clip_text(node.reason) for node in nodes],
            "rank": [node.rank for node in nodes],
            "look": [
                -1 if node.choice is None else self._choice_index.get(id(node.choice), -1) for node in nodes
            ],
        }

    def _step_data(
        self, step: StepRecord, rows: Sequence[RowRecord], taken: dict[int, set[int]]
    ) -> dict[str, Any]:
        return {
            "step": step.step,
            "seconds": round_finite(step.seconds),
            "cache": step.cache,
            "rows": [
                {
                    "at": self.node_index[row.at],
                    "slot": row.slot,
                    "drafts": list(row.drafts),
                    "accepted": num_accepted_drafts(row, row.runs[0], self.request) if row.runs else 0,
                    "looks": [
                        self._add_choice(choice, row, index, taken) for index, choice in enumerate(row.looks)
                    ]
                    if self.detail.with_choices
                    else [],
                }
                for row in rows
            ],
        }

    def _add_choice(
        self, choice: ChoiceRecord, row: RowRecord, index: int, taken: dict[int, set[int]]
    ) -> int:
        """Add a choice; returns its index. Chosen tokens and rejected drafts are always included."""
        top = choice.top
        if self.detail.max_candidates is not None:
            required = taken.get(id(choice), set()) | set(row.drafts[index : index + 1])
            top = tuple(
                candidate
                for rank, candidate in enumerate(top)
                if rank < self.detail.max_candidates or candidate.token in required
            )
        self._choice_index[id(choice)] = len(self.choices)
        self.choices.append(
            {
                "entropy": round_finite(choice.entropy),
                "left": round_finite(choice.left),
                "top": _rounded(top),
                "stages": [
                    {
                        "name": _clip_text(stage.name),
                        "kept": stage.kept,
                        "cut": stage.cut,
                        "mass": round_finite(stage.mass),
                        "moved": _rounded(stage.moved[: self.detail.max_candidates]),
                    }
                    for stage in (choice.stages if self.detail.with_processors else ())
                ],
            }
        )
        return len(self.choices) - 1

    def _sequences(self, nodes: Sequence[Node]) -> list[dict[str, Any]]:
        """The returned sequences, or the running ones if there are none; of long ones the first."""
        result, index = self.trace.results.get(self.request.request), self.node_index
        ends: list[tuple[int, str | None, float | None, Sequence[int] | None]] = []
        if result is not None and all(sequence.leaf in index for sequence in result.sequences):
            ends = [
                (sequence.leaf, _clip_text(sequence.reason), sequence.score, sequence.unmet)
                for sequence in result.sequences
            ]
        ends = ends or [
            (node.number, None, node.score, None)
            for node in nodes
            if node.parent is not None
            and node.dropped_step is None
            and not any(child in index for child in node.children)
        ]
        sequences: list[dict[str, Any]] = []
        length = 0
        for leaf, reason, score, unmet in ends:
            length += self.trace.tree.node(leaf).depth
            if sequences and length > _MAX_PATH_NODES:
                break
            sequences.append(
                {
                    "nodes": [index[node.number] for node in self.trace.tree.path_to(leaf)],
                    "reason": reason,
                    "score": round_finite(score),
                    "unmet": None if unmet is None else list(unmet),
                }
            )
        return sequences


# ------------------------------------------------------------------------ parts
def _taken_tokens(nodes: Iterable[Node]) -> dict[int, set[int]]:
    """The chosen tokens by id() of their choice record."""
    taken: dict[int, set[int]] = {}
    for node in nodes:
        if node.choice is not None and node.token is not None:
            taken.setdefault(id(node.choice), set()).add(node.token)
    return taken


def _rounded(entries: Iterable[tuple[int, float, float]]) -> list[list[float | None]]:
    """Tokens, each with two log-probabilities."""
    return [[token, round_finite(first), round_finite(second)] for token, first, second in entries]


def _request_tokens(request: dict[str, Any]) -> set[int]:
    """Every token that occurs in a request's data."""
    tokens = {*request["prompt"], *request["nodes"]["token"]}
    for choice in request["looks"]:
        tokens.update(entry[0] for entry in choice["top"])
        tokens.update(entry[0] for stage in choice["stages"] for entry in stage["moved"])
    for step in request["steps"]:
        for row in step["rows"]:
            tokens.update(row["drafts"])
    return tokens - {-1}


def _clip_pieces(pieces: Iterable[TextPiece], max_chars: int = _MAX_TOKEN_CHARS) -> list[TextPiece]:
    """Pieces cut to `max_chars` characters."""
    clipped: list[TextPiece] = []
    for text, is_escaped in pieces:
        if len(text) > max_chars:
            return [*clipped, (text[:max_chars], is_escaped), ("…", True)]
        clipped.append((text, is_escaped))
        max_chars -= len(text)
    return clipped


def _clip_text(text: str, max_chars: int = _MAX_TEXT_CHARS) -> str:
    """A text as one string of at most `max_chars`, with invisible characters escaped."""
    return join_pieces(_clip_pieces(escape_invisible(text[: max_chars + 1]), max_chars))


def _setting_value(value: Any) -> Any:
    """A setting with escaped texts; a long one is cut and becomes a string."""
    safe = _escape_strings(value)
    encoded = json.dumps(safe, ensure_ascii=False)
    return safe if len(encoded) <= _MAX_SETTING_CHARS else f"{encoded[:_MAX_SETTING_CHARS]}…"


def _escape_strings(value: Any, depth: int = 0) -> Any:
    if isinstance(value, str):
        return _clip_text(value, _MAX_SETTING_CHARS)
    if isinstance(value, dict | list | tuple) and depth > _MAX_NESTING:
        return "…"
    if isinstance(value, dict):
        return {_clip_text(str(name)): _escape_strings(item, depth + 1) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_escape_strings(item, depth + 1) for item in value]
    return round_finite(value) if isinstance(value, float) else value


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
        - sum(len(part.encode("utf-8")) for part in (_PAGE_TEMPLATE, *parts.values()))
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
    steps, requests = max(len(run.steps) for run in (trace, beside or trace)), len(trace.requests)
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
    text = render_terminal(TraceSelection.of(trace), "tree")
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
