"""`python -m bench.compiled`: the compiled decode step against the same step uncompiled, and its cost.

Three sessions decode the same prompts: on a dense cache, on a static one, and on a static one with a compiled
step. They alternate step by step in rotating order, so that other load affects all equally; ratios are
medians over the steps. "products" is the share of a compiled step that its matrix products need. CPU time
with one thread; wall time with more. Then prompts of different lengths follow, and recompilations are
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
from descant.kv_cache.stores.dense import DenseStore, StaticStore
from descant.models.fast.compiled_step import compiled_steps_of
from descant.models.forward.traits import traits_of

__all__ = ["Figures", "StepBenchmark", "main"]

_VARIANTS = ("dense", "static", "compiled")


@dataclass(frozen=True)
class Figures:
    """The results of all variants: seconds of each step, and the tokens."""

    steps: Mapping[str, Sequence[float]]
    tokens: Mapping[str, Sequence[Sequence[int]]]
    products: float  # seconds
    compiling: float  # seconds of wall time
    graphs: int

    def speed(self, variant: str, rows: int) -> float:
        """Tokens per second."""
        return rows / statistics.median(self.steps[variant])

    def speedup(self, variant: str, over: str) -> float:
        """The median speedup of a step."""
        pairs = zip(self.steps[over], self.steps[variant], strict=True)
        return statistics.median(below / above for below, above in pairs)

    @property
    def same(self) -> bool:
        """Whether all variants gave the same tokens."""
        return all(self.tokens[variant] == self.tokens["dense"] for variant in _VARIANTS)


@dataclass(frozen=True)
class StepBenchmark:
    """A model and the options of the benchmark."""

    model: Any
    options: argparse.Namespace

    def run(self, rows: int) -> Figures:
        """All variants in turn, with this many rows."""
        compiled_steps = compiled_steps_of(self.model, traits_of(self.model))
        before, graphs = compiled_steps.compile_seconds, compiled_steps.num_graphs
        new = self.options.new
        config = GenerationConfig(max_new_tokens=new + 2, eos_token_id=None, do_sample=False)
        sessions = {variant: Session(self.model, cache=cache) for variant, cache in self._caches().items()}
        tokens: dict[str, list[list[int]]] = {variant: [[] for _ in range(rows)] for variant in _VARIANTS}
        prompts = [self._prompt(self.options.prompt, row) for row in range(rows)]
        for variant, session in sessions.items():
            session.admit(*(Request(prompt, config) for prompt in prompts))
            for _ in range(2):  # the prefill, and the step that compiles
                _step(session, tokens[variant])
        steps: dict[str, list[float]] = {variant: [] for variant in _VARIANTS}
        for number in range(new):
            offset = number % len(_VARIANTS)
            for variant in (*_VARIANTS[offset:], *_VARIANTS[:offset]):
                start = self._clock()
                _step(sessions[variant], tokens[variant])
                steps[variant].append(self._clock() - start)
        return Figures(
            steps,
            tokens,
            self._products(rows),
            compiled_steps.compile_seconds - before,
            compiled_steps.num_graphs - graphs,
        )

    def count_recompiles(self, prompts: int) -> int:
        """The number of graphs compiled for prompts of different lengths, each with its own cache."""
        compiled_steps = compiled_steps_of(self.model, traits_of(self.model))
        graphs = compiled_steps.num_graphs
        config = GenerationConfig(max_new_tokens=3, eos_token_id=None, do_sample=False)
        longest = self.options.capacity - 3
        for number in range(prompts):
            session = Session(self.model, cache=self._caches()["compiled"])
            length = 2 + number * max(longest - 2, 0) // max(prompts - 1, 1)
            session.admit(Request(self._prompt(length, number), config))
            list(session.drain())
        return compiled_steps.num_graphs - graphs

    def _caches(self) -> dict[str, KVCache]:
        capacity = self.options.capacity
        compile_config = CompileConfig(backend=self.options.backend)
        return {
            "dense": DenseStore(),
            "static": StaticStore(capacity),
            "compiled": StaticStore(capacity, compile_config=compile_config),
        }

    @property
    def _clock(self) -> Callable[[], float]:
        return time.process_time if self.options.threads == 1 else time.perf_counter

    def _prompt(self, length: int, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(3, self.model.config.vocab_size - 1, (length,), generator=generator)

    @torch.no_grad()
    def _products(self, rows: int) -> float:
        """Median seconds of one product with every matrix of a step."""
        linear = [part.weight for part in self.model.modules() if isinstance(part, torch.nn.Linear)]
        inputs = {width: torch.randn(rows, width) for width in {weight.shape[1] for weight in linear}}
        times = []
        for _ in range(5):
            start = self._clock()
            for weight in linear:
                torch.nn.functional.linear(inputs[weight.shape[1]], weight)
            times.append(self._clock() - start)
        return statistics.median(times)


def _step(session: Session, tokens: Sequence[list[int]]) -> None:
    """Run one step of a session and record its tokens."""
    for event in session.step():
        if isinstance(event, Tokens):
            for request, token in zip(event.request.tolist(), event.token.tolist(), strict=True):
                tokens[request].append(token)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the selected models, print each result; the exit status of the process."""
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
        benchmark = StepBenchmark(_load_model(name), options)
        for rows in options.rows:
            figures = benchmark.run(rows)
            speeds = [figures.speed(variant, rows) for variant in _VARIANTS]
            print(
                f"{name:<11} {rows:>4}  {speeds[0]:>11.1f}  {speeds[1]:>12.1f}  {speeds[2]:>14.1f}  "
                f"{figures.speedup('compiled', 'dense'):>7.2f}  "
                f"{figures.speedup('compiled', 'static'):>8.2f}  "
                f"{figures.products / statistics.median(figures.steps['compiled']):>8.0%}  "
                f"{figures.compiling:>9.1f}  {'same' if figures.same else 'OTHER'}",
                flush=True,
            )
        if options.prompts:
            graphs = benchmark.count_recompiles(options.prompts)
            print(
                f"{name:<11} {options.prompts} prompts of different length: {graphs} recompiled", flush=True
            )
    return 0


def _load_model(name: str) -> Any:
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
    parser.add_argument("--prompts", type=int, default=50, help="prompts of different lengths that follow")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(argv)
    options.model = options.model or ["stories15m", "smollm2"]
    options.rows = options.rows or [1]
    return options


if __name__ == "__main__":
    sys.exit(main())
