"""The trial of one architecture: transformers' own generate(), then ours, then the differences."""

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
from descant.models.forward.traits import traits_of
from tools.sweep.catalogue import TEXT
from tools.sweep.subject import Entry, Subject

__all__ = ["BEAMS", "NEW", "Differs", "ModelOutput", "blank", "check_equal", "subject_of", "trial"]

NEW = 10  # new tokens
BEAMS = 4
_TOLERANCE = 1e-4  # of a logit, relative to the largest
_LINES = 12  # of a traceback, kept
_REFUSALS = (descant.UnsupportedModel, descant.InputError, descant.NotInThisVersion)

Stage = Callable[[str], None]


class Differs(Exception):
    """A check that failed: its name and the first difference."""


class ModelOutput(NamedTuple):
    """The output of a model: tokens [B, L], and the logits of each step [T, B, V] if returned.

    A model that predicts latents has one logit a step [T, B], and its tokens are placeholders.
    """

    tokens: Tensor
    logits: Tensor | None = None
    latents: Tensor | None = None  # [B, T, D], of such a model


class Reference(NamedTuple):
    """The output of transformers' own generate() by prompt; `beam` is empty where its beam search fails."""

    greedy: list[ModelOutput]
    beam: Sequence[ModelOutput | None]
    error: str = ""  # of beam search with a cache


def blank(entry: Entry) -> dict[str, Any]:
    """The initial record of an architecture."""
    nothing = {"status": "not tried", "reason": "", "note": "", "beam": "not compared", "facts": None}
    return {**entry._asdict(), **nothing, "reference_beam": ""}


def trial(entry: Entry, stage: Stage = lambda _: None) -> dict[str, Any]:
    """Try one architecture; a record of plain data.

    `stage` is called with the name of each stage, so that the parent can report where a process died.
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
        record["facts"] = _jsonable(dataclasses.asdict(traits_of(subject.model)))
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
    # Import only the module of this half of the catalogue.
    module = importlib.import_module("tools.sweep.text" if entry.task in TEXT else "tools.sweep.media")
    subject: Subject = module.subject(entry)
    return subject


def _reference(subject: Subject) -> Reference:
    own = functools.partial(subject.model.generate, **subject.reference_options)
    greedy = [_run(own, subject, prompt) for prompt in subject.prompts]
    for output in greedy:
        if output.logits is not None and bool(output.logits.isnan().any()):
            raise FloatingPointError("transformers' own logits are not numbers")
    try:
        beam = [_run(own, subject, prompt, BEAMS) for prompt in subject.prompts]
    except Exception as error:
        plain = [_uncached(subject, prompt) for prompt in subject.prompts]
        return Reference(greedy, plain, _headline(error))
    return Reference(greedy, beam)


def _compare(subject: Subject, reference: Reference) -> str:
    """How beams were compared; raises Differs at the first check that fails."""

    def ours(prompt: dict[str, Tensor], beams: int = 1, **fields: Any) -> ModelOutput:
        return _run(
            lambda **inputs: descant.generate(subject.model, **inputs, **fields), subject, prompt, beams
        )

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
        check_equal(f"greedy, prompt {index}", reference.greedy[index], greedy[-1])
    traits = traits_of(subject.model)
    if traits.cache_type == "kv" and traits.supports_custom_mask and any(traits.sliding_windows.values()):
        windowed = ours(subject.prompts[-1], cache_implementation="hybrid")
        check_equal("greedy on a hybrid cache, the last prompt", reference.greedy[-1], windowed)
    for index, expected in enumerate(reference.beam if any(reference.beam) else ()):
        beam.append(ours(subject.prompts[index], BEAMS))
        if expected is not None and not _compare_beams(subject, index, expected, beam[-1]):
            how = "compared without a cache"
    if subject.batch is not None:
        _compare_rows("greedy batch", subject, greedy, ours(subject.batch))
        if beam:
            _compare_rows("beams batch", subject, beam, ours(subject.batch, BEAMS))
    return how


def _compare_beams(subject: Subject, index: int, expected: ModelOutput, got: ModelOutput) -> bool:
    """Whether beams equal those of transformers with a cache; if that is wrong, compare without a cache."""
    check = f"beams, prompt {index}"
    try:
        check_equal(check, expected, got)
    except Differs:
        plain = _uncached(subject, subject.prompts[index])
        if plain is None or torch.equal(plain.tokens, expected.tokens):
            raise
        check_equal(f"{check}, without a cache", plain, got)
        return False
    return True


def _uncached(subject: Subject, prompt: dict[str, Tensor]) -> ModelOutput | None:
    """The output of transformers' own beam search without a cache, None if it fails."""
    call = functools.partial(subject.model.generate, use_cache=False)
    try:
        return _run(call, subject, prompt, BEAMS)
    except Exception:  # the second comparison is optional
        return None


def _compare_rows(check: str, subject: Subject, singles: Sequence[ModelOutput], joint: ModelOutput) -> None:
    """Compare the rows of a batch with the same prompts alone; shorter rows end in padding."""
    for index, single in enumerate(singles):
        start = _prompt_columns(subject, subject.batch)
        row = joint.tokens[index : index + 1, start:]
        alone = single.tokens[:, _prompt_columns(subject, subject.prompts[index]) :]
        has_latents = joint.latents is not None
        ended = "audio_latent_token_id" if has_latents else "pad_token_id"  # the token of an ended row
        settings = subject.model.config if has_latents else subject.model.generation_config
        pad = torch.full_like(row, getattr(settings, ended) or 0)
        pad[:, : alone.shape[1]] = alone[:, : row.shape[1]]
        logits = None
        if joint.logits is not None and single.logits is not None:
            rows = single.logits.shape[1]  # several where a sequence has codebooks
            logits = joint.logits[: len(single.logits), index * rows : (index + 1) * rows]
        expected, latents = single.latents, None
        if joint.latents is not None and expected is not None:
            latents = joint.latents[index : index + 1]
            rest = latents.shape[1] - expected.shape[1]
            expected = torch.nn.functional.pad(expected, (0, 0, 0, rest))
        check_equal(
            f"{check}, row {index}",
            ModelOutput(pad, single.logits, expected),
            ModelOutput(row, logits, latents),
        )


def _prompt_columns(subject: Subject, inputs: dict[str, Tensor] | None) -> int:
    """The number of prompt columns in the output."""
    if subject.model.config.is_encoder_decoder or inputs is None or "input_ids" not in inputs:
        return 0
    return int(inputs["input_ids"].shape[-1])


def check_equal(check: str, expected: ModelOutput, got: ModelOutput) -> None:
    """Raise Differs unless tokens are equal, and logits and latents about equal."""
    if expected.tokens.shape != got.tokens.shape:
        shapes = f"{list(expected.tokens.shape)} expected, got {list(got.tokens.shape)}"
        raise Differs(f"{check}: shape of the sequences, {shapes}")
    mismatches = (~_are_equal(expected.tokens, got.tokens)).nonzero()
    if len(mismatches):
        where = tuple(int(index) for index in mismatches[0])
        tokens = f"{expected.tokens[where].item()} expected, got {got.tokens[where].item()}"
        raise Differs(f"{check}: token at {list(where)}, {tokens}{_gap(expected, got)}")
    difference = _logit_difference(expected, got)
    if difference is not None:
        step, distance, tolerance = difference
        if distance > tolerance:
            raise Differs(f"{check}: logits of step {step} by {distance:.2e} (tolerance {tolerance:.1e})")
    if expected.latents is not None:
        _check_latents(check, expected.latents, got.latents)


def _check_latents(check: str, expected: Tensor, got: Tensor | None) -> None:
    """Raise Differs unless latents are about equal."""
    if got is None or got.shape != expected.shape:
        shape = None if got is None else list(got.shape)
        raise Differs(f"{check}: shape of the latents, {list(expected.shape)} expected, got {shape}")
    distance, tolerance = float((expected - got).abs().max()), _TOLERANCE * float(expected.abs().max())
    if not distance <= tolerance:
        raise Differs(f"{check}: latents by {distance:.2e} (tolerance {tolerance:.1e})")


def _are_equal(expected: Tensor, got: Tensor) -> Tensor:
    """Which tokens are equal; sound is equal up to rounding."""
    if not expected.is_floating_point():
        return expected == got
    return torch.isclose(expected, got, atol=_TOLERANCE * max(1.0, float(expected.abs().max())))


def _logit_difference(expected: ModelOutput, got: ModelOutput) -> tuple[int, float, float] | None:
    """The first step whose logits exceed the tolerance, else the worst: step, difference, tolerance."""
    if expected.logits is None or got.logits is None:
        return None
    steps = min(len(expected.logits), len(got.logits))
    left, right = expected.logits[:steps].double(), got.logits[:steps].double()
    finite = left.isfinite()
    if bool((finite != right.isfinite()).any()):
        return int((finite != right.isfinite()).flatten(1).any(1).nonzero()[0]), float("inf"), 0.0
    left, right = left.where(finite, 0), right.where(finite, 0)
    tolerance = _TOLERANCE * max(1.0, float(left.abs().max()))
    differences = (left - right).abs().flatten(1).amax(1)  # [T]
    beyond = (differences > tolerance).nonzero()
    step = int(beyond[0]) if len(beyond) else int(differences.argmax())
    return step, float(differences[step]), tolerance


def _gap(expected: ModelOutput, got: ModelOutput) -> str:
    difference = _logit_difference(expected, got)
    return "" if difference is None else f" (logits of step {difference[0]} by {difference[1]:.2e})"


def _run(
    call: Callable[..., Any], subject: Subject, prompt: Mapping[str, Any], beams: int = 1
) -> ModelOutput:
    # Models may write into their inputs; the next call needs the originals.
    inputs = {name: value.clone() if isinstance(value, Tensor) else value for name, value in prompt.items()}
    options: dict[str, Any] = {
        "max_new_tokens": NEW,
        "do_sample": False,
        "num_beams": beams,
        **subject.options,
    }
    if beams == 1:
        options = {"output_logits": True, "return_dict_in_generate": True, **options}
    options = {name: value for name, value in options.items() if value is not None}
    torch.manual_seed(0)  # a few models draw numbers in their forward
    with torch.no_grad():
        answer = call(**inputs, **options)
    tokens = answer if isinstance(answer, Tensor) else answer.sequences
    # A model may store arguments of the last call on its config (Pop2Piano does).
    logits = getattr(answer, "logits", None) if beams == 1 else None
    stacked = torch.stack([step.float() for step in logits]) if logits else None
    return ModelOutput(tokens, stacked, getattr(answer, "audio_latents", None))


def _jsonable(value: Any) -> Any:
    """Data as JSON types; other values as text."""
    if isinstance(value, dict):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_jsonable(item) for item in value]
    plain = value is None or isinstance(value, str | int | float)
    return value if plain else str(value)


def _headline(error: BaseException) -> str:
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first}"[:300]


def _tail(error: BaseException) -> list[str]:
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    return lines[-_LINES:]
