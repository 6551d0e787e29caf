"""`python -m bench.scaling`: the cost of the loop as rows, and distinct configs in one session, grow.

A session of greedy requests on the tiny model, and one of sampled requests, each of one of several configs.
CPU time, one thread, the least of the repeats; sizes run in turns. The loop is a step without its forward,
which is timed by hooks on the model. The growth is the exponent between the two largest sizes: 1 is linear.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

import descant
from bench.models import SUBJECTS

__all__ = ["Cost", "main"]

ROWS = (1, 4, 16, 64, 256, 1024)
CONFIGS = (1, 4, 16, 64, 256)
_PROMPT = 8  # tokens
_COLOURS = {"loop": "#2f5fd0", "forward": "#b3470b", "admission": "#187a54"}


class Cost(NamedTuple):
    """CPU milliseconds of one size."""

    loop: float  # of a step, without its forward
    forward: float  # of a step
    admission: float  # of all requests, with their first step but without its forward

    def least(self, other: Cost) -> Cost:
        """The least of two runs, part by part."""
        return Cost(*map(min, self, other))


class _ForwardTimer:
    """The CPU time of all forwards of a model."""

    def __init__(self, model: Any) -> None:
        self.seconds, self._start = 0.0, 0.0
        self._hooks = (model.register_forward_pre_hook(self._begin), model.register_forward_hook(self._end))

    def _begin(self, *_: Any) -> None:
        self._start = time.process_time()

    def _end(self, *_: Any) -> None:
        self.seconds += time.process_time() - self._start

    def close(self) -> None:
        """Stop timing."""
        for hook in self._hooks:
            hook.remove()


def _config(number: int | None, steps: int) -> descant.GenerationConfig:
    """A greedy config, or the sampled one of that number."""
    length = {"max_new_tokens": steps + 8, "min_new_tokens": steps + 8}
    if number is None:
        return descant.GenerationConfig(**length)
    own = {"temperature": 0.5 + number / 512, "top_k": 10 + number, "repetition_penalty": 1 + number / 1024}
    return descant.GenerationConfig(do_sample=True, seed=number, **own, **length)


def _measure(model: Any, rows: int, configs: int | None, steps: int) -> Cost:
    """One run of so many rows; None: of one greedy config."""
    kinds = [_config(number, steps) for number in ([None] if configs is None else range(configs))]
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(1, model.config.vocab_size - 1, (rows, _PROMPT), generator=generator)
    requests = [descant.Request(one, kinds[index % len(kinds)]) for index, one in enumerate(ids)]
    session = descant.Session(model)
    gc.collect()
    timer = _ForwardTimer(model)
    try:
        start = time.process_time()
        session.admit(*requests)
        session.step()
        admission = time.process_time() - start - timer.seconds
        timer.seconds, start = 0.0, time.process_time()
        for _ in range(steps):
            session.step()
        step = time.process_time() - start
    finally:
        timer.close()
    scale = 1e3 / steps
    return Cost((step - timer.seconds) * scale, timer.seconds * scale, admission * 1e3)


def _growth(costs: Mapping[int, Cost], part: str) -> float:
    """The exponent of a part's growth between the two largest sizes."""
    (small, less), (large, more) = sorted(costs.items())[-2:]
    return math.log(getattr(more, part) / getattr(less, part)) / math.log(large / small)


def _table(name: str, costs: Mapping[int, Cost], rows: int | None) -> list[str]:
    """The lines of one sweep; a step of `rows` rows, or of as many as the size."""
    lines = [f"{name:>8}{'loop ms':>10}{'us a row':>10}{'forward ms':>12}{'admission ms':>14}"]
    for size, cost in costs.items():
        row = cost.loop * 1e3 / (rows or size)
        lines.append(f"{size:>8}{cost.loop:>10.3f}{row:>10.1f}{cost.forward:>12.3f}{cost.admission:>14.2f}")
    growth = f"{_growth(costs, 'loop'):>10.2f}{'':>10}{_growth(costs, 'forward'):>12.2f}"
    return [*lines, f"{'growth':>8}{growth}{_growth(costs, 'admission'):>14.2f}"]


def _plot(sweeps: Mapping[str, Mapping[int, Cost]]) -> str:
    """The sweeps side by side as SVG, both axes logarithmic."""
    width, height, edge = 340, 260, 46
    values = [value for costs in sweeps.values() for cost in costs.values() for value in cost]
    low, high = (math.floor(math.log10(min(values))), math.ceil(math.log10(max(values))))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width * len(sweeps)} {height}" '
        'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
    ]
    for panel, (name, costs) in enumerate(sweeps.items()):
        left, span = panel * width + edge, math.log(max(costs) / min(costs)) or 1.0
        where_x = {size: left + (width - 1.5 * edge) * math.log(size / min(costs)) / span for size in costs}
        scale = (height - 2 * edge) / (high - low)
        for power in range(low, high + 1):
            y = height - edge - (power - low) * scale
            parts.append(f'<path d="M{left} {y:.1f}H{left + width - 1.5 * edge:.1f}" stroke="#ddd"/>')
            parts.append(f'<text x="{left - 4}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
        for size, x in where_x.items():
            parts.append(f'<text x="{x:.1f}" y="{height - edge + 16}" text-anchor="middle">{size}</text>')
        parts.append(f'<text x="{left}" y="{height - 10}">{name}; ms of CPU time</text>')
        for number, (part, colour) in enumerate(_COLOURS.items()):
            points = " ".join(
                f"{where_x[size]:.1f},{height - edge - (math.log10(getattr(cost, part)) - low) * scale:.1f}"
                for size, cost in costs.items()
            )
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
            parts.append(f'<text x="{left + 80 * number}" y="20" fill="{colour}">{part}</text>')
    return "\n".join([*parts, "</svg>\n"])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure both sweeps; 1 if the loop or an admission grows faster than allowed."""
    parser = argparse.ArgumentParser(prog="python -m bench.scaling", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="sizes of the first sweep")
    parser.add_argument("--configs", type=int, nargs="+", default=CONFIGS, help="sizes of the second sweep")
    parser.add_argument("--config-rows", type=int, default=256, help="rows of the second sweep")
    parser.add_argument("--steps", type=int, default=16, help="steps of a run")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each size")
    parser.add_argument("--limit", type=float, default=1.2, help="allowed growth")
    parser.add_argument("--svg", type=Path, help="also write a plot to this file")
    options = parser.parse_args(argv)
    for name in ("rows", "configs"):
        if len(set(getattr(options, name))) < 2 or min(getattr(options, name)) < 1:
            parser.error(f"--{name} must hold at least two sizes >= 1, got {getattr(options, name)}")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    model = SUBJECTS["tiny"].model()
    sweeps: dict[str, dict[int, Cost]] = {"rows": {}, "configs": {}}
    for _ in range(options.repeats):
        for name, sizes in (("rows", options.rows), ("configs", options.configs)):
            for size in sorted(sizes):
                of_rows = (size, None) if name == "rows" else (options.config_rows, size)
                cost = _measure(model, *of_rows, options.steps)
                sweeps[name][size] = cost.least(sweeps[name].get(size, cost))
    for name, costs in sweeps.items():
        print("\n".join(_table(name, costs, None if name == "rows" else options.config_rows)), flush=True)
    if options.svg is not None:
        options.svg.write_text(_plot(sweeps), encoding="utf-8")
    growths = [_growth(costs, part) for costs in sweeps.values() for part in ("loop", "admission")]
    return 0 if max(growths) <= options.limit else 1


if __name__ == "__main__":
    sys.exit(main())
