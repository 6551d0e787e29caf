"""`python -m bench.marks`: what a watermark costs, beside no watermark and transformers' own processors.

"step" is the CPU time of a decode step that marks / one that does not, both in whole calls of `generate`.
"ours" and "theirs" is what marking alone takes on scores of the model, both in turn on the same ones; what
is made once for a key is outside this clock. Every run has a key of its own, so no list is there before it
is asked for. Ratios are of medians; one thread.
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
from bench.scenarios import loaded
from descant.config.generation_config import GenerationConfig
from descant.core.context import Context, columns_from_rows
from descant.decoding import processors as ours
from descant.decoding.watermark.schemes import (
    BaseWatermarkingConfig,
    GumbelWatermarkingConfig,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

__all__ = ["MARKS", "main"]

PROMPT = 32  # tokens of each row
_FIRST = "lefthash"  # the mark the bars are for


def _synthid(depth: int) -> Callable[[random.Random], BaseWatermarkingConfig]:
    return lambda chance: SynthIDTextWatermarkingConfig(5, [chance.randrange(2**32) for _ in range(depth)])


def _green(scheme: str, width: int) -> Callable[[random.Random], BaseWatermarkingConfig]:
    return lambda chance: WatermarkingConfig(
        hashing_key=chance.randrange(2**20, 2**31), seeding_scheme=scheme, context_width=width
    )


MARKS: Mapping[str, Callable[[random.Random], BaseWatermarkingConfig]] = {
    _FIRST: _green("lefthash", 1),
    "selfhash": _green("selfhash", 4),
    "synthid, depth 9": _synthid(9),
    "synthid, depth 30": _synthid(30),
    "gumbel": lambda chance: GumbelWatermarkingConfig(chance.randrange(2**20, 2**31)),
}


@dataclass(frozen=True)
class Steps:
    """What the model says step by step, and what it has been given."""

    ids: Tensor  # [B, PROMPT + T], a whole text's
    scores: Sequence[Tensor]  # of its first steps, [B, V] each

    @classmethod
    def of(cls, model: Any, prompts: Tensor, options: argparse.Namespace) -> Steps:
        """Those of a sampled continuation."""
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
        """The steps that have scores."""
        return iter(enumerate(self.scores))

    @property
    def whole(self) -> Iterator[tuple[int, Tensor]]:
        """All steps of the text, those without scores with others' ones."""
        return zip(range(self.ids.shape[1] - PROMPT), cycle(self.scores), strict=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each mark; the process's exit status says whether the bars hold."""
    options = _options(argv)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = loaded(options.model)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(100, model.config.vocab_size, (options.batch, PROMPT), generator=generator)
    print(
        f"{options.model.name}, batch {options.batch}, top_k {options.top_k}, {options.new} new tokens, "
        f"median of {options.repeats}; transformers {transformers.__version__}"
    )
    marks = [one for one in MARKS if not options.mark or one in options.mark]
    steps = _step_times(model, prompts, marks, options)
    given = Steps.of(model, prompts, options)
    print(f"{'':20}{'step ms':>9}{'x none':>8}{'ours ms':>9}{'theirs':>9}{'gain':>8}  scores")
    print(f"{'none':20}{steps['none'] * 1e3:9.1f}{1:8.3f}", flush=True)
    held = True
    for mark in marks:
        share = steps[mark] / steps["none"]
        mine, other, same = _raced(mark, given, options.repeats)
        line = f"{mark:20}{steps[mark] * 1e3:9.1f}{share:8.3f}{mine * 1e3:9.2f}"
        if other is not None:
            line += f"{other * 1e3:9.2f}{other / mine:8.1f}  {'same' if same else 'OTHER'}"
            held &= other / mine >= options.faster and same
        print(line, flush=True)
        if mark == _FIRST and share > 1.0 + options.share:
            held = False
    print("the bars hold" if held else "A BAR IS MISSED", flush=True)
    return 0 if held else 1


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.marks", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"))
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--new", type=int, default=32, help="tokens of each call that is timed")
    parser.add_argument("--steps", type=int, default=12, help="whose scores the processors are shown")
    parser.add_argument("--text", type=int, default=200, help="steps that lefthash is shown")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--top-k", type=int, default=50, help="0: none")
    parser.add_argument("--mark", choices=tuple(MARKS), nargs="*", help="only these")
    parser.add_argument("--share", type=float, default=0.10, help="of a step that lefthash may add")
    parser.add_argument("--faster", type=float, default=2.0, help="than transformers' processor, at least")
    return parser.parse_args(argv)


def _step_times(
    model: Any, prompts: Tensor, marks: Sequence[str], options: argparse.Namespace
) -> dict[str, float]:
    """Median CPU seconds of a step with each mark and with none, taking turns in a rotating order."""
    ways = ["none", *marks]
    times: dict[str, list[float]] = {way: [] for way in ways}
    for repeat in range(-1, options.repeats):  # the first warms up
        turn = repeat % len(ways)
        for way in ways[turn:] + ways[:turn]:
            new = options.new if repeat >= 0 else 2
            settings = None if way == "none" else MARKS[way](random.Random(f"{way}/{repeat}"))
            config = GenerationConfig(
                do_sample=True, top_k=options.top_k, max_new_tokens=new, min_new_tokens=new,
                watermarking_config=settings,
            )  # fmt: skip
            gc.collect()
            start = time.process_time()
            descant.generate(model, prompts, generation_config=config, seed=repeat + 1)
            if repeat >= 0:
                times[way].append((time.process_time() - start) / new)
    return {way: statistics.median(found) for way, found in times.items()}


def _raced(mark: str, steps: Steps, repeats: int) -> tuple[float, float | None, bool]:
    """Median CPU seconds a step of our processor and transformers', and whether their scores are the same."""
    times: tuple[list[float], list[float]] = ([], [])
    same = True
    for repeat in range(repeats):
        settings = MARKS[mark](random.Random(f"{mark}/{repeat}/processor"))
        found = _ours(settings, steps), _theirs(settings, steps)
        totals = [0.0, 0.0]
        # A list is asked for again whenever its token returns, so lefthash is shown a whole text.
        shown = list(steps.whole if mark == _FIRST else steps)
        for at, scores in shown:
            answers: list[Tensor] = []
            order = (0, 1) if (repeat + at) % 2 else (1, 0)
            for which in order:
                link = found[which]
                if link is None:
                    continue
                start = time.process_time()
                answers.append(link(at, scores))
                totals[which] += time.process_time() - start
            if len(answers) == 2:
                same &= bool(torch.allclose(*(one.softmax(-1) for one in answers), rtol=1e-4, atol=1e-7))
        for which in (0, 1):
            times[which].append(totals[which] / len(shown))
    other = statistics.median(times[1]) if found[1] is not None else None
    return statistics.median(times[0]), other, same


Link = Callable[[int, Tensor], Tensor]


def _ours(settings: BaseWatermarkingConfig, steps: Steps) -> Link:
    """Our processor, as the loop calls it."""
    kind = {
        "green list": ours.WatermarkLogitsProcessor,
        "synthid": ours.SynthIDTextWatermarkLogitsProcessor,
        "gumbel": ours.GumbelWatermarkLogitsProcessor,
    }[settings.scheme]
    made, count = kind.make_unbound(), len(steps.ids)
    one = torch.ones(1, dtype=torch.long)
    start = Context(
        torch.zeros(1, 8, dtype=torch.long), 8 * one, one, columns_from_rows([{"watermark": settings}])
    )
    made.process(start, steps.scores[0][:1])
    prompt = torch.full((count,), PROMPT)
    values = columns_from_rows([{"watermark": settings}] * count)

    def link(at: int, scores: Tensor) -> Tensor:
        length = torch.full((count,), PROMPT + at)
        return made.process(Context(steps.ids[:, : PROMPT + at], length, prompt, values), scores)

    return link


def _theirs(settings: BaseWatermarkingConfig, steps: Steps) -> Link | None:
    fields: dict[str, Any] = {**settings.to_dict(), "device": "cpu"}
    made: Any
    if isinstance(settings, WatermarkingConfig):
        made = theirs.WatermarkLogitsProcessor(steps.scores[0].shape[1], **fields)
    elif isinstance(settings, SynthIDTextWatermarkingConfig):
        made = theirs.SynthIDTextWatermarkLogitsProcessor(**fields)
    else:
        return None
    return lambda at, scores: made(steps.ids[:, : PROMPT + at], scores)


if __name__ == "__main__":
    sys.exit(main())
