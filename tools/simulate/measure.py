"""Measures steps of a real model in a session, to fit the cost model to them."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import descant
from tools.simulate.cost_model import CostModel, Measured, fit_steps

__all__ = ["measure"]

PROMPTS = (16, 64, 128, 256, 512)
ROWS = (1, 2, 4, 8, 16)
CONTEXTS = (16, 256, 768)
DECODES = 6  # steps timed for each number of rows and context
KV_TOKENS = 16384  # the pool of the simulated machine; a CPU has memory for more


def measure(folder: Path) -> CostModel:
    """Time prompts of several lengths and steps of several batches, one thread; fit the model."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = descant.GenerationConfig(max_new_tokens=64, eos_token_id=None)
    steps = [time_prompt(model, config, length) for length in PROMPTS for _ in range(2)]
    for rows in ROWS:
        for context in CONTEXTS:
            steps += time_decoding(model, config, rows, context)
    source = f"measured: {folder.name} in fp32, one thread of a shared CPU"
    return fit_steps("SmolLM2-135M on one CPU thread", source, steps, KV_TOKENS)


def request(config: descant.GenerationConfig, length: int) -> descant.Request:
    """A request with a prompt of that length."""
    return descant.Request(torch.arange(length) % 1000 + 100, config)


def time_prompt(model: torch.nn.Module, config: descant.GenerationConfig, length: int) -> Measured:
    """The time of the step that reads one prompt."""
    session = descant.Session(model)
    session.admit(request(config, length))
    return Measured(length, 0, 0, timed_step(session))


def time_decoding(
    model: torch.nn.Module, config: descant.GenerationConfig, rows: int, context: int
) -> list[Measured]:
    """The time of steps of a batch after its prompts."""
    session = descant.Session(model)
    session.admit(*(request(config, context) for _ in range(rows)))
    session.step()
    session.step()
    return [Measured(0, rows, rows * (context + 2 + step), timed_step(session)) for step in range(DECODES)]


def timed_step(session: descant.Session) -> float:
    """CPU seconds of a step; on a shared machine the wall clock also counts the others."""
    began = time.process_time()
    session.step()
    return time.process_time() - began
