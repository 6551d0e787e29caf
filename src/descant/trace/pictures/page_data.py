"""What a page is told of a trace: its tree as columns, its choices, its texts as pieces safe to show."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from descant.tokenization.display import Piece, plain, shown
from descant.trace.records import Asked, Look, Row, Stage, Step, rounded
from descant.trace.token_text import phrase, word
from descant.trace.tree import Node, guessed

if TYPE_CHECKING:
    from descant.trace.trace import Trace

__all__ = ["VERSION", "Detail", "scene"]

VERSION: Final = 1
_LETTERS: Final = 1_000  # of a text that is one string
_TITLE: Final = 200  # of a title
_WORD: Final = 400  # of a token
_SETTING: Final = 1_000  # of a setting's value
_DEPTH: Final = 20  # of lists within lists in it
_PATHS: Final = 400_000  # nodes on the paths of all sequences of a request


@dataclass(frozen=True)
class Detail:
    """How much of a trace a page is told; None: all of it."""

    top: int | None = None  # alternatives of a choice, beside those that were taken
    stages: bool = True  # what each processor did
    looks: bool = True  # the choices at all
    prompt: int | None = None  # tokens of a prompt, its last
    steps: int | None = None  # of a request, its first
    requests: int | None = None  # the first of them


def scene(
    trace: Trace, beside: Trace | None = None, title: str | None = None, detail: Detail | None = None
) -> dict[str, Any]:
    """What a page shows of one trace or of two, as JSON has it."""
    detail = detail or Detail()
    traces = [trace] if beside is None else [trace, beside]
    return {
        "version": VERSION,
        "title": _text(
            title or f"{'A run' if beside is None else 'Two runs'} of {trace.header.model}", _TITLE
        ),
        "runs": [_run(one, detail) for one in traces],
    }


def _run(trace: Trace, detail: Detail) -> dict[str, Any]:
    """A trace, and the texts of the tokens that are met in it."""
    asked = list(trace.requests.values())[: detail.requests]
    steps: dict[int, list[tuple[Step, list[Row]]]] = {one.request: [] for one in asked}
    for step in trace.steps:
        rows: dict[int, list[Row]] = {}
        for row in step.rows:
            rows.setdefault(row.request, []).append(row)
        for request, its in rows.items():
            if request in steps:
                steps[request].append((step, its))
    nodes: dict[int, list[Node]] = {one.request: [] for one in asked}
    for node in trace.tree.nodes.values():
        if node.request in nodes:
            nodes[node.request].append(node)
    requests = [
        _Request(trace, one, steps[one.request][: detail.steps], detail).made(nodes[one.request])
        for one in asked
    ]
    met = set().union(*(_tokens(one) for one in requests))
    return {
        "model": _text(trace.header.model),
        "descant": _text(trace.header.descant),
        "texts": {token: _cut(word(trace, token)) for token in sorted(met) if trace.texts.get(token)},
        "special": sorted(met & trace.special),
        "cuts": [{"step": one.step, "what": _text(one.what)} for one in trace.cuts],
        "requests": requests,
    }


class _Request:
    """One request being told: its nodes by the place that they have in the columns."""

    def __init__(self, trace: Trace, asked: Asked, steps: Sequence[tuple[Step, list[Row]]], detail: Detail):
        self.trace, self.asked, self.steps, self.detail = trace, asked, steps, detail
        self.looks: list[dict[str, Any]] = []
        self._at: dict[int, int] = {}  # look -> its place

    def made(self, nodes: Iterable[Node]) -> dict[str, Any]:
        """Everything that is told of it."""
        asked, result = self.asked, self.trace.results.get(self.asked.request)
        last = self.steps[-1][0].step if self.steps else -1
        kept = sorted((one for one in nodes if one.born <= last), key=lambda one: one.number)
        self.places = {one.number: place for place, one in enumerate(kept)}
        taken = _taken(kept)
        steps = [self._step(step, rows, taken) for step, rows in self.steps]
        prompt = asked.prompt if self.detail.prompt is None else asked.prompt[-self.detail.prompt :]
        return {
            "request": asked.request,
            "method": _text(asked.method),
            "config": {_text(name): _setting(one) for name, one in list(asked.config.items())[:200]},
            "stages": [_text(one) for one in asked.stages[:200]],
            "beams": asked.beams,
            "groups": asked.groups,
            "sequences": asked.sequences,
            "drafter": None if asked.drafter is None else _text(asked.drafter),
            "demands": asked.demands,
            "prompt": list(prompt),
            "phrase": phrase(self.trace, prompt),
            "unshown": len(asked.prompt) - len(prompt),
            "error": None if result is None or result.error is None else _text(result.error),
            "nodes": self._columns(kept),
            "looks": self.looks,
            "steps": steps,
            "said": self._said(kept),
        }

    def _columns(self, nodes: Sequence[Node]) -> dict[str, list[Any]]:
        return {
            "number": [one.number for one in nodes],
            "parent": [-1 if one.parent is None else self.places[one.parent] for one in nodes],
            "token": [-1 if one.token is None else one.token for one in nodes],
            "depth": [one.depth for one in nodes],
            "born": [one.born for one in nodes],
            "left": [one.left for one in nodes],
            "slot": [one.slot for one in nodes],
            "group": [one.group for one in nodes],
            "raw": [rounded(one.raw) for one in nodes],
            "processed": [rounded(one.processed) for one in nodes],
            "score": [rounded(one.score) for one in nodes],
            "met": [one.met for one in nodes],
            "guessed": [int(one.guessed) for one in nodes],
            "state": [one.state for one in nodes],
            "reason": [None if one.reason is None else _text(one.reason) for one in nodes],
            "rank": [one.rank for one in nodes],
            "look": [-1 if one.look is None else self._at.get(id(one.look), -1) for one in nodes],
        }

    def _step(self, step: Step, rows: Sequence[Row], taken: dict[int, set[int]]) -> dict[str, Any]:
        return {
            "step": step.step,
            "seconds": rounded(step.seconds),
            "cache": step.cache,
            "rows": [
                {
                    "at": self.places[row.at],
                    "slot": row.slot,
                    "drafts": list(row.drafts),
                    "accepted": guessed(row, row.runs[0], self.asked) if row.runs else 0,
                    "looks": [self._look(look, row, place, taken) for place, look in enumerate(row.looks)]
                    if self.detail.looks
                    else [],
                }
                for row in rows
            ],
        }

    def _look(self, look: Look, row: Row, place: int, taken: dict[int, set[int]]) -> int:
        """Its place among the choices; what was taken there, or guessed in vain, is always kept."""
        top = look.top
        if self.detail.top is not None:
            kept = taken.get(id(look), set()) | set(row.drafts[place : place + 1])
            top = tuple(one for at, one in enumerate(top) if at < self.detail.top or one.token in kept)
        self._at[id(look)] = len(self.looks)
        self.looks.append(
            {
                "entropy": rounded(look.entropy),
                "left": rounded(look.left),
                "top": [[token, rounded(raw), rounded(processed)] for token, raw, processed in top],
                "stages": [_stage(one, self.detail.top) for one in look.stages] if self.detail.stages else [],
            }
        )
        return len(self.looks) - 1

    def _said(self, nodes: Sequence[Node]) -> list[dict[str, Any]]:
        """What was returned, or what stands if nothing was yet."""
        result = self.trace.results.get(self.asked.request)
        said: list[dict[str, Any]] = []
        if result is not None and all(one.leaf in self.places for one in result.sequences):
            length = 0
            for one in result.sequences:
                path = self._path(one.leaf)
                length += len(path)
                if said and length > _PATHS:
                    break
                unmet = None if one.unmet is None else list(one.unmet)
                said.append(
                    {"nodes": path, "reason": _text(one.reason), "score": rounded(one.score), "unmet": unmet}
                )
        if said:
            return said
        return [
            {"nodes": self._path(one.number), "reason": None, "score": rounded(one.score), "unmet": None}
            for one in nodes
            if one.parent is not None and one.left is None
            if not any(child in self.places for child in one.children)
        ]

    def _path(self, leaf: int) -> list[int]:
        return [self.places[one.number] for one in self.trace.tree.path(leaf)]


# ------------------------------------------------------------------------ parts
def _taken(nodes: Iterable[Node]) -> dict[int, set[int]]:
    """The tokens that were taken at each look, by its identity."""
    found: dict[int, set[int]] = {}
    for one in nodes:
        if one.look is not None and one.token is not None:
            found.setdefault(id(one.look), set()).add(one.token)
    return found


def _stage(stage: Stage, top: int | None) -> dict[str, Any]:
    return {
        "name": _text(stage.name),
        "kept": stage.kept,
        "cut": stage.cut,
        "mass": rounded(stage.mass),
        "moved": [[token, rounded(before), rounded(after)] for token, before, after in stage.moved[:top]],
    }


def _tokens(request: dict[str, Any]) -> set[int]:
    """Every token that a request shows."""
    found = {*request["prompt"], *request["nodes"]["token"]}
    for look in request["looks"]:
        found.update(one[0] for one in look["top"])
        found.update(one[0] for stage in look["stages"] for one in stage["moved"])
    for step in request["steps"]:
        for row in step["rows"]:
            found.update(row["drafts"])
    return found - {-1}


def _cut(pieces: Iterable[Piece], most: int = _WORD) -> list[Piece]:
    """Pieces up to that many letters."""
    kept: list[Piece] = []
    for text, stands in pieces:
        if len(text) > most:
            return [*kept, (text[:most], stands), ("…", True)]
        kept.append((text, stands))
        most -= len(text)
    return kept


def _text(text: str, most: int = _LETTERS) -> str:
    """A text that is shown as one string, with nothing in it that cannot be seen."""
    return plain(_cut(shown(text[: most + 1]), most))


def _setting(value: Any) -> Any:
    """A setting with its texts as they can be shown; one that is long is cut and is a text itself."""
    safe = _safe(value)
    said = json.dumps(safe, ensure_ascii=False)
    return safe if len(said) <= _SETTING else f"{said[:_SETTING]}…"


def _safe(value: Any, depth: int = 0) -> Any:
    if isinstance(value, str):
        return _text(value, _SETTING)
    if isinstance(value, dict | list | tuple) and depth > _DEPTH:
        return "…"
    if isinstance(value, dict):
        return {_text(str(name)): _safe(one, depth + 1) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_safe(one, depth + 1) for one in value]
    return rounded(value) if isinstance(value, float) else value
