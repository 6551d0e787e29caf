"""The data of a page: the tree as columns, the choices, the texts as pieces that are safe to show."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from descant.tokenization.display import TextPiece, escape_invisible, join_pieces
from descant.trace.records import (
    ChoiceRecord,
    ProcessorRecord,
    RequestRecord,
    RowRecord,
    StepRecord,
    round_finite,
)
from descant.trace.token_text import text_pieces, token_pieces
from descant.trace.trace_data import TraceData
from descant.trace.tree import Node, num_accepted_drafts

__all__ = ["PAGE_DATA_VERSION", "DetailLevel", "build_page_data"]

PAGE_DATA_VERSION: Final = 1
_MAX_TEXT_CHARS: Final = 1_000
_MAX_TITLE_CHARS: Final = 200
_MAX_TOKEN_CHARS: Final = 400
_MAX_SETTING_CHARS: Final = 1_000
_MAX_NESTING: Final = 20  # of lists in a setting
_MAX_PATH_NODES: Final = 400_000  # on the paths of all sequences of a request


@dataclass(frozen=True)
class DetailLevel:
    """How much of a trace a page contains; None: everything."""

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
        "runs": [_run_data(one, detail) for one in traces],
    }


def _run_data(trace: TraceData, detail: DetailLevel) -> dict[str, Any]:
    """One trace, with the texts of the tokens that occur in it."""
    records = list(trace.requests.values())[: detail.max_requests]
    steps: dict[int, list[tuple[StepRecord, list[RowRecord]]]] = {one.request: [] for one in records}
    for step in trace.steps:
        rows: dict[int, list[RowRecord]] = {}
        for row in step.rows:
            rows.setdefault(row.request, []).append(row)
        for request, request_rows in rows.items():
            if request in steps:
                steps[request].append((step, request_rows))
    nodes: dict[int, list[Node]] = {one.request: [] for one in records}
    for node in trace.tree.nodes.values():
        if node.request in nodes:
            nodes[node.request].append(node)
    requests = [
        _RequestData(trace, one, steps[one.request][: detail.max_steps], detail).build(nodes[one.request])
        for one in records
    ]
    tokens = set().union(*(_request_tokens(one) for one in requests))
    return {
        "model": _clip_text(trace.header.model),
        "descant": _clip_text(trace.header.descant),
        "texts": {
            token: _clip_pieces(token_pieces(trace, token))
            for token in sorted(tokens)
            if trace.texts.get(token)
        },
        "special": sorted(tokens & trace.special_tokens),
        "cuts": [{"step": one.step, "what": _clip_text(one.what)} for one in trace.truncations],
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
        shown_nodes = sorted((one for one in nodes if one.step <= last), key=lambda one: one.number)
        self.node_index = {one.number: index for index, one in enumerate(shown_nodes)}
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
                _clip_text(name): _setting_value(one) for name, one in list(request.config.items())[:200]
            },
            "stages": [_clip_text(one) for one in request.stages[:200]],
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
            "number": [one.number for one in nodes],
            "parent": [-1 if one.parent is None else self.node_index[one.parent] for one in nodes],
            "token": [-1 if one.token is None else one.token for one in nodes],
            "depth": [one.depth for one in nodes],
            "born": [one.step for one in nodes],
            "left": [one.dropped_step for one in nodes],
            "slot": [one.slot for one in nodes],
            "group": [one.group for one in nodes],
            "raw": [round_finite(one.raw) for one in nodes],
            "processed": [round_finite(one.processed) for one in nodes],
            "score": [round_finite(one.score) for one in nodes],
            "met": [one.met for one in nodes],
            "guessed": [int(one.is_draft) for one in nodes],
            "state": [one.state for one in nodes],
            "reason": [None if one.reason is None else _clip_text(one.reason) for one in nodes],
            "rank": [one.rank for one in nodes],
            "look": [
                -1 if one.choice is None else self._choice_index.get(id(one.choice), -1) for one in nodes
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
                one
                for rank, one in enumerate(top)
                if rank < self.detail.max_candidates or one.token in required
            )
        self._choice_index[id(choice)] = len(self.choices)
        self.choices.append(
            {
                "entropy": round_finite(choice.entropy),
                "left": round_finite(choice.left),
                "top": [[token, round_finite(raw), round_finite(processed)] for token, raw, processed in top],
                "stages": [_processor_data(one, self.detail.max_candidates) for one in choice.stages]
                if self.detail.with_processors
                else [],
            }
        )
        return len(self.choices) - 1

    def _sequences(self, nodes: Sequence[Node]) -> list[dict[str, Any]]:
        """The returned sequences, or the running ones if there are none."""
        result = self.trace.results.get(self.request.request)
        sequences: list[dict[str, Any]] = []
        if result is not None and all(one.leaf in self.node_index for one in result.sequences):
            length = 0
            for one in result.sequences:
                path = self._path_indices(one.leaf)
                length += len(path)
                if sequences and length > _MAX_PATH_NODES:
                    break
                unmet = None if one.unmet is None else list(one.unmet)
                sequences.append(
                    {
                        "nodes": path,
                        "reason": _clip_text(one.reason),
                        "score": round_finite(one.score),
                        "unmet": unmet,
                    }
                )
        return sequences or self._running_sequences(nodes)

    def _running_sequences(self, nodes: Sequence[Node]) -> list[dict[str, Any]]:
        sequences: list[dict[str, Any]] = []
        length = 0
        for one in nodes:
            is_leaf = not any(child in self.node_index for child in one.children)
            if one.parent is None or one.dropped_step is not None or not is_leaf:
                continue
            length += one.depth
            if sequences and length > _MAX_PATH_NODES:
                break
            path = self._path_indices(one.number)
            sequences.append({"nodes": path, "reason": None, "score": round_finite(one.score), "unmet": None})
        return sequences

    def _path_indices(self, leaf: int) -> list[int]:
        return [self.node_index[one.number] for one in self.trace.tree.path_to(leaf)]


# ------------------------------------------------------------------------ parts
def _taken_tokens(nodes: Iterable[Node]) -> dict[int, set[int]]:
    """The chosen tokens by id() of their choice record."""
    taken: dict[int, set[int]] = {}
    for one in nodes:
        if one.choice is not None and one.token is not None:
            taken.setdefault(id(one.choice), set()).add(one.token)
    return taken


def _processor_data(stage: ProcessorRecord, top: int | None) -> dict[str, Any]:
    return {
        "name": _clip_text(stage.name),
        "kept": stage.kept,
        "cut": stage.cut,
        "mass": round_finite(stage.mass),
        "moved": [
            [token, round_finite(before), round_finite(after)] for token, before, after in stage.moved[:top]
        ],
    }


def _request_tokens(request: dict[str, Any]) -> set[int]:
    """Every token that occurs in a request's data."""
    tokens = {*request["prompt"], *request["nodes"]["token"]}
    for choice in request["looks"]:
        tokens.update(one[0] for one in choice["top"])
        tokens.update(one[0] for stage in choice["stages"] for one in stage["moved"])
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
        return {_clip_text(str(name)): _escape_strings(one, depth + 1) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_escape_strings(one, depth + 1) for one in value]
    return round_finite(value) if isinstance(value, float) else value
