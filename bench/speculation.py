"""`python -m bench.speculation`: the speedup of drafts over no drafts and over transformers, in one run.

All methods alternate in each repeat. Ratios are medians over repeats, of whole calls ("x none") and of the
time after the first token ("x rest", without the prefill). "x quiet" is "x rest" with the fastest time of
each forward shape in any run, an estimate for an idle machine. CPU time with one thread; wall time with more,
since waiting threads use CPU time as well.
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
from bench.scenarios import CASES, Method, Scenario, build_scenarios, load_model

__all__ = ["main"]

_COLUMNS = (
    ("case", 17), ("batch", 5), ("method", 29), ("tok/s", 7), ("x none", 7), ("range", 11), ("x rest", 7),
    ("x quiet", 8), ("x theirs", 9), ("accepted", 9), ("tok/fwd", 8), ("tokens", 7),
)  # fmt: skip


@dataclass(frozen=True)
class DecodeStats:
    """Tokens and forwards of one method."""

    rows: Sequence[Sequence[int]]  # the new tokens
    forwards: int  # of the target; a batched forward counts once per row
    drafted: int = 0
    accepted: int = 0
    shapes: Sequence[Shape] = ()  # of all forwards after the first of a batch, draft models included
    overhead_seconds: float = 0.0  # seconds outside of forwards

    @classmethod
    def of(cls, parts: Sequence[DecodeStats]) -> DecodeStats:
        """The sum over several batches."""
        rows = [row for part in parts for row in part.rows]
        shapes = [shape for part in parts for shape in part.shapes]
        counts = ("forwards", "drafted", "accepted")
        forwards, drafted, accepted = (sum(getattr(part, name) for part in parts) for name in counts)
        return cls(rows, forwards, drafted, accepted, shapes, sum(part.overhead_seconds for part in parts))

    @property
    def tokens(self) -> int:
        """The number of new tokens."""
        return sum(map(len, self.rows))


class Times(NamedTuple):
    """The seconds of every method and of the first token, by repeat."""

    methods: Mapping[str, Sequence[float]]
    firsts: Sequence[float]
    fastest: Mapping[Shape, float]  # forward of each shape

    def speeds(self, method: str, tokens: int) -> list[float]:
        """Tokens per second."""
        return [tokens / seconds for seconds in self.methods[method]]

    def decode_speeds(self, method: str, tokens: int) -> list[float]:
        """Tokens per second after the first."""
        return [tokens / (one - first) for one, first in zip(self.methods[method], self.firsts, strict=True)]

    def quiet_speed(self, stat: DecodeStats) -> float:
        """Tokens per second after the first, with the fastest time of each forward."""
        seconds = sum(self.fastest[shape] for shape in stat.shapes) + stat.overhead_seconds
        return (stat.tokens - len(stat.rows)) / seconds


@dataclass(frozen=True)
class Result:
    """The result of one method."""

    case: str
    batch: int
    method: str
    speed: float  # tokens per second
    speedup: float  # over no drafts
    low: float  # minimum over repeats
    high: float
    decode_speedup: float  # speedup without the first token
    quiet_speedup: float  # speedup with the fastest forwards
    speedup_over_theirs: float | None  # speedup over transformers with the same method
    acceptance_rate: float | None  # accepted / drafted
    tokens_per_forward: float  # tokens per forward
    same: bool | None  # as without drafts; None where the random streams differ

    def line(self) -> str:
        """Its row of the table."""
        cells = [
            self.case,
            str(self.batch),
            self.method,
            f"{self.speed:.1f}",
            f"{self.speedup:.2f}",
            f"{self.low:.2f}-{self.high:.2f}",
            f"{self.decode_speedup:.2f}",
            f"{self.quiet_speedup:.2f}",
            "-" if self.speedup_over_theirs is None else f"{self.speedup_over_theirs:.2f}",
            "-" if self.acceptance_rate is None else f"{self.acceptance_rate:.1%}",
            f"{self.tokens_per_forward:.2f}",
            {True: "same", False: "OTHER", None: "-"}[self.same],
        ]
        return _row(cells)


@dataclass(frozen=True)
class Bench:
    """A model and the options of the benchmark."""

    model: Any
    options: argparse.Namespace

    def run(self, scenario: Scenario) -> list[Result]:
        """All methods in turn for each repeat; a result for each."""
        short = {"max_new_tokens": 4, "min_new_tokens": 0}
        for method in scenario.methods:
            self._generate(scenario, method, scenario.batches[0], short)
        stats: dict[str, DecodeStats] = {}
        times: dict[str, list[float]] = {method.name: [] for method in scenario.methods}
        firsts: list[float] = []
        fastest: dict[Shape, float] = {}
        for repeat in range(self.options.repeats):
            offset = repeat % len(scenario.methods)
            one = {"max_new_tokens": 1, "min_new_tokens": 0}
            firsts.append(self._run_once(scenario, scenario.methods[0], fastest, one)[0])
            for method in (*scenario.methods[offset:], *scenario.methods[:offset]):
                seconds, stats[method.name] = self._run_once(scenario, method, fastest)
                times[method.name].append(seconds)
        return [
            _result(scenario, method, Times(times, firsts, fastest), stats) for method in scenario.methods
        ]

    def _run_once(
        self,
        scenario: Scenario,
        method: Method,
        fastest: dict[Shape, float],
        more: Mapping[str, Any] | None = None,
    ) -> tuple[float, DecodeStats]:
        """One run: its seconds and its statistics; updates `fastest`."""
        gc.collect()
        clock = time.process_time if self.options.threads == 1 else time.perf_counter
        total, stats = 0.0, []
        draft = method.fields.get("assistant_model")
        for inputs in scenario.batches:
            with Forwards(clock, self.model, *(() if draft is None else (draft,))) as forwards:
                start = clock()
                out = self._generate(scenario, method, inputs, more)
                seconds = clock() - start
            total += seconds
            forwards.update_minimum(fastest)
            new = _until_end(out.sequences[:, inputs["input_ids"].shape[1] :].tolist(), _ends(self.model))
            records = getattr(out, "speculation", None) or ()
            # Without drafts a row needs one forward per token.
            plain = forwards.count(self.model) if method.theirs else sum(map(len, new))
            target_forwards = sum(one.forwards for one in records) if records else plain
            drafted, accepted = (
                sum(sum(getattr(one, name)) for one in records) for name in ("drafted", "accepted")
            )
            overhead_seconds = seconds - forwards.seconds
            stats.append(
                DecodeStats(new, target_forwards, drafted, accepted, forwards.shapes[1:], overhead_seconds)
            )
        return total, DecodeStats.of(stats)

    def _generate(
        self,
        scenario: Scenario,
        method: Method,
        inputs: Mapping[str, Tensor],
        more: Mapping[str, Any] | None = None,
    ) -> Any:
        fields: dict[str, Any] = {**inputs, **scenario.common, **method.fields, **(more or {})}
        fields["return_dict_in_generate"] = True
        if not method.theirs:
            if scenario.seed is not None:
                fields["seed"] = scenario.seed
            return descant.generate(self.model, **fields)
        torch.manual_seed(scenario.seed or 0)
        draft = method.fields.get("assistant_model", self.model)
        with _override_config(draft.generation_config, method.draft_config):
            return self.model.generate(**fields)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the selected cases, print each scenario; the exit status of the process."""
    options = _options(argv)
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    bench = Bench(load_model(options.target), options)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(options.target)
    clock = "CPU time" if options.threads == 1 else "wall time"
    about = f"{options.target.name}, {options.threads} thread(s), {clock}, {options.new} new tokens"
    print(f"{about}, median of {options.repeats}; transformers {transformers.__version__}")
    head = _row([name for name, _ in _COLUMNS])
    print(f"{head}\n{'-' * len(head)}", flush=True)
    for case in options.only or CASES:
        for scenario in build_scenarios(case, tokenizer, options):
            print(*(one.line() for one in bench.run(scenario)), sep="\n", flush=True)
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.speculation", description=__doc__)
    parser.add_argument("--target", type=Path, default=_folder("smollm2"), help="the model, a folder")
    parser.add_argument("--draft", type=Path, default=_folder("smol-draft"), help="its draft model")
    parser.add_argument("--other", type=Path, default=_folder("stories15m"), help="of another tokenizer")
    parser.add_argument("--only", choices=CASES, action="append", help="this case; may be repeated")
    parser.add_argument("--kind", choices=GROUNDED, action="append", help="only prompts of this kind")
    parser.add_argument("--way", action="append", help="only this method, besides none; may be repeated")
    parser.add_argument("--prompts", type=int, default=2, help="of each kind, where a batch has one row")
    parser.add_argument("--batch", type=int, action="append", help="rows of a batch; may be repeated")
    parser.add_argument("--new", type=int, default=128, help="new tokens of each row")
    parser.add_argument("--guesses", type=int, default=5, help="draft length of a network")
    parser.add_argument("--layers", type=int, default=4, help="of the early exit")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each method")
    options = parser.parse_args(argv)
    options.batch = options.batch or [1, 4, 16]
    return options


def _folder(name: str) -> Path:
    return Path(os.environ.get("DESCANT_MODELS") or Path(__file__).resolve().parents[1] / "models") / name


def _result(scenario: Scenario, method: Method, times: Times, stats: Mapping[str, DecodeStats]) -> Result:
    def speeds(name: str) -> list[float]:
        return times.speeds(name, stats[name].tokens)

    def decode_speeds(name: str) -> list[float]:
        return times.decode_speeds(name, stats[name].tokens - len(stats[name].rows))

    own_speeds, stat = speeds(method.name), stats[method.name]
    speedups = _ratios(own_speeds, speeds("none"))
    speedup_over_theirs = None
    if method.counterpart is not None and method.counterpart in times.methods:
        speedup_over_theirs = statistics.median(_ratios(own_speeds, speeds(method.counterpart)))
    comparable = scenario.seed is None or not method.theirs
    return Result(
        case=scenario.case,
        batch=scenario.size,
        method=method.name,
        speed=statistics.median(own_speeds),
        speedup=statistics.median(speedups),
        low=min(speedups),
        high=max(speedups),
        decode_speedup=statistics.median(_ratios(decode_speeds(method.name), decode_speeds("none"))),
        quiet_speedup=times.quiet_speed(stat) / times.quiet_speed(stats["none"]),
        speedup_over_theirs=speedup_over_theirs,
        acceptance_rate=stat.accepted / stat.drafted if stat.drafted else None,
        tokens_per_forward=stat.tokens / stat.forwards,
        same=list(stat.rows) == list(stats["none"].rows) if comparable else None,
    )


def _ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(above, below, strict=True)]


def _ends(model: Any) -> set[int]:
    end = model.generation_config.eos_token_id
    return set() if end is None else set(end) if isinstance(end, list) else {end}


def _until_end(rows: Sequence[Sequence[int]], ends: set[int]) -> list[Sequence[int]]:
    """The tokens of each row up to its first end token, inclusive."""
    stops = [next((at for at, token in enumerate(row) if token in ends), len(row) - 1) for row in rows]
    return [row[: stop + 1] for row, stop in zip(rows, stops, strict=True)]


@contextlib.contextmanager
def _override_config(config: Any, fields: Mapping[str, Any]) -> Iterator[None]:
    """Set fields of a draft model's own config inside the context, for transformers."""
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
        parts.append(cell.ljust(width) if name in ("case", "method") else cell.rjust(width))
    return " ".join(parts).rstrip()


if __name__ == "__main__":
    sys.exit(main())
