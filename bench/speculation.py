"""`python -m bench.speculation`: what drafts gain, beside no drafts and transformers' own, in the same run.

Every way takes its turn in each repeat; ratios are medians of each repeat's ratio, of whole calls ("x none")
and of what follows the first token ("x rest", where the target has read the prompt). "x quiet" is "x rest"
with every forward at the least that one of its shape took in any way: what a machine without neighbours
would show. CPU time with one thread; with more, the wall's, since threads that wait are busy as well.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

import descant
from bench.forward import Forwards, Shape
from bench.prompts import GROUNDED
from bench.scenarios import CASES, Contest, Way, contests, loaded

__all__ = ["main"]

_COLUMNS = (
    ("case", 17), ("batch", 5), ("way", 29), ("tok/s", 7), ("x none", 7), ("range", 11), ("x rest", 7),
    ("x quiet", 8), ("x theirs", 9), ("accepted", 9), ("tok/fwd", 8), ("tokens", 7),
)  # fmt: skip


@dataclass(frozen=True)
class Sight:
    """What one way wrote, and with how much asking."""

    rows: Sequence[Sequence[int]]  # the new tokens
    forwards: int  # of the target, those of a batch once for each of its rows
    tried: int = 0
    accepted: int = 0
    shapes: Sequence[Shape] = ()  # of every forward after a batch's first, a draft model's among them
    beside: float = 0.0  # seconds outside of forwards

    @classmethod
    def of(cls, parts: Sequence[Sight]) -> Sight:
        """Several batches' as one."""
        rows = [row for part in parts for row in part.rows]
        shapes = [shape for part in parts for shape in part.shapes]
        counts = ("forwards", "tried", "accepted")
        forwards, tried, accepted = (sum(getattr(part, name) for part in parts) for name in counts)
        return cls(rows, forwards, tried, accepted, shapes, sum(part.beside for part in parts))

    @property
    def tokens(self) -> int:
        """How many there are of them."""
        return sum(map(len, self.rows))


class Times(NamedTuple):
    """The seconds of every way and of the first token alone, repeat by repeat."""

    ways: Mapping[str, Sequence[float]]
    firsts: Sequence[float]
    least: Mapping[Shape, float]  # of a forward of each shape

    def speeds(self, way: str, tokens: int) -> list[float]:
        """Tokens a second."""
        return [tokens / seconds for seconds in self.ways[way]]

    def rests(self, way: str, tokens: int) -> list[float]:
        """Tokens a second after the first."""
        return [tokens / (one - first) for one, first in zip(self.ways[way], self.firsts, strict=True)]

    def quiet(self, sight: Sight) -> float:
        """Tokens a second after the first, had no forward been disturbed."""
        seconds = sum(self.least[shape] for shape in sight.shapes) + sight.beside
        return (sight.tokens - len(sight.rows)) / seconds


@dataclass(frozen=True)
class Result:
    """What one way came to."""

    case: str
    batch: int
    way: str
    speed: float  # tokens a second
    gain: float  # against no drafts
    low: float  # the least of a repeat
    high: float
    rest: float  # the same without the first token
    quiet: float  # the same with the least time of each forward
    lead: float | None  # against transformers with the same method
    rate: float | None  # accepted / tried
    stride: float  # tokens a forward
    same: bool | None  # as no drafts; None where chance is shared otherwise

    def line(self) -> str:
        """Its row of the table."""
        cells = [
            self.case,
            str(self.batch),
            self.way,
            f"{self.speed:.1f}",
            f"{self.gain:.2f}",
            f"{self.low:.2f}-{self.high:.2f}",
            f"{self.rest:.2f}",
            f"{self.quiet:.2f}",
            "-" if self.lead is None else f"{self.lead:.2f}",
            "-" if self.rate is None else f"{self.rate:.1%}",
            f"{self.stride:.2f}",
            {True: "same", False: "OTHER", None: "-"}[self.same],
        ]
        return _row(cells)


@dataclass(frozen=True)
class Bench:
    """A model, and how it is measured."""

    model: Any
    options: argparse.Namespace

    def run(self, contest: Contest) -> list[Result]:
        """Every way in turn, repeat after repeat; a result for each."""
        few = {"max_new_tokens": 4, "min_new_tokens": 0}
        for way in contest.ways:
            self._called(contest, way, contest.batches[0], few)
        sights: dict[str, Sight] = {}
        times: dict[str, list[float]] = {way.name: [] for way in contest.ways}
        firsts: list[float] = []
        least: dict[Shape, float] = {}
        for repeat in range(self.options.repeats):
            turn = repeat % len(contest.ways)
            one = {"max_new_tokens": 1, "min_new_tokens": 0}
            firsts.append(self._seen(contest, contest.ways[0], least, one)[0])
            for way in (*contest.ways[turn:], *contest.ways[:turn]):
                seconds, sights[way.name] = self._seen(contest, way, least)
                times[way.name].append(seconds)
        return [_result(contest, way, Times(times, firsts, least), sights) for way in contest.ways]

    def _seen(
        self,
        contest: Contest,
        way: Way,
        least: dict[Shape, float],
        more: Mapping[str, Any] | None = None,
    ) -> tuple[float, Sight]:
        """One run: its seconds, and what is looked at outside the clock; `least` is brought up to date."""
        gc.collect()
        clock = time.process_time if self.options.threads == 1 else time.perf_counter
        total, sights = 0.0, []
        draft = way.fields.get("assistant_model")
        for inputs in contest.batches:
            with Forwards(clock, self.model, *(() if draft is None else (draft,))) as forwards:
                start = clock()
                out = self._called(contest, way, inputs, more)
                seconds = clock() - start
            total += seconds
            forwards.lower(least)
            new = _written(out.sequences[:, inputs["input_ids"].shape[1] :].tolist(), _ends(self.model))
            records = getattr(out, "speculation", None) or ()
            # Without drafts a row takes a forward for each of its tokens.
            plain = forwards.count(self.model) if way.theirs else sum(map(len, new))
            asked = sum(one.forwards for one in records) if records else plain
            tried, accepted = (
                sum(sum(getattr(one, name)) for one in records) for name in ("drafted", "accepted")
            )
            beside = seconds - forwards.seconds
            sights.append(Sight(new, asked, tried, accepted, forwards.shapes[1:], beside))
        return total, Sight.of(sights)

    def _called(
        self, contest: Contest, way: Way, inputs: Mapping[str, Tensor], more: Mapping[str, Any] | None = None
    ) -> Any:
        fields: dict[str, Any] = {**inputs, **contest.common, **way.fields, **(more or {})}
        fields["return_dict_in_generate"] = True
        if not way.theirs:
            if contest.seed is not None:
                fields["seed"] = contest.seed
            return descant.generate(self.model, **fields)
        torch.manual_seed(contest.seed or 0)
        draft = way.fields.get("assistant_model", self.model)
        with _lent(draft.generation_config, way.lent):
            return self.model.generate(**fields)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is asked for, print each contest as it is done; the process's exit status."""
    options = _options(argv)
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    bench = Bench(loaded(options.target), options)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(options.target)
    clock = "CPU time" if options.threads == 1 else "wall time"
    about = f"{options.target.name}, {options.threads} thread(s), {clock}, {options.new} new tokens"
    print(f"{about}, median of {options.repeats}; transformers {transformers.__version__}")
    head = _row([name for name, _ in _COLUMNS])
    print(f"{head}\n{'-' * len(head)}", flush=True)
    for case in options.only or CASES:
        for contest in contests(case, tokenizer, options):
            print(*(one.line() for one in bench.run(contest)), sep="\n", flush=True)
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.speculation", description=__doc__)
    parser.add_argument("--target", type=Path, default=_folder("smollm2"), help="the model, a folder")
    parser.add_argument("--draft", type=Path, default=_folder("smol-draft"), help="its draft model")
    parser.add_argument("--other", type=Path, default=_folder("stories15m"), help="one with other tokens")
    parser.add_argument("--only", choices=CASES, action="append", help="this case; may be repeated")
    parser.add_argument("--kind", choices=GROUNDED, action="append", help="only prompts of this kind")
    parser.add_argument("--way", action="append", help="only this way, besides none; may be repeated")
    parser.add_argument("--prompts", type=int, default=2, help="of each kind, where a batch has one row")
    parser.add_argument("--batch", type=int, action="append", help="rows of a batch; may be repeated")
    parser.add_argument("--new", type=int, default=128, help="new tokens of each row")
    parser.add_argument("--guesses", type=int, default=5, help="tokens that a network guesses at a time")
    parser.add_argument("--layers", type=int, default=4, help="of the early exit")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3, help="how often each way runs, timed")
    options = parser.parse_args(argv)
    options.batch = options.batch or [1, 4, 16]
    return options


def _folder(name: str) -> Path:
    return Path(os.environ.get("DESCANT_MODELS") or Path(__file__).resolve().parents[1] / "models") / name


def _result(contest: Contest, way: Way, times: Times, sights: Mapping[str, Sight]) -> Result:
    def speeds(name: str) -> list[float]:
        return times.speeds(name, sights[name].tokens)

    def rests(name: str) -> list[float]:
        return times.rests(name, sights[name].tokens - len(sights[name].rows))

    mine, sight = speeds(way.name), sights[way.name]
    gains = _ratios(mine, speeds("none"))
    lead = None
    if way.rival is not None and way.rival in times.ways:
        lead = statistics.median(_ratios(mine, speeds(way.rival)))
    alike = contest.seed is None or not way.theirs
    return Result(
        case=contest.case,
        batch=contest.size,
        way=way.name,
        speed=statistics.median(mine),
        gain=statistics.median(gains),
        low=min(gains),
        high=max(gains),
        rest=statistics.median(_ratios(rests(way.name), rests("none"))),
        quiet=times.quiet(sight) / times.quiet(sights["none"]),
        lead=lead,
        rate=sight.accepted / sight.tried if sight.tried else None,
        stride=sight.tokens / sight.forwards,
        same=list(sight.rows) == list(sights["none"].rows) if alike else None,
    )


def _ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(above, below, strict=True)]


def _ends(model: Any) -> set[int]:
    end = model.generation_config.eos_token_id
    return set() if end is None else set(end) if isinstance(end, list) else {end}


def _written(rows: Sequence[Sequence[int]], ends: set[int]) -> list[Sequence[int]]:
    """The tokens of each row as far as the first that ends it, with it."""
    stops = [next((at for at, token in enumerate(row) if token in ends), len(row) - 1) for row in rows]
    return [row[: stop + 1] for row, stop in zip(rows, stops, strict=True)]


@contextlib.contextmanager
def _lent(config: Any, fields: Mapping[str, Any]) -> Iterator[None]:
    """Set fields of a draft model's own config, as transformers wants them, for a while."""
    before = {name: getattr(config, name) for name in ("num_assistant_tokens", *fields)}
    for name, value in fields.items():
        setattr(config, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def _row(cells: Sequence[str]) -> str:
    parts = []
    for (name, width), cell in zip(_COLUMNS, cells, strict=True):
        parts.append(cell.ljust(width) if name in ("case", "way") else cell.rjust(width))
    return " ".join(parts).rstrip()


if __name__ == "__main__":
    sys.exit(main())
