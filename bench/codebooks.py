"""`python -m bench.codebooks`: `descant.generate` and transformers' own `generate` on tiny models of sound.

CPU time of whole calls, both sides in turn in one process; the figure is the median ratio.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, which reads it then

import torch
import transformers

import descant
from tools.sweep.subject import Entry
from tools.sweep.trial import subject_of

__all__ = ["main"]

_CLASSES = {
    "musicgen": Entry("text-to-audio", "musicgen", "MusicgenForConditionalGeneration"),
    "melody": Entry("text-to-audio", "musicgen_melody", "MusicgenMelodyForConditionalGeneration"),
    "dia": Entry("speech-seq2seq", "dia", "DiaForConditionalGeneration"),
    "csm": Entry("text-to-audio", "csm", "CsmForConditionalGeneration"),
    "higgs": Entry("text-to-audio", "higgs_audio_v2", "HiggsAudioV2ForConditionalGeneration"),
}
_METHODS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "guidance": {"guidance_scale": 3.0},
}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the ratio of each class and method."""
    parser = argparse.ArgumentParser(prog="python -m bench.codebooks", description=__doc__)
    parser.add_argument("--model", action="append", choices=_CLASSES, help="only this; may be repeated")
    parser.add_argument("--frames", type=int, default=100, help="new frames of a sequence")
    parser.add_argument("--prompts", type=int, default=1, help="sequences of a call")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    print(f"{'model':10} {'method':10} {'Descant ms':>11} {'transformers ms':>16} {'ratio':>6}", flush=True)
    for name in args.model or _CLASSES:
        subject = subject_of(_CLASSES[name])
        inputs = {
            key: value.repeat(args.prompts, *[1] * (value.ndim - 1))
            for key, value in subject.prompts[0].items()
        }
        for method, options in _METHODS.items():
            if method == "guidance" and name in ("csm", "higgs"):
                continue
            given = {"max_new_tokens": args.frames, **options}
            ours, theirs = _measure(subject.model, inputs, given, args.repeats)
            ratio = statistics.median(one / other for one, other in zip(ours, theirs, strict=True))
            columns = f"{1e3 * statistics.median(ours):11.1f} {1e3 * statistics.median(theirs):16.1f}"
            print(f"{name:10} {method:10} {columns} {ratio:6.2f}", flush=True)


def _measure(
    model: Any, inputs: dict[str, Any], options: dict[str, Any], repeats: int
) -> tuple[list[float], list[float]]:
    """The CPU seconds of each call of both sides, which take turns."""

    def run(call: Callable[..., Any]) -> float:
        copies = {name: value.clone() for name, value in inputs.items()}
        torch.manual_seed(0)
        start = time.process_time()
        call(**copies, **options)
        return time.process_time() - start

    def ours(**arguments: Any) -> Any:
        return descant.generate(model, **arguments)

    run(ours), run(model.generate)
    times = [(run(ours), run(model.generate)) for _ in range(repeats)]
    return [one for one, _ in times], [other for _, other in times]


if __name__ == "__main__":
    main()
