"""Parity with the `generate` of the installed transformers, which is the model's own method."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from typing import Any, Final

import torch
from torch import Tensor

from descant.api.generate import generate
from descant.cli.doctor.laws import SkippedCheck, run_check
from descant.cli.doctor.report import CheckRow, ShareRow, one_line
from descant.cli.doctor.subject import PaddedPrompts, Subject, token_prompts
from descant.decoding.processors.base import as_id_list
from descant.models.loading import silence_transformers

__all__ = ["HALF_CASES", "PARITY_CASES", "ParityCase", "pad_token", "quiet", "run_half", "run_parity"]

HALF_DTYPES: Final = ("bfloat16", "float16")
_SEED: Final = 3  # of torch's generator, before each of the two


@dataclass(frozen=True)
class ParityCase:
    """Prompts of these lengths and a method; both implementations get the same arguments."""

    name: str
    lengths: Sequence[int]
    arguments: Mapping[str, Any] = field(default_factory=dict)


PARITY_CASES: Final = (
    ParityCase("greedy, 1 prompt", (12,)),
    ParityCase("greedy, ragged batch padded at the left", (3, 12, 7, 20)),
    ParityCase("beams 4", (9, 14), {"num_beams": 4}),
    # Both draw in the order of torch's generator, so the same seed gives the same tokens.
    ParityCase("sampling after the same torch.manual_seed", (9, 14), {"do_sample": True, "top_k": 20}),
    # Prompts of one length: the processors of transformers count padding as text.
    ParityCase("repetition_penalty", (12, 12), {"repetition_penalty": 1.3}),
    ParityCase("no_repeat_ngram_size", (12, 12), {"no_repeat_ngram_size": 2}),
    ParityCase("min_length", (12, 12), {"min_length": 20}),
    ParityCase("prompt lookup, 1 prompt", (24,), {"prompt_lookup_num_tokens": 4}),
)
HALF_CASES: Final = PARITY_CASES[:3]


def run_parity(subject: Subject, new_tokens: int, progress: Callable[[str], None]) -> Iterator[CheckRow]:
    """The result of every case on a model."""
    for case in PARITY_CASES:
        progress(f"parity, {subject.name}: {case.name}")
        yield run_check(subject.name, case.name, partial(_check, subject, case, new_tokens))


def run_half(subject: Subject, new_tokens: int, progress: Callable[[str], None]) -> Iterator[ShareRow]:
    """The share of equal tokens of a few cases in each half precision."""
    for dtype in HALF_DTYPES:
        progress(f"half precision, {subject.name}: {dtype}")
        try:
            model = subject.load(dtype)
        except Exception as error:  # a device without this dtype, or without the memory
            yield ShareRow(subject.name, "load", dtype, None, _failure(error))
            continue
        for case in HALF_CASES:
            try:
                ours, theirs = _run_both(model, case, new_tokens)
            except Exception as error:  # a kernel that is missing in this dtype
                yield ShareRow(subject.name, case.name, dtype, None, _failure(error))
                continue
            yield ShareRow(subject.name, case.name, dtype, float((ours == theirs).double().mean()))
        del model


def pad_token(model: Any) -> int:
    """The token of padding: the model's own, else its first end token, else 0."""
    config = model.generation_config
    ids = (*as_id_list(config.pad_token_id), *as_id_list(config.eos_token_id), 0)
    return int(ids[0])


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings and no messages of transformers in a block."""
    with warnings.catch_warnings(), silence_transformers():
        warnings.simplefilter("ignore")
        yield


def _check(subject: Subject, case: ParityCase, new_tokens: int) -> str:
    """Raise AssertionError unless both give the same tokens; in half precision, return their share."""
    model = subject.model
    if model.config.is_encoder_decoder:
        raise SkippedCheck("the prompts of the doctor are for models without an encoder")
    ours, theirs = _run_both(model, case, new_tokens)
    if torch.equal(ours, theirs):
        return ""
    if subject.is_half:
        return f"{float((ours == theirs).double().mean()):.3f} of the tokens are equal, in half precision"
    row, column = (int(index) for index in (ours != theirs).nonzero()[0])
    tokens = int(ours[row, column]), int(theirs[row, column])
    margin = _margin(model, case, theirs[row, :column], row, tokens)
    raise AssertionError(
        f"row {row} differs from new token {column} on: {tokens[0]}, transformers {tokens[1]}, whose logits "
        f"differ by {margin:.2g}"
    )


def _run_both(model: Any, case: ParityCase, new_tokens: int) -> tuple[Tensor, Tensor]:
    """The new tokens [B, T] of Descant and of transformers, padded to one length (host)."""
    pad = pad_token(model)
    prompts = PaddedPrompts.of(token_prompts(model, case.lengths), model, pad)
    arguments = {"do_sample": False, "max_new_tokens": new_tokens, "pad_token_id": pad, **case.arguments}
    inputs = {"input_ids": prompts.ids, "attention_mask": prompts.mask}
    ours: Any = partial(generate, model)
    found = []
    for call in (ours, model.generate):
        torch.manual_seed(_SEED)
        try:
            with quiet():
                whole = call(**inputs, **arguments)
        except Exception as error:
            if call is ours:
                raise
            version = metadata.version("transformers")
            raise SkippedCheck(f"transformers {version} raises {_failure(error)}") from None
        new = whole[:, prompts.ids.shape[1] :].cpu()
        rest = new.new_full((len(new), new_tokens - new.shape[1]), pad)
        found.append(torch.cat((new, rest), 1))
    return found[0], found[1]


@torch.no_grad()
def _margin(model: Any, case: ParityCase, new: Tensor, row: int, tokens: tuple[int, int]) -> float:
    """How far the model's logits of two tokens are apart after a row's prompt and these new tokens."""
    prompt = token_prompts(model, case.lengths)[row]
    ids = torch.tensor([[*prompt, *new.tolist()]], device=model.device)
    logits = model(input_ids=ids).logits[0, -1].float()
    return abs(float(logits[tokens[0]] - logits[tokens[1]]))


def _failure(error: Exception) -> str:
    return one_line(f"{type(error).__name__}: {error}", 200)
