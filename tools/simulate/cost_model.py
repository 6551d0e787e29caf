"""How long a step takes: a + b * prompt tokens + c * decoding rows + d * tokens in the cache.

Two models: one measured on a CPU (`python -m tools.simulate measure`), and one fitted to published figures
of an 8B model on one H100. Both are in `costs.json`, with where they come from.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

__all__ = [
    "COSTS", "PUBLISHED", "CostModel", "Measured", "Published", "fit_published", "fit_steps", "load_costs",
    "save_costs",
]  # fmt: skip

COSTS = Path(__file__).with_name("costs.json")

# Llama 3.1 8B in FP8 on one H100 SXM 80 GB: output tokens a second at full load, by prompt and output length.
# https://github.com/NVIDIA/TensorRT-LLM, docs/source/performance/perf-overview.md at commit 00f3768 (v1.0).
TABLE = (
    "https://github.com/NVIDIA/TensorRT-LLM/blob/00f37686aa854010d68bcbd0f4ab000221541ca6/"
    "docs/source/performance/perf-overview.md"
)
# The table has full batches only, which do not tell the time of a step from that of the tokens it reads. One
# stream of Llama 3.1 8B has a token every 4.63 ms (NIM 1.8.0).
STREAM = "https://docs.nvidia.com/nim/benchmarking/llm/1.0.0/performance"
STREAM_SECONDS, STREAM_CONTEXT = 4.63e-3, 300
# Not in the table: 64 KiB of FP8 keys and values a token (32 layers, 8 heads of 128), 95 % of what 9 GB of
# weights leave of the memory, and the largest batch of that benchmark.
KV_TOKENS = int((80e9 - 9e9) * 0.95 / 65536)
MOST_ROWS = 2048


class Published(NamedTuple):
    """A line of the table."""

    prompt: int
    output: int
    tokens_per_second: float


PUBLISHED = (
    Published(128, 128, 28312), Published(128, 2048, 22714), Published(128, 4096, 14325),
    Published(500, 2000, 17660), Published(1000, 1000, 15220), Published(1000, 2000, 13899),
    Published(2048, 128, 3450), Published(2048, 2048, 9305), Published(5000, 500, 3459),
    Published(20000, 2000, 1351),
)  # fmt: skip


class Measured(NamedTuple):
    """A step and its time."""

    prompt_tokens: int
    decode_rows: int
    kv_tokens: int
    seconds: float


@dataclass(frozen=True)
class CostModel:
    """Seconds of a step, and the pool of the machine it was fitted on."""

    name: str
    source: str
    step: float  # of any step
    prompt_token: float  # of each token of a prompt
    decode_row: float  # of each row that decodes
    kv_token: float  # of each cached token that a row reads
    kv_tokens: int  # that the pool holds
    median_error: float  # of the fit, relative

    def seconds(self, prompt_tokens: int, decode_rows: int, kv_tokens: int) -> float:
        """The time of a step."""
        return (
            self.step
            + self.prompt_token * prompt_tokens
            + self.decode_row * decode_rows
            + self.kv_token * kv_tokens
        )


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[list[float], float]:
    """Coefficients >= 0 with the least relative squares, and the median relative error."""
    matrix, target = np.asarray(rows, dtype=float), np.asarray(seconds, dtype=float)
    scale = np.abs(matrix).max(axis=0)
    found, _ = nnls(matrix / scale / target[:, None], np.ones(len(target)))
    coefficients = found / scale
    errors = np.abs(matrix @ coefficients / target - 1)
    return [float(value) for value in coefficients], float(np.median(errors))


def fit_published() -> CostModel:
    """The model of the published table: time of one output token of a full batch.

    In a steady state each output token of a row comes with `prompt / output` tokens of prompts, and the row
    has read half of its output on average. A batch has as many rows as fit in the pool.
    """
    rows, seconds = [], []
    for prompt, output, rate in PUBLISHED:
        context = prompt + output / 2
        batch = min(MOST_ROWS, KV_TOKENS / context)
        rows.append((1 / batch, prompt / output, 1.0, context))
        seconds.append(1 / rate)
    rows.append((1.0, 0.0, 1.0, STREAM_CONTEXT))
    seconds.append(STREAM_SECONDS)
    coefficients, error = fit(rows, seconds)
    return CostModel("8B on one H100", f"fitted to {TABLE} and {STREAM}", *coefficients, KV_TOKENS, error)


def fit_steps(name: str, source: str, steps: Sequence[Measured], kv_tokens: int) -> CostModel:
    """The model of measured steps."""
    coefficients, error = fit([(1, *step[:3]) for step in steps], [step.seconds for step in steps])
    return CostModel(name, source, *coefficients, kv_tokens, error)


def load_costs() -> dict[str, CostModel]:
    """The committed models by their short names."""
    return {
        name: CostModel(**fields) for name, fields in json.loads(COSTS.read_text(encoding="utf-8")).items()
    }


def save_costs(costs: dict[str, CostModel]) -> None:
    """Write the models to the committed file."""
    text = json.dumps({name: asdict(cost) for name, cost in costs.items()}, indent=1)
    COSTS.write_text(text + "\n", encoding="utf-8")
