"""A slice of the laws of `descant.testing` on a model of this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from descant.cli.doctor.report import FAILED, PASSED, SKIPPED, CheckRow, one_line
from descant.cli.doctor.subject import LAW_LENGTHS, Subject, token_prompts
from descant.config.generation_config import GenerationConfig
from descant.engine.planner import as_model
from descant.engine.session import Request
from descant.errors import UnsupportedModel
from descant.kv_cache.dense import DenseStore
from descant.kv_cache.paged import PagedStore
from descant.kv_cache.static import StaticStore
from descant.models.fast_paths import fast_paths
from descant.models.layer_compilation import compile_layers
from descant.models.prepacked_weights import prepack_weights, unprepackable_reason
from descant.testing import (
    check_admission,
    check_batch,
    check_drafts,
    check_generation,
    check_schedule,
    check_seed,
    compare,
    outcomes,
)

__all__ = ["LAWS", "Law", "LawSize", "SkippedCheck", "run_check", "run_laws"]

_STATIC_CAPACITY: Final = 64
_NUM_PACKED_ROWS, _PACKED_LENGTH = 24, 345  # enough that decode steps of the tiny model are packed, too


class SkippedCheck(Exception):
    """A check that does not apply, with the reason."""


@dataclass(frozen=True)
class LawSize:
    """How much of a law is run."""

    new_tokens: int = 10
    schedules: int = 2
    is_quick: bool = False

    @classmethod
    def quick(cls) -> LawSize:
        """A few seconds for a tiny model; a model of the user runs some laws only."""
        return cls(new_tokens=5, schedules=1, is_quick=True)


Law = Callable[[Subject, LawSize], None]


def run_laws(subject: Subject, size: LawSize, progress: Callable[[str], None]) -> Iterator[CheckRow]:
    """The result of every law on a model."""
    for name, law in LAWS.items():
        progress(f"laws, {subject.name}: {name}")
        is_left_out = size.is_quick and subject.folder is not None and name not in _QUICK_LAWS
        yield run_check(subject.name, name, partial(_run, _leave_out if is_left_out else law, subject, size))


def run_check(model: str, name: str, check: Callable[[], str | None]) -> CheckRow:
    """Run a check, which may return a detail; what it raises is its result."""
    start = time.perf_counter()
    try:
        status, detail = PASSED, check() or ""
    except (SkippedCheck, UnsupportedModel) as error:
        status, detail = SKIPPED, str(error)
    except AssertionError as error:
        status, detail = FAILED, str(error)
    except Exception as error:  # whatever a device, a driver or a library raises belongs into the report
        status, detail = FAILED, f"{type(error).__name__}: {error}"
    return CheckRow(model, name, status, one_line(detail), round(time.perf_counter() - start, 3))


def _run(law: Law, subject: Subject, size: LawSize) -> None:
    if subject.is_half:
        raise SkippedCheck("the laws hold in float32; in half precision sums depend on the batch")
    if subject.model.config.is_encoder_decoder:
        raise SkippedCheck("the prompts of the doctor are for models without an encoder")
    law(subject, size)


# ------------------------------------------------------------------------ requests
def _greedy(subject: Subject, size: LawSize, **fields: Any) -> list[Request]:
    """Greedy requests with prompts of different lengths."""
    values = {"max_new_tokens": size.new_tokens, "do_sample": False, **fields}
    return [
        Request(prompt, GenerationConfig(**values)) for prompt in token_prompts(subject.model, LAW_LENGTHS)
    ]


def _mixed(subject: Subject, size: LawSize) -> list[Request]:
    """Requests with different methods: greedy, sampling, beams and processors."""
    methods: list[dict[str, Any]] = [
        {},
        {"do_sample": True, "seed": 7, "top_k": 20, "temperature": 0.9},
        {"num_beams": 3},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    ]
    return [
        replace(one, generation_config=one.generation_config.replace(**fields))
        for one, fields in zip(_greedy(subject, size), methods, strict=True)
    ]


# ------------------------------------------------------------------------ laws
def _leave_out(*_: object) -> None:
    raise SkippedCheck("left out by --quick")


def _batch(subject: Subject, size: LawSize) -> None:
    check_batch(subject.model, _mixed(subject, size), subject.tolerance)


def _admission(subject: Subject, size: LawSize) -> None:
    requests = _mixed(subject, size)
    check_admission(subject.model, requests, size.schedules, tolerance=subject.tolerance)


def _schedule(subject: Subject, size: LawSize) -> None:
    check_schedule(subject.model, _mixed(subject, size), size.schedules, tolerance=subject.tolerance)


def _seed(subject: Subject, size: LawSize) -> None:
    check_seed(subject.model, _mixed(subject, size), size.schedules, subject.tolerance)


def _drafts(subject: Subject, size: LawSize) -> None:
    _require_kv(subject, "drafts are verified on a KV cache")
    plain = outcomes(subject.model, _greedy(subject, size))
    drafted = outcomes(subject.model, _greedy(subject, size, prompt_lookup_num_tokens=4))
    for index, (one, other) in enumerate(zip(plain, drafted, strict=True)):
        # Verification skips positions, so that it has fewer logits.
        compare(replace(one, logits={}), replace(other, logits={}), f"request {index} with drafts")


def _verification(subject: Subject, size: LawSize) -> None:
    _require_kv(subject, "drafts are verified on a KV cache")
    requests = _greedy(subject, size)[: size.schedules + 1]
    check_drafts(subject.model, requests, rounds=size.schedules, tolerance=subject.tolerance)


def _cache_law(make: Callable[[], Any]) -> Law:
    def check(subject: Subject, size: LawSize) -> None:
        _require_kv(subject, "the model has no KV cache")
        requests = _mixed(subject, size)
        check_generation(make, subject.model, requests, size.schedules, subject.tolerance)

    return check


def _packed(subject: Subject, size: LawSize) -> None:
    model = subject.model
    path = next(one for one in fast_paths(model) if one.name == "packed forwards")
    if not path.is_on:
        raise SkippedCheck(path.detail)
    num_rows, longest = (_NUM_PACKED_ROWS, _PACKED_LENGTH) if subject.folder is None else (4, 30)
    lengths = [longest - 2 * row for row in range(num_rows)]
    config = GenerationConfig(max_new_tokens=size.new_tokens, do_sample=False)
    requests = [Request(prompt, config) for prompt in token_prompts(model, lengths)]
    packed = outcomes(model, requests)
    with _unpacked(model):
        padded = outcomes(model, requests)
    _compare_all(padded, packed, "packed", subject.tolerance)


def _prepacked(subject: Subject, size: LawSize) -> None:
    model = subject.model
    if reason := unprepackable_reason(model):
        raise SkippedCheck(reason)
    requests = _greedy(subject, size)
    plain = outcomes(model, requests)
    with prepack_weights(model):
        prepacked = outcomes(model, requests)
    _compare_all(plain, prepacked, "with prepacked weights", subject.tolerance)


def _compiled(subject: Subject, size: LawSize) -> None:
    if subject.model.device.type != "cuda":
        raise SkippedCheck("the step is compiled by default on CUDA only")
    plain = outcomes(subject.model, _greedy(subject, size))
    requests = _greedy(subject, size, cache_implementation="static")
    _compare_all(plain, outcomes(subject.model, requests), "with a compiled step", subject.tolerance)


def _compiled_layers(subject: Subject, size: LawSize) -> None:
    if size.is_quick:
        raise SkippedCheck("left out by --quick: layers take seconds to compile")
    requests = _greedy(subject, size)
    plain = outcomes(subject.model, requests)
    with compile_layers(subject.model):
        compiled = outcomes(subject.model, requests)
    _compare_all(plain, compiled, "with compiled layers", subject.tolerance)


def _compare_all(plain: Sequence[Any], other: Sequence[Any], label: str, tolerance: float) -> None:
    for index, (one, two) in enumerate(zip(plain, other, strict=True)):
        compare(one, two, f"request {index} {label}", tolerance)


def _require_kv(subject: Subject, reason: str) -> None:
    if as_model(subject.model).traits.cache_type != "kv":
        raise SkippedCheck(reason)


@contextmanager
def _unpacked(model: Any) -> Iterator[None]:
    """Turn off packed forwards in a block."""
    model.packed_forwards = False
    try:
        yield
    finally:
        del model.packed_forwards


LAWS: Final[Mapping[str, Law]] = {
    "a batch of N is N batches of 1, in any order": _batch,
    "admission at any step, beside requests that fail": _admission,
    "budgets, chunks and preemption": _schedule,
    "seeded sampling": _seed,
    "drafts leave greedy search unchanged": _drafts,
    "drafts verified at once are verified one by one": _verification,
    "dense cache": _cache_law(DenseStore),
    "paged cache": _cache_law(PagedStore),
    "static cache": _cache_law(lambda: StaticStore(_STATIC_CAPACITY)),
    "packed forwards": _packed,
    "prepacked weights": _prepacked,
    "compiled layers": _compiled_layers,
    "compiled step": _compiled,
}
# Of a model of the user, the laws that cover most in least time.
_QUICK_LAWS: Final = frozenset({
    "a batch of N is N batches of 1, in any order", "drafts leave greedy search unchanged", "packed forwards",
})  # fmt: skip
