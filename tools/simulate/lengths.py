"""Lengths and arrivals of requests, made from a public trace.

`azure_sample.csv` has rows of the Azure LLM inference trace 2023 (Patel et al., "Splitwise", ISCA 2024;
CC-BY; https://github.com/Azure/AzurePublicDataset, commit 7909210): 220 of the conversation service, in
two runs from its beginning and from 18:47, and 120 of the code service from 18:46. Requests are drawn from
these rows with replacement, prompt and answer together, each length changed by up to a tenth so that none is
special.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

import numpy as np

__all__ = ["SERVICES", "Workload", "draw"]

SAMPLE = Path(__file__).with_name("azure_sample.csv")
SERVICES = ("conversation", "code")


class Workload(NamedTuple):
    """Requests in the order of their arrival."""

    arrivals: np.ndarray  # seconds [N]
    prompts: np.ndarray  # tokens [N]
    outputs: np.ndarray  # tokens [N]
    priorities: np.ndarray  # [N]


def sample(service: str) -> np.ndarray:
    """The rows of a service [M, 2]: prompt and answer."""
    with SAMPLE.open(encoding="utf-8", newline="") as file:
        rows = [
            (int(row["prompt_tokens"]), int(row["new_tokens"]))
            for row in csv.DictReader(file)
            if row["service"] == service
        ]
    return np.array(rows)


def draw(
    count: int,
    rate: float,
    *,
    service: str = "conversation",
    burstiness: float = 1.0,
    levels: int = 1,
    seed: int = 0,
) -> Workload:
    """A workload of `count` requests at `rate` a second.

    Times between arrivals have a gamma distribution; `burstiness` is the square of its coefficient of
    variation: 1 is a Poisson process, more comes in bursts. `levels` priorities are equally likely.
    """
    chance = np.random.default_rng(seed)
    rows = sample(service)[chance.integers(len(sample(service)), size=count)]
    jittered = np.rint(rows * chance.uniform(0.9, 1.1, size=rows.shape)).astype(int)
    gaps = chance.gamma(1 / burstiness, burstiness / rate, size=count)
    arrivals = np.cumsum(gaps)
    arrivals *= count / rate / arrivals[-1]  # the rate is exact, so that runs compare
    prompts, outputs = np.maximum(jittered, 1).T
    return Workload(arrivals, prompts, outputs, chance.integers(levels, size=count))
