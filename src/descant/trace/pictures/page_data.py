"""What a page is told of a trace: its tree as columns, its choices, its texts as pieces safe to show."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

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
from descant.trace.tree import Node, num_accepted_drafts

if TYPE_CHECKING:
    from descant.trace.trace import Trace

__all__ = ["PAGE_DATA_VERSION", "DetailLevel", "build_page_data"]

PAGE_DATA_VERSION: Final = 1
_MAX_TEXT_CHARS: Final = 1_000  # of a text that is one string
_MAX_TITLE_CHARS: Final = 200  # of a title
_MAX_TOKEN_CHARS: Final = 400  # of a token
_MAX_SETTING_CHARS: Final = 1_000  # of a setting's value
_MAX_NESTING: Final = 20  # of lists within lists in it
_MAX_PATH_NODES: Final = 400_000  # nodes on the paths of all sequences of a request


@dataclass(frozen=True)
class DetailLevel:
    """How much of a trace a page is told; None: all of it."""

    max_candidates: int | None = None  # alternatives of a choice, beside those that were taken
    with_processors: bool = True  # what each processor did
    with_choices: bool = True  # the choices at all
    max_prompt_tokens: int | None = None  # tokens of a prompt, its last
    max_steps: int | None = None  # of a request, its first
    max_requests: int | None = None  # the first of them


def build_page_data(
    trace: Trace, beside: Trace | None = None, title: str | None = None, detail: DetailLevel | None = None
) -> dict[str, Any]:
    """What a page shows of one trace or of two, as JSON has it."""
    detail = detail or DetailLevel()
    traces = [trace] if beside is None else [trace, beside]
    return {
        "version": PAGE_DATA_VERSION,
        "title": _clip_text(
            title or f"{'A run' if beside is None else 'Two runs'} of {trace.header.model}", _MAX_TITLE_CHARS
        ),
        "runs": [_run_data(one, detail) for one in traces],
    }


def _run_data(trace: Trace, detail: DetailLevel) -> dict[str, Any]:
    """A trace, and the texts of the tokens that are met in it."""
    asked = list(trace.requests.values())[: detail.max_requests]
    steps: dict[int, list[tuple[StepRecord, list[RowRecord]]]] = {one.request: [] for one in asked}
    for step in trace.steps:
        rows: dict[int, list[RowRecord]] = {}
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
        _RequestData(trace, one, steps[one.request][: detail.max_steps], detail).build(nodes[one.request])
        for one in asked
    ]
    met = set().union(*(_request_tokens(one) for one in requests))
    return {
        "model": _clip_text(trace.header.model),
        "descant": _clip_text(trace.header.descant),
        "texts": {
            token: _clip_pieces(token_pieces(trace, token)) for token in sorted(met) if trace.texts.get(token)
        },
        "special": sorted(met & trace.special_tokens),
        "cuts": [{"step": one.step, "what": _clip_text(one.what)} for one in trace.truncations],
        "requests": requests,
    }


class _RequestData:
    """One request being told: its nodes by the place that they have in the columns."""

    def __init__(
        self,
        trace: Trace,
        asked: RequestRecord,
        steps: Sequence[tuple[StepRecord, list[RowRecord]]],
        detail: DetailLevel,
    ):
        self.trace, self.request, self.steps, self.detail = trace, asked, steps, detail
        self.choices: list[dict[str, Any]] = []
        self._choice_index: dict[int, int] = {}  # look -> its place

    def build(self, nodes: Iterable[Node]) -> dict[str, Any]:
        """Everything that is told of it."""
        asked, result = self.request, self.trace.results.get(self.request.request)
        last = self.steps[-1][0].step if self.steps else -1
        kept = sorted((one for one in nodes if one.step <= last), key=lambda one: one.number)
        self.node_index = {one.number: place for place, one in enumerate(kept)}
        taken = _taken_tokens(kept)
        steps = [self._step_data(step, rows, taken) for step, rows in self.steps]
        prompt = (
            asked.prompt
            if self.detail.max_prompt_tokens is None
            else asked.prompt[-self.detail.max_prompt_tokens :]
        )
        return {
            "request": asked.request,
            "method": _clip_text(asked.method),
            "config": {
                _clip_text(name): _setting_value(one) for name, one in list(asked.config.items())[:200]
            },
            "stages": [_clip_text(one) for one in asked.stages[:200]],
            "beams": asked.beams,
            "groups": asked.groups,
            "sequences": asked.sequences,
            "drafter": None if asked.drafter is None else _clip_text(asked.drafter),
            "demands": asked.demands,
            "prompt": list(prompt),
            "phrase": text_pieces(self.trace, prompt),
            "unshown": len(asked.prompt) - len(prompt),
            "error": None if result is None or result.error is None else _clip_text(result.error),
            "nodes": self._node_columns(kept),
            "looks": self.choices,
            "steps": steps,
            "said": self._sequences(kept),
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
                        self._add_choice(look, row, place, taken) for place, look in enumerate(row.looks)
                    ]
                    if self.detail.with_choices
                    else [],
                }
                for row in rows
            ],
        }

    def _add_choice(self, look: ChoiceRecord, row: RowRecord, place: int, taken: dict[int, set[int]]) -> int:
        """Its place among the choices; what was taken there, or guessed in vain, is always kept."""
        top = look.top
        if self.detail.max_candidates is not None:
            kept = taken.get(id(look), set()) | set(row.drafts[place : place + 1])
            top = tuple(
                one for at, one in enumerate(top) if at < self.detail.max_candidates or one.token in kept
            )
        self._choice_index[id(look)] = len(self.choices)
        self.choices.append(
            {
                "entropy": round_finite(look.entropy),
                "left": round_finite(look.left),
                "top": [[token, round_finite(raw), round_finite(processed)] for token, raw, processed in top],
                "stages": [_processor_data(one, self.detail.max_candidates) for one in look.stages]
                if self.detail.with_processors
                else [],
            }
        )
        return len(self.choices) - 1

    def _sequences(self, nodes: Sequence[Node]) -> list[dict[str, Any]]:
        """What was returned, or what stands if nothing was yet."""
        result = self.trace.results.get(self.request.request)
        said: list[dict[str, Any]] = []
        if result is not None and all(one.leaf in self.node_index for one in result.sequences):
            length = 0
            for one in result.sequences:
                path = self._path_indices(one.leaf)
                length += len(path)
                if said and length > _MAX_PATH_NODES:
                    break
                unmet = None if one.unmet is None else list(one.unmet)
                said.append(
                    {
                        "nodes": path,
                        "reason": _clip_text(one.reason),
                        "score": round_finite(one.score),
                        "unmet": unmet,
                    }
                )
        if said:
            return said
        return [
            {
                "nodes": self._path_indices(one.number),
                "reason": None,
                "score": round_finite(one.score),
                "unmet": None,
            }
            for one in nodes
            if one.parent is not None and one.dropped_step is None
            if not any(child in self.node_index for child in one.children)
        ]

    def _path_indices(self, leaf: int) -> list[int]:
        return [self.node_index[one.number] for one in self.trace.tree.path_to(leaf)]


# ------------------------------------------------------------------------ parts
def _taken_tokens(nodes: Iterable[Node]) -> dict[int, set[int]]:
    """The tokens that were taken at each look, by its identity."""
    found: dict[int, set[int]] = {}
    for one in nodes:
        if one.choice is not None and one.token is not None:
            found.setdefault(id(one.choice), set()).add(one.token)
    return found


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
    """Every token that a request shows."""
    found = {*request["prompt"], *request["nodes"]["token"]}
    for look in request["looks"]:
        found.update(one[0] for one in look["top"])
        found.update(one[0] for stage in look["stages"] for one in stage["moved"])
    for step in request["steps"]:
        for row in step["rows"]:
            found.update(row["drafts"])
    return found - {-1}


def _clip_pieces(pieces: Iterable[TextPiece], most: int = _MAX_TOKEN_CHARS) -> list[TextPiece]:
    """Pieces up to that many letters."""
    kept: list[TextPiece] = []
    for text, stands in pieces:
        if len(text) > most:
            return [*kept, (text[:most], stands), ("…", True)]
        kept.append((text, stands))
        most -= len(text)
    return kept


def _clip_text(text: str, most: int = _MAX_TEXT_CHARS) -> str:
    """A text that is shown as one string, with nothing in it that cannot be seen."""
    return join_pieces(_clip_pieces(escape_invisible(text[: most + 1]), most))


def _setting_value(value: Any) -> Any:
    """A setting with its texts as they can be shown; one that is long is cut and is a text itself."""
    safe = _escape_strings(value)
    said = json.dumps(safe, ensure_ascii=False)
    return safe if len(said) <= _MAX_SETTING_CHARS else f"{said[:_MAX_SETTING_CHARS]}…"


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
