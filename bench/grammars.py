"""`python -m bench.grammars`: what grammars cost and what forced tokens save, CPU time, one thread.

`forced` compares five JSON tasks with and without the tokens that the grammar forces as drafts, for each
library. `steps` compares a step of 16 and of 64 rows under a grammar with the same step without, both fed the
same tokens, and gives the time in masks. With `--vllm PYTHON` the same requests run under vLLM's structured
outputs. The sides take turns; ratios are medians over the repeats.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import transformers

import descant
from bench.engines import VLLMProcess
from descant.decoding.processors import grammar as grammar_module

__all__ = ["main"]

_BACKENDS = ("llguidance", "xgrammar")


def _record(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_TEXT = {"type": "string", "maxLength": 24}
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "person": (
        "Alice Miller is 31 years old and lives in Paris. As JSON: ",
        _record(
            first_name=_TEXT,
            last_name=_TEXT,
            age={"type": "integer", "minimum": 0, "maximum": 120},
            city=_TEXT,
        ),
    ),
    "sentiment": (
        "Review: the food was cold and the waiter was rude. As JSON: ",
        _record(
            sentiment={"enum": ["positive", "negative", "neutral"]}, confidence={"enum": ["low", "high"]}
        ),
    ),
    "event": (
        "Meeting with the design team on Friday at ten in room 12. As JSON: ",
        _record(
            title=_TEXT, weekday={"enum": ["Monday", "Friday"]}, hour={"enum": [9, 10, 11]}, location=_TEXT
        ),
    ),
    "order": (
        "Two coffees and one croissant, please. As JSON: ",
        _record(
            items={
                "type": "array",
                "minItems": 2,
                "maxItems": 2,
                "items": _record(product_name=_TEXT, quantity={"enum": [1, 2, 3]}),
            },
            takeaway={"type": "boolean"},
        ),
    ),
    "call": (
        "Turn on the lights in the kitchen. As JSON: ",
        _record(
            function_name={"const": "set_light_state"},
            arguments=_record(room={"enum": ["kitchen", "bedroom"]}, state={"enum": ["on", "off"]}),
        ),
    ),
}


class TaskRun(NamedTuple):
    """One run of a task."""

    seconds: float
    wall: float
    tokens: list[int]
    forwards: int


def run_task(model: Any, tokenizer: Any, name: str, backend: str, drafts: bool) -> TaskRun:
    """A task to its end."""
    prompt, schema = TASKS[name]
    config = descant.GenerationConfig(
        max_new_tokens=120, grammar={"json_schema": schema, "backend": backend, "drafts": drafts}
    )
    session = descant.Session(model)
    began, wall = time.process_time(), time.perf_counter()
    session.admit(descant.Request(tokenizer(prompt).input_ids, config, tokenizer=tokenizer))
    finished = [event for event in session.drain() if isinstance(event, descant.Finished)]
    seconds, wall = time.process_time() - began, time.perf_counter() - wall
    hypothesis = finished[0].hypotheses[0]
    json.loads(tokenizer.decode(hypothesis.tokens.tolist(), skip_special_tokens=True))
    speculation = hypothesis.speculation
    forwards = len(hypothesis.tokens) if speculation is None else speculation.forwards
    return TaskRun(seconds, wall, hypothesis.tokens.tolist(), forwards)


def forced(model: Any, tokenizer: Any, repeats: int) -> None:
    """The table of forced tokens."""
    print(
        f"{'task':<11}{'library':<12}{'tokens':>7}{'forwards':>9}{'tok/fwd':>8}{'CPU':>7}{'wall':>7}"
        "  same tokens"
    )
    for backend in _BACKENDS:
        rates = []
        for name in TASKS:
            run_task(model, tokenizer, name, backend, drafts=True)  # compiles the grammar
            ratios: dict[str, list[float]] = {"seconds": [], "wall": []}
            for _ in range(repeats):
                plain, drafted = (run_task(model, tokenizer, name, backend, one) for one in (False, True))
                ratios["seconds"].append(drafted.seconds / plain.seconds)
                ratios["wall"].append(drafted.wall / plain.wall)
            rates.append(len(drafted.tokens) / drafted.forwards)
            cells = "".join(f"{statistics.median(values):>7.2f}" for values in ratios.values())
            counts = f"{len(drafted.tokens):>7}{drafted.forwards:>9}{rates[-1]:>8.2f}"
            print(f"{name:<11}{backend:<12}{counts}{cells}  {plain.tokens == drafted.tokens}")
        print(f"{'mean':<11}{backend:<12}{statistics.mean(rates):>24.2f}")


class StepRun(NamedTuple):
    """A run of a batch: CPU seconds of all steps, and of the masks in them."""

    seconds: float
    masks: float
    tokens: list[list[int]]


def run_batch(model: Any, tokenizer: Any, rows: int, steps: int, grammar: dict[str, Any] | None) -> StepRun:
    """A batch of requests with `steps` tokens each, without drafts."""
    prompts = [tokenizer(f"Record number {row} as JSON: ").input_ids for row in range(rows)]
    given = {} if grammar is None else {"grammar": grammar}
    config = descant.GenerationConfig(max_new_tokens=steps, **given)
    if grammar is None:
        config = config.replace(eos_token_id=None)
    session, masks = descant.Session(model), [0.0]
    session.admit(*(descant.Request(prompt, config, tokenizer=tokenizer) for prompt in prompts))
    plain = grammar_module.GrammarLogitsProcessor.process

    def timed(self: Any, context: Any, scores: torch.Tensor) -> torch.Tensor:
        began = time.process_time()
        result = plain(self, context, scores)
        masks[0] += time.process_time() - began
        return result

    grammar_module.GrammarLogitsProcessor.process = timed  # type: ignore[method-assign]
    try:
        began = time.process_time()
        finished = [event for event in session.drain() if isinstance(event, descant.Finished)]
        seconds = time.process_time() - began
    finally:
        grammar_module.GrammarLogitsProcessor.process = plain  # type: ignore[method-assign]
    tokens = [event.hypotheses[0].tokens.tolist() for event in sorted(finished, key=lambda one: one.request)]
    return StepRun(seconds, masks[0], tokens)


def steps(model: Any, tokenizer: Any, repeats: int, vllm: VLLMProcess | None) -> None:
    """The table of steps: rows that do not end before the last, so that all sides run the same steps."""
    schema = _record(
        items={"type": "array", "minItems": 40, "items": _record(name=_TEXT, count={"type": "integer"})}
    )
    print(
        f"{'rows':<6}{'library':<12}{'by none':>9}{'masks':>9}{'ms a step':>11}{'by vLLM':>9}"
        f"{'vLLM by none':>14}"
    )
    num_steps = 24
    for rows in (16, 64):
        requests = [(tokenizer(f"Record number {row} as JSON: ").input_ids, num_steps) for row in range(rows)]
        for backend in _BACKENDS:
            grammar = {"json_schema": schema, "backend": backend, "drafts": False}
            run_batch(model, tokenizer, rows, 2, grammar)
            ratios, shares, times, by_vllm, theirs = [], [], [], [], []
            for _ in range(repeats):
                plain, masked = (run_batch(model, tokenizer, rows, num_steps, one) for one in (None, grammar))
                assert {len(row) for row in masked.tokens} == {num_steps}
                ratios.append(masked.seconds / plain.seconds)
                shares.append(masked.masks / masked.seconds)
                times.append(1000 * masked.masks / num_steps)
                if vllm is not None:
                    own, free = vllm.structured(requests, schema), vllm(requests)
                    by_vllm.append(masked.seconds / own.seconds)
                    theirs.append(own.seconds / free.seconds)
            cells = f"{statistics.median(ratios):>9.3f}{statistics.median(shares):>9.3f}"
            cells += f"{statistics.median(times):>11.2f}"
            cells += (
                f"{statistics.median(by_vllm):>9.2f}{statistics.median(theirs):>14.3f}" if by_vllm else ""
            )
            print(f"{rows:<6}{backend:<12}{cells}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="models/smollm2")
    parser.add_argument("--only", choices=["forced", "steps"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--vllm", metavar="PYTHON", help="the interpreter that tools/vllm_env.py prints")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.model)
    if given.only != "steps":
        forced(model, tokenizer, given.repeats)
    if given.only != "forced":
        vllm = None if given.vllm is None else VLLMProcess(given.vllm, given.model, "float32")
        try:
            steps(model, tokenizer, given.repeats, vllm)
        finally:
            if vllm is not None:
                vllm.close()


if __name__ == "__main__":
    main()
