"""`python -m bench.batches`: how many greedy prompts get other tokens in a batch than alone, by precision.

Each prompt is decoded by itself and in one batch with all others. In fp32 the tokens are the same. In half
precision the last bit of a sum depends on the shape of the batch, so a choice between two tokens that are
equally likely to within rounding may differ.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
import transformers

import descant

__all__ = ["count_different", "main"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_PROMPTS = (
    "The best way to learn a language is", "Once upon a time", "The old man looked at the sea and",
    "In the morning the children went to the river", "A good teacher",
    "The king had three sons, and the youngest",
    "My favourite food is", "The robot looked at the sea and", "Two friends walked through the forest until",
    "The capital of France is", "Rain fell on the roof all night, so", "A small dog ran after",
    "She opened the letter and read", "It was the first day of school, and Lily",
    "The baker made a cake with", "When the sun came up, the birds",
)  # fmt: skip


def count_different(model: Any, prompts: Sequence[Sequence[int]], new: int) -> int:
    """The number of prompts whose tokens in the batch of all differ from those alone."""
    config = descant.GenerationConfig(max_new_tokens=new, eos_token_id=None)
    session = descant.Session(model)
    numbers = session.admit(*(descant.Request(list(prompt), config) for prompt in prompts))
    together = _tokens(session)
    different = 0
    for number, prompt in zip(numbers, prompts, strict=True):
        alone = descant.Session(model)
        (only,) = alone.admit(descant.Request(list(prompt), config))
        different += _tokens(alone)[only] != together[number]
    return different


def _tokens(session: descant.Session) -> dict[int, list[int]]:
    """The new tokens of every request of a session."""
    ended = [event for event in session.drain() if isinstance(event, descant.Finished)]
    return {event.request: event.hypotheses[0].tokens.tolist() for event in ended}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line for each precision."""
    parser = argparse.ArgumentParser(prog="python -m bench.batches", description=__doc__)
    parser.add_argument("--model", default="models/smollm2")
    parser.add_argument("--prompts", type=int, default=len(_PROMPTS))
    parser.add_argument("--new", type=int, default=48, help="tokens decoded after each prompt")
    parser.add_argument("--dtypes", nargs="+", choices=_DTYPES, default=list(_DTYPES))
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.model)
    prompts = [tokenizer(text)["input_ids"] for text in _PROMPTS[: given.prompts]]
    for name in given.dtypes:
        model = transformers.AutoModelForCausalLM.from_pretrained(given.model, dtype=_DTYPES[name]).eval()
        different = count_different(model, prompts, given.new)
        print(f"{name}: {different} of {len(prompts)} prompts differ")


if __name__ == "__main__":
    main()
