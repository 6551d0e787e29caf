"""`python -m bench.compiled`: the compiled decode step beside the same step uncompiled, and its price.

Three sessions go on side by side with the same prompts: on a dense cache, on a static one, and on a static
one whose step is compiled. They take turns step by step, in changing order, so that whatever else the machine
does falls on all alike; ratios are medians over the steps. "products" is how much of a compiled step the
matrix products alone take with the same weights: what no way can do without. CPU time with one thread; with
more, the wall's. Then prompts of different length follow each other, and what torch compiles for them is
counted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from descant import GenerationConfig, Request, Session, Tokens
from descant.config.compile_config import CompileConfig
from descant.core.interfaces import KVCache
from descant.kv_cache.dense import DenseStore
from descant.kv_cache.static import StaticStore
from descant.models.compiled_step import compiled_steps_of
from descant.models.traits import traits_of

__all__ = ["Figures", "Race", "main"]

_WAYS = ("dense", "static", "compiled")


@dataclass(frozen=True)
class Figures:
    """What the ways came to: seconds of each step, and the tokens."""

    steps: Mapping[str, Sequence[float]]
    tokens: Mapping[str, Sequence[Sequence[int]]]
    products: float  # seconds
    compiling: float  # seconds, by the wall
    graphs: int

    def speed(self, way: str, rows: int) -> float:
        """Tokens a second."""
        return rows / statistics.median(self.steps[way])

    def gain(self, way: str, over: str) -> float:
        """How many times faster a step is."""
        pairs = zip(self.steps[over], self.steps[way], strict=True)
        return statistics.median(below / above for below, above in pairs)

    @property
    def same(self) -> bool:
        """Whether all ways chose the same tokens."""
        return all(self.tokens[way] == self.tokens["dense"] for way in _WAYS)


@dataclass(frozen=True)
class Race:
    """A model, and how it is measured."""

    model: Any
    options: argparse.Namespace

    def run(self, rows: int) -> Figures:
        """The ways side by side, with so many rows."""
        known = compiled_steps_of(self.model, traits_of(self.model))
        before, graphs = known.compile_seconds, known.num_graphs
        new = self.options.new
        config = GenerationConfig(max_new_tokens=new + 2, eos_token_id=None, do_sample=False)
        sessions = {way: Session(self.model, cache=cache) for way, cache in self._caches().items()}
        tokens: dict[str, list[list[int]]] = {way: [[] for _ in range(rows)] for way in _WAYS}
        prompts = [self._prompt(self.options.prompt, row) for row in range(rows)]
        for way, session in sessions.items():
            session.admit(*(Request(prompt, config) for prompt in prompts))
            for _ in range(2):  # the prompt, and the step that is compiled
                _step(session, tokens[way])
        steps: dict[str, list[float]] = {way: [] for way in _WAYS}
        for number in range(new):
            turn = number % len(_WAYS)
            for way in (*_WAYS[turn:], *_WAYS[:turn]):
                start = self._clock()
                _step(sessions[way], tokens[way])
                steps[way].append(self._clock() - start)
        return Figures(
            steps, tokens, self._products(rows), known.compile_seconds - before, known.num_graphs - graphs
        )

    def recompiled(self, prompts: int) -> int:
        """What torch compiles for prompts of different length, each with a cache of its own."""
        known = compiled_steps_of(self.model, traits_of(self.model))
        graphs = known.num_graphs
        config = GenerationConfig(max_new_tokens=3, eos_token_id=None, do_sample=False)
        longest = self.options.capacity - 3
        for number in range(prompts):
            session = Session(self.model, cache=self._caches()["compiled"])
            length = 2 + number * max(longest - 2, 0) // max(prompts - 1, 1)
            session.admit(Request(self._prompt(length, number), config))
            list(session.drain())
        return known.num_graphs - graphs

    def _caches(self) -> dict[str, KVCache]:
        capacity = self.options.capacity
        how = CompileConfig(backend=self.options.backend)
        return {
            "dense": DenseStore(),
            "static": StaticStore(capacity),
            "compiled": StaticStore(capacity, compile_config=how),
        }

    @property
    def _clock(self) -> Callable[[], float]:
        return time.process_time if self.options.threads == 1 else time.perf_counter

    def _prompt(self, length: int, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(3, self.model.config.vocab_size - 1, (length,), generator=generator)

    @torch.no_grad()
    def _products(self, rows: int) -> float:
        """Seconds of one product with every matrix that a step multiplies with, the least of several."""
        linear = [part.weight for part in self.model.modules() if isinstance(part, torch.nn.Linear)]
        lines = {wide: torch.randn(rows, wide) for wide in {weight.shape[1] for weight in linear}}
        found = []
        for _ in range(5):
            start = self._clock()
            for weight in linear:
                torch.nn.functional.linear(lines[weight.shape[1]], weight)
            found.append(self._clock() - start)
        return statistics.median(found)


def _step(session: Session, tokens: Sequence[list[int]]) -> None:
    """One step of a session, its tokens noted."""
    for made in session.step():
        if isinstance(made, Tokens):
            for request, token in zip(made.request.tolist(), made.token.tolist(), strict=True):
                tokens[request].append(token)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is asked for, print each model as it is done; the process's exit status."""
    options = _options(argv)
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    clock = "CPU time" if options.threads == 1 else "wall time"
    print(
        f"{options.threads} thread(s), {clock}, {options.new} steps after a prompt of {options.prompt}, "
        f"capacity {options.capacity}, {options.backend}, torch {torch.__version__}"
    )
    head = "model       rows  dense tok/s  static tok/s  compiled tok/s  x dense  x static  "
    head += "products  compile s  tokens"
    print(f"{head}\n{'-' * len(head)}", flush=True)
    for name in options.model:
        race = Race(_loaded(name), options)
        for rows in options.rows:
            found = race.run(rows)
            speeds = [found.speed(way, rows) for way in _WAYS]
            print(
                f"{name:<11} {rows:>4}  {speeds[0]:>11.1f}  {speeds[1]:>12.1f}  {speeds[2]:>14.1f}  "
                f"{found.gain('compiled', 'dense'):>7.2f}  {found.gain('compiled', 'static'):>8.2f}  "
                f"{found.products / statistics.median(found.steps['compiled']):>8.0%}  "
                f"{found.compiling:>9.1f}  {'same' if found.same else 'OTHER'}",
                flush=True,
            )
        if options.prompts:
            graphs = race.recompiled(options.prompts)
            print(
                f"{name:<11} {options.prompts} prompts of different length: {graphs} recompiled", flush=True
            )
    return 0


def _loaded(name: str) -> Any:
    root = Path(os.environ.get("DESCANT_MODELS") or Path(__file__).resolve().parents[1] / "models")
    folder = root / name
    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"no model in {folder}: build it with `python tools/models.py {name}`")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.compiled", description=__doc__)
    parser.add_argument("--model", action="append", help="a folder of the models; may be repeated")
    parser.add_argument("--rows", type=int, action="append", help="of the batch; may be repeated")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=96, help="steps timed")
    parser.add_argument("--capacity", type=int, default=256, help="slots of the static caches")
    parser.add_argument("--prompts", type=int, default=50, help="how many of different length follow")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(argv)
    options.model = options.model or ["stories15m", "smollm2"]
    options.rows = options.rows or [1]
    return options


if __name__ == "__main__":
    sys.exit(main())
