"""`python -m bench.marks`: the cost of a watermark, against no watermark and transformers' own processors.

"step" is the CPU time of a decode step with / without a watermark, in whole calls of `generate`. "ours" and
"theirs" is the time of the processor alone on scores of the model, both in turn on the same scores; setup per
key is not timed. Every run has its own key, so no green list is cached before. Ratios of medians; one thread.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.generation import logits_process as theirs

import descant
import descant as ours
from bench.scenarios import load_model
from descant.config.generation_config import GenerationConfig
from descant.config.watermarking_config import (
    BaseWatermarkingConfig,
    GumbelWatermarkingConfig,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from descant.core.context import Context, columns_from_rows

__all__ = ["MARKS", "main"]

PROMPT = 32  # tokens of each row
_FIRST = "lefthash"  # the scheme of the limits


def _synthid(depth: int) -> Callable[[random.Random], BaseWatermarkingConfig]:
    return lambda rng: SynthIDTextWatermarkingConfig(5, [rng.randrange(2**32) for _ in range(depth)])


def _green(scheme: str, width: int) -> Callable[[random.Random], BaseWatermarkingConfig]:
    return lambda rng: WatermarkingConfig(
        hashing_key=rng.randrange(2**20, 2**31), seeding_scheme=scheme, context_width=width
    )


MARKS: Mapping[str, Callable[[random.Random], BaseWatermarkingConfig]] = {
    _FIRST: _green("lefthash", 1),
    "selfhash": _green("selfhash", 4),
    "synthid, depth 9": _synthid(9),
    "synthid, depth 30": _synthid(30),
    "gumbel": lambda rng: GumbelWatermarkingConfig(rng.randrange(2**20, 2**31)),
}


@dataclass(frozen=True)
class Steps:
    """The scores of the model by step, and the token ids."""

    ids: Tensor  # [B, PROMPT + T], of the whole text
    scores: Sequence[Tensor]  # of its first steps, [B, V] each

    @classmethod
    def of(cls, model: Any, prompts: Tensor, options: argparse.Namespace) -> Steps:
        """The steps of a sampled continuation."""
        fields = {"do_sample": True, "top_k": options.top_k, "seed": 1}
        whole, few = (
            descant.generate(
                model, prompts, max_new_tokens=count, min_new_tokens=count,
                output_scores=count == options.steps, return_dict_in_generate=True, **fields,
            )
            for count in (options.text, options.steps)
        )  # fmt: skip
        return cls(whole.sequences, few.scores)

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        """The steps with scores."""
        return iter(enumerate(self.scores))

    @property
    def whole(self) -> Iterator[tuple[int, Tensor]]:
        """All steps of the text; later steps reuse the scores of earlier ones."""
        return zip(range(self.ids.shape[1] - PROMPT), cycle(self.scores), strict=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each scheme; the exit status says whether the limits are met."""
    options = _options(argv)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = load_model(options.model)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(100, model.config.vocab_size, (options.batch, PROMPT), generator=generator)
    print(
        f"{options.model.name}, batch {options.batch}, top_k {options.top_k}, {options.new} new tokens, "
        f"median of {options.repeats}; transformers {transformers.__version__}"
    )
    marks = [one for one in MARKS if not options.mark or one in options.mark]
    steps = _step_times(model, prompts, marks, options)
    model_steps = Steps.of(model, prompts, options)
    print(f"{'':20}{'step ms':>9}{'x none':>8}{'ours ms':>9}{'theirs':>9}{'ratio':>8}  scores")
    print(f"{'none':20}{steps['none'] * 1e3:9.1f}{1:8.3f}", flush=True)
    passed = True
    for mark in marks:
        share = steps[mark] / steps["none"]
        our_seconds, their_seconds, same = _compare(mark, model_steps, options.repeats)
        line = f"{mark:20}{steps[mark] * 1e3:9.1f}{share:8.3f}{our_seconds * 1e3:9.2f}"
        if their_seconds is not None:
            ratio = their_seconds / our_seconds
            line += f"{their_seconds * 1e3:9.2f}{ratio:8.1f}  {'same' if same else 'OTHER'}"
            passed &= ratio >= options.faster and same
        print(line, flush=True)
        if mark == _FIRST and share > 1.0 + options.share:
            passed = False
    print("all limits are met" if passed else "A LIMIT IS MISSED", flush=True)
    return 0 if passed else 1


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.marks", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"))
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--new", type=int, default=32, help="new tokens of each timed call")
    parser.add_argument("--steps", type=int, default=12, help="steps whose scores the processors run on")
    parser.add_argument("--text", type=int, default=200, help="steps that lefthash runs on")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--top-k", type=int, default=50, help="0: none")
    parser.add_argument("--mark", choices=tuple(MARKS), nargs="*", help="only these")
    parser.add_argument("--share", type=float, default=0.10, help="of a step that lefthash may add")
    parser.add_argument("--faster", type=float, default=2.0, help="than transformers' processor, at least")
    return parser.parse_args(argv)


def _step_times(
    model: Any, prompts: Tensor, marks: Sequence[str], options: argparse.Namespace
) -> dict[str, float]:
    """Median CPU seconds of a step with each scheme and with none, in rotating order."""
    names = ["none", *marks]
    times: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(-1, options.repeats):  # the first warms up
        offset = repeat % len(names)
        for name in names[offset:] + names[:offset]:
            new = options.new if repeat >= 0 else 2
            settings = None if name == "none" else MARKS[name](random.Random(f"{name}/{repeat}"))
            config = GenerationConfig(
                do_sample=True, top_k=options.top_k, max_new_tokens=new, min_new_tokens=new,
                watermarking_config=settings,
            )  # fmt: skip
            gc.collect()
            start = time.process_time()
            descant.generate(model, prompts, generation_config=config, seed=repeat + 1)
            if repeat >= 0:
                times[name].append((time.process_time() - start) / new)
    return {name: statistics.median(values) for name, values in times.items()}


def _compare(mark: str, steps: Steps, repeats: int) -> tuple[float, float | None, bool]:
    """Median CPU seconds per step of our processor and transformers', and whether their scores are equal."""
    times: tuple[list[float], list[float]] = ([], [])
    same = True
    for repeat in range(repeats):
        settings = MARKS[mark](random.Random(f"{mark}/{repeat}/processor"))
        processors = _ours(settings, steps), _theirs(settings, steps)
        totals = [0.0, 0.0]
        # Lists are reused when their token recurs, so lefthash runs on a whole text.
        timed_steps = list(steps.whole if mark == _FIRST else steps)
        for at, scores in timed_steps:
            outputs: list[Tensor] = []
            order = (0, 1) if (repeat + at) % 2 else (1, 0)
            for which in order:
                processor = processors[which]
                if processor is None:
                    continue
                start = time.process_time()
                outputs.append(processor(at, scores))
                totals[which] += time.process_time() - start
            if len(outputs) == 2:
                same &= bool(torch.allclose(*(one.softmax(-1) for one in outputs), rtol=1e-4, atol=1e-7))
        for which in (0, 1):
            times[which].append(totals[which] / len(timed_steps))
    their_seconds = statistics.median(times[1]) if processors[1] is not None else None
    return statistics.median(times[0]), their_seconds, same


ProcessorCall = Callable[[int, Tensor], Tensor]


def _ours(settings: BaseWatermarkingConfig, steps: Steps) -> ProcessorCall:
    """Our processor, as the loop calls it."""
    kind = {
        "green list": ours.WatermarkLogitsProcessor,
        "synthid": ours.SynthIDTextWatermarkLogitsProcessor,
        "gumbel": ours.GumbelWatermarkLogitsProcessor,
    }[settings.scheme]
    instance, count = kind.make_unbound(), len(steps.ids)
    one = torch.ones(1, dtype=torch.long)
    start = Context(
        torch.zeros(1, 8, dtype=torch.long), 8 * one, one, columns_from_rows([{"watermark": settings}])
    )
    instance.process(start, steps.scores[0][:1])
    prompt = torch.full((count,), PROMPT)
    values = columns_from_rows([{"watermark": settings}] * count)

    def processor(at: int, scores: Tensor) -> Tensor:
        length = torch.full((count,), PROMPT + at)
        return instance.process(Context(steps.ids[:, : PROMPT + at], length, prompt, values), scores)

    return processor


def _theirs(settings: BaseWatermarkingConfig, steps: Steps) -> ProcessorCall | None:
    fields: dict[str, Any] = {**settings.to_dict(), "device": "cpu"}
    instance: Any
    if isinstance(settings, WatermarkingConfig):
        instance = theirs.WatermarkLogitsProcessor(steps.scores[0].shape[1], **fields)
    elif isinstance(settings, SynthIDTextWatermarkingConfig):
        instance = theirs.SynthIDTextWatermarkLogitsProcessor(**fields)
    else:
        return None
    return lambda at, scores: instance(steps.ids[:, : PROMPT + at], scores)


if __name__ == "__main__":
    sys.exit(main())
