"""One architecture tried: transformers' own generate() first, then ours, then what differs."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import descant
from descant.models.traits import traits_of
from tools.sweep.catalogue import TEXT
from tools.sweep.subject import Entry, Subject

__all__ = ["BEAMS", "NEW", "Differs", "blank", "compared", "subject_of", "trial"]

NEW = 10  # tokens asked for
BEAMS = 4
_TOLERANCE = 1e-4  # of a logit, times the largest there is
_LINES = 12  # of a traceback, kept
_REFUSALS = (descant.UnsupportedModel, descant.InputError, descant.NotInThisVersion)

Stage = Callable[[str], None]


class Differs(Exception):
    """A check that failed: its name and the first difference."""


class Said(NamedTuple):
    """What a model said: tokens [B, L], and the logits of each step [T, B, V] where they were given."""

    tokens: Tensor
    logits: Tensor | None = None


class Reference(NamedTuple):
    """What transformers' own generate() says, prompt by prompt; `beam` is empty where it cannot search."""

    greedy: list[Said]
    beam: Sequence[Said | None]
    error: str = ""  # of a search with a cache


def blank(entry: Entry) -> dict[str, Any]:
    """The record of an architecture about which nothing is known yet."""
    nothing = {"status": "not tried", "reason": "", "note": "", "beam": "not compared", "facts": None}
    return {**entry._asdict(), **nothing, "reference_beam": ""}


def trial(entry: Entry, stage: Stage = lambda _: None) -> dict[str, Any]:
    """Try one architecture; a record of plain data.

    `stage` is told what is about to be done, for whoever has to say where a process died.
    """
    record = blank(entry)
    clock = _Clock(record)
    try:
        stage("build")
        subject = subject_of(entry)
        clock.lap("build")
        stage("reference")
        reference = _reference(subject)
    except Exception as error:
        clock.lap("reference")
        return record | {"reason": _headline(error), "traceback": _tail(error)}
    clock.lap("reference")
    record |= {"note": subject.note, "reference_beam": reference.error}
    stage("descant")
    try:
        record["facts"] = _plain(dataclasses.asdict(traits_of(subject.model)))
        record["beam"] = _compare(subject, reference)
        record["status"] = "works"
    except _REFUSALS as error:
        record |= {"status": "refused", "reason": str(error)}
    except Differs as error:
        record |= {"status": "differs", "reason": str(error)}
    except Exception as error:
        record |= {"status": "fails", "reason": _headline(error), "traceback": _tail(error)}
    clock.lap("descant")
    return record


class _Clock:
    """CPU seconds of each part of a trial, written into its record."""

    def __init__(self, record: dict[str, Any]) -> None:
        self._seconds: dict[str, float] = record.setdefault("seconds", {})
        self._last = time.process_time()

    def lap(self, part: str) -> None:
        now = time.process_time()
        self._seconds[part] = round(now - self._last, 3)
        self._last = now


def subject_of(entry: Entry) -> Subject:
    """The tiny model of an architecture and its prompts."""
    # Each half of the catalogue only pays for its own imports.
    module = importlib.import_module("tools.sweep.text" if entry.task in TEXT else "tools.sweep.media")
    subject: Subject = module.subject(entry)
    return subject


def _reference(subject: Subject) -> Reference:
    own = subject.model.generate
    greedy = [_said(own, subject, prompt) for prompt in subject.prompts]
    for said in greedy:
        if said.logits is not None and bool(said.logits.isnan().any()):
            raise FloatingPointError("transformers' own logits are not numbers")
    try:
        beam = [_said(own, subject, prompt, BEAMS) for prompt in subject.prompts]
    except Exception as error:
        plain = [_uncached(subject, prompt) for prompt in subject.prompts]
        return Reference(greedy, plain, _headline(error))
    return Reference(greedy, beam)


def _compare(subject: Subject, reference: Reference) -> str:
    """How beams were compared; raises Differs at the first check that fails."""

    def ours(prompt: dict[str, Tensor], beams: int = 1) -> Said:
        return _said(lambda **given: descant.generate(subject.model, **given), subject, prompt, beams)

    greedy, beam = [], []
    how = (
        "not compared"
        if not any(reference.beam)
        else "compared without a cache"
        if reference.error
        else "compared"
    )
    for index, prompt in enumerate(subject.prompts):
        greedy.append(ours(prompt))
        compared(f"greedy, prompt {index}", reference.greedy[index], greedy[-1])
    for index, expected in enumerate(reference.beam if any(reference.beam) else ()):
        beam.append(ours(subject.prompts[index], BEAMS))
        if expected is not None and not _compare_beams(subject, index, expected, beam[-1]):
            how = "compared without a cache"
    if subject.batch is not None:
        _compare_rows("greedy batch", subject, greedy, ours(subject.batch))
        if beam:
            _compare_rows("beams batch", subject, beam, ours(subject.batch, BEAMS))
    return how


def _compare_beams(subject: Subject, index: int, expected: Said, got: Said) -> bool:
    """Whether a search equals transformers' own; where its cache leads that astray, the one without."""
    check = f"beams, prompt {index}"
    try:
        compared(check, expected, got)
    except Differs:
        plain = _uncached(subject, subject.prompts[index])
        if plain is None or torch.equal(plain.tokens, expected.tokens):
            raise
        compared(f"{check}, without a cache", plain, got)
        return False
    return True


def _uncached(subject: Subject, prompt: dict[str, Tensor]) -> Said | None:
    """What transformers' own beam search says when it computes everything anew at each step, if it can."""
    call = functools.partial(subject.model.generate, use_cache=False)
    try:
        return _said(call, subject, prompt, BEAMS)
    except Exception:  # a second opinion, and nothing depends on there being one
        return None


def _compare_rows(check: str, subject: Subject, singles: Sequence[Said], joint: Said) -> None:
    """Rows of a batch say what they say alone; what is left of a shorter one is padding."""
    for index, single in enumerate(singles):
        start = _prompted(subject, subject.batch)
        row = joint.tokens[index : index + 1, start:]
        alone = single.tokens[:, _prompted(subject, subject.prompts[index]) :]
        pad = torch.full_like(row, subject.model.generation_config.pad_token_id or 0)
        pad[:, : alone.shape[1]] = alone[:, : row.shape[1]]
        logits = None
        if joint.logits is not None and single.logits is not None:
            logits = joint.logits[: len(single.logits), index : index + 1]
        compared(f"{check}, row {index}", Said(pad, single.logits), Said(row, logits))


def _prompted(subject: Subject, inputs: dict[str, Tensor] | None) -> int:
    """How many columns of what comes out are the prompt."""
    if subject.model.config.is_encoder_decoder or inputs is None or "input_ids" not in inputs:
        return 0
    return int(inputs["input_ids"].shape[-1])


def compared(check: str, expected: Said, got: Said) -> None:
    """Raise Differs unless tokens are equal and logits about equal."""
    if expected.tokens.shape != got.tokens.shape:
        shapes = f"{list(expected.tokens.shape)} expected, got {list(got.tokens.shape)}"
        raise Differs(f"{check}: shape of the sequences, {shapes}")
    wrong = (expected.tokens != got.tokens).nonzero()
    if len(wrong):
        where = tuple(int(index) for index in wrong[0])
        tokens = f"{int(expected.tokens[where])} expected, got {int(got.tokens[where])}"
        raise Differs(f"{check}: token at {list(where)}, {tokens}{_gap(expected, got)}")
    off = _off(expected, got)
    if off is not None and off[1] > off[2]:
        raise Differs(f"{check}: logits of step {off[0]} by {off[1]:.2e} (tolerance {off[2]:.1e})")


def _off(expected: Said, got: Said) -> tuple[int, float, float] | None:
    """The first step whose logits are too far off, or the one furthest off: it, how far, the tolerance."""
    if expected.logits is None or got.logits is None:
        return None
    steps = min(len(expected.logits), len(got.logits))
    left, right = expected.logits[:steps].double(), got.logits[:steps].double()
    finite = left.isfinite()
    if bool((finite != right.isfinite()).any()):
        return int((finite != right.isfinite()).flatten(1).any(1).nonzero()[0]), float("inf"), 0.0
    left, right = left.where(finite, 0), right.where(finite, 0)
    tolerance = _TOLERANCE * max(1.0, float(left.abs().max()))
    far = (left - right).abs().flatten(1).amax(1)  # [T]
    beyond = (far > tolerance).nonzero()
    step = int(beyond[0]) if len(beyond) else int(far.argmax())
    return step, float(far[step]), tolerance


def _gap(expected: Said, got: Said) -> str:
    off = _off(expected, got)
    return "" if off is None else f" (logits of step {off[0]} by {off[1]:.2e})"


def _said(call: Callable[..., Any], subject: Subject, prompt: Mapping[str, Any], beams: int = 1) -> Said:
    # Models may write into what they are given; the next call must find it as it was.
    given = {name: value.clone() if isinstance(value, Tensor) else value for name, value in prompt.items()}
    asked: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "num_beams": beams, **subject.options}
    if beams == 1:
        asked = {"output_logits": True, "return_dict_in_generate": True, **asked}
    asked = {name: value for name, value in asked.items() if value is not None}
    torch.manual_seed(0)  # a few models draw numbers in their forward
    with torch.no_grad():
        answer = call(**given, **asked)
    tokens = answer if isinstance(answer, Tensor) else answer.sequences
    # A model may have noted on its own config what the last call asked for (Pop2Piano does).
    logits = getattr(answer, "logits", None) if beams == 1 else None
    return Said(tokens, torch.stack([step.float() for step in logits]) if logits else None)


def _plain(value: Any) -> Any:
    """Data as JSON has it; what it has not, as text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    plain = value is None or isinstance(value, str | int | float)
    return value if plain else str(value)


def _headline(error: BaseException) -> str:
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first}"[:300]


def _tail(error: BaseException) -> list[str]:
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    return lines[-_LINES:]
