"""Traces that no model made: a search over chances drawn from a seed, of any size, for the pictures."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from descant.trace.records import (
    CandidateRecord,
    ChoiceRecord,
    ProcessorRecord,
    RequestRecord,
    ResultRecord,
    ReturnedSequence,
    RowRecord,
    RunRecord,
    StepRecord,
    TokenShift,
    TokenTexts,
    TraceHeader,
    TraceRecord,
)
from descant.trace.trace import Trace

WORDS = [
    " the", " a", "ing", " of", " sea", " ship", " old", " was", ",", ".", "\n", " light", " she", " sailed",
    " home", " and", "<b>", "\udce4", "\u202e", "é",
]  # fmt: skip
END = len(WORDS)


def invented(beams: int = 4, steps: int = 12, *, groups: int = 1, seed: int = 0, **more: int) -> Trace:
    """Beam search of that size, `requests` of them one after another, with `demands` where given."""
    draw = random.Random(seed)
    records: list[TraceRecord] = [
        TraceHeader("0", "Invented", END + 1, more.get("top", 6), 4_000_000),
        TokenTexts({**dict(enumerate(WORDS)), END: "<|end|>"}, (END,)),
    ]
    search = _Search(draw, records, beams, groups, more.get("top", 6))
    for request in range(more.get("requests", 1)):
        search.run(request, steps, more.get("demands"))
    return Trace(records)


@dataclass
class _Search:
    draw: random.Random
    records: list[TraceRecord]
    beams: int
    groups: int
    top: int
    number: int = 0
    time: int = 0
    done: list[tuple[float, int, tuple[int, ...], str]] = field(default_factory=list)

    def run(self, request: int, steps: int, demands: int | None) -> None:
        prompt = tuple(self.draw.randrange(END) for _ in range(6))
        config = {"num_beams": self.beams, "length_penalty": 1.0}
        names = ("TemperatureLogitsWarper",)
        self.records.append(
            RequestRecord(
                request, self.number, prompt, f"beam search, {self.beams} beams", config, names,
                self.beams, self.groups, min(2, self.beams), None, demands,
            )
        )  # fmt: skip
        size = self.beams // self.groups
        standing = [(self.number, 0, 0.0, ())]  # node, slot, score, tokens
        self.number += 1
        self.done = []
        for step in range(steps):
            looks = {node: _look(self.draw, self.top, ended=step > 3) for node, *_ in standing}
            runs: dict[int, list[RunRecord]] = {node: [] for node in looks}
            following = []
            for group in range(self.groups):
                mine = [one for one in standing if step == 0 or one[1] // size == group]
                grown = sorted(
                    ((score + one.processed, node, tokens, one.token)
                    for node, _, score, tokens in mine for one in looks[node].top), reverse=True,
                )  # fmt: skip
                slots = iter(range(group * size, (group + 1) * size))
                left = size
                for score, node, tokens, token in grown[group if step == 0 else 0 :]:
                    if not left:
                        break
                    reason = "eos" if token == END else "length" if step == steps - 1 else None
                    left -= reason != "eos"
                    slot = group * size if reason == "eos" else next(slots)
                    met = None if demands is None else min(step, demands)
                    value = round(score / (len(tokens) + 1) if reason else score, 4)
                    runs[node].append(RunRecord((token,), (self.number,), slot, 0, value, met, reason))
                    if reason:
                        self.done.append((value, self.number, (*tokens, token), reason))
                    else:
                        following.append((self.number, slot, score, (*tokens, token)))
                    self.number += 1
            rows = (
                RowRecord(request, node, slot, (looks[node],), (), tuple(runs[node]))
                for node, slot, *_ in standing
            )
            self.records.append(StepRecord(self.time, 0.01, tuple(rows), 1_000_000 + 1000 * step))
            self.time += 1
            standing = following
        best = sorted(self.done, reverse=True)[: min(2, self.beams)]
        said = (ReturnedSequence(tokens, why, leaf, value) for value, leaf, tokens, why in best)
        self.records.append(ResultRecord(request, tuple(said)))


def _look(draw: random.Random, top: int, ended: bool) -> ChoiceRecord:
    """A choice among a few tokens, sharper after a temperature."""
    tokens = draw.sample(range(END + ended), min(top, END))
    weights = sorted((draw.expovariate(1) for _ in tokens), reverse=True)
    raw, processed = (_logs([one**power for one in weights]) for power in (1, 2))
    candidates = list(zip(tokens, raw, processed, strict=True))
    stage = ProcessorRecord(
        "TemperatureLogitsWarper", END + 1, 0, 0.0, tuple(TokenShift(*one) for one in candidates)
    )
    return ChoiceRecord(
        _entropy(raw), _entropy(processed), tuple(CandidateRecord(*one) for one in candidates), (stage,)
    )


def _logs(weights: list[float]) -> list[float]:
    return [round(math.log(one / sum(weights) + 1e-9), 4) for one in weights]


def _entropy(logs: list[float]) -> float:
    return round(-sum(math.exp(one) * one for one in logs), 4)
