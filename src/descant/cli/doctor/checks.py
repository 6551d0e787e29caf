"""The checks of the doctor on a model: its fast paths, the laws, and parity with transformers."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from typing import Any, Final

import torch
from torch import Tensor

from descant.api.generate import generate
from descant.cli.doctor.report import FAILED, PASSED, SKIPPED, CheckRow, FastPathRow, ShareRow, one_line
from descant.config.generation_config import GenerationConfig
from descant.decoding.processors.base import as_id_list
from descant.engine.planning.planner import as_model
from descant.engine.session import Request, Session
from descant.errors import UnsupportedModel
from descant.kv_cache.stores.dense import DenseStore, StaticStore
from descant.kv_cache.stores.paged import PagedStore
from descant.models.fast.products import prepack_weights, unprepackable_reason
from descant.models.fast_paths import compile_layers, fast_paths
from descant.models.loading.loading import load, silence_transformers
from descant.models.loading.tiny_llama import toy
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

LAW_LENGTHS: Final = (3, 17, 9, 30)  # of the prompts of most laws
_MIN_TOLERANCE: Final = 1e-4
_NUM_ROUNDINGS: Final = 4  # that may add up in a comparison


@dataclass(frozen=True)
class CheckedModel:
    """A model, how to load it in another dtype, and how far rounding changes its logits."""

    name: str
    model: Any
    load: Callable[[str], Any]  # by the name of a dtype
    rounding: float | None = None  # None: unknown
    folder: str | None = None  # or a name on the Hub; None: the tiny model, which has none

    @property
    def tolerance(self) -> float:
        """The most that logits may differ by in a law."""
        return max(_MIN_TOLERANCE, _NUM_ROUNDINGS * (self.rounding or 0.0))

    @property
    def is_half(self) -> bool:
        """Whether its weights are in half precision, for which no law is promised."""
        return self.model.dtype in (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class PaddedPrompts:
    """Prompts of one call, padded at the left."""

    ids: Tensor  # [B, L]
    mask: Tensor  # [B, L] 1 where an id is real

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], model: Any, pad: int) -> PaddedPrompts:
        """Prompts of any lengths on the device of a model."""
        width = max(map(len, prompts))
        ids = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        real = torch.tensor([len(prompt) for prompt in prompts])[:, None]
        mask = (torch.arange(width) >= width - real).long()
        return cls(ids.to(model.device), mask.to(model.device))


def token_prompts(model: Any, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Prompts of random tokens of these lengths, none of them special; the second half repeats the first."""
    config = model.generation_config
    special = {0, 1, 2}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        special.update(as_id_list(getattr(config, name, None)))
    rng, size = random.Random(seed), model.config.get_text_config(decoder=True).vocab_size
    prompts = []
    for length in lengths:
        half: list[int] = []
        while len(half) < (length + 1) // 2:
            token = rng.randrange(size)
            half += [] if token in special else [token]
        prompts.append((half * 2)[:length])
    return prompts


@torch.no_grad()
def logit_rounding(model: Any) -> float:
    """The difference of the logits after a prompt between plain forwards of a model: alone, padded, repeated.

    No part of Descant is used, so this is what the laws cannot ask to be smaller.
    """
    if model.config.is_encoder_decoder:
        return 0.0
    largest, width = 0.0, max(LAW_LENGTHS)
    for prompt in token_prompts(model, LAW_LENGTHS):
        ids = torch.tensor([prompt], device=model.device)
        padded = torch.tensor([prompt + prompt[:1] * (width - len(prompt))], device=model.device)
        alone = model(input_ids=ids).logits[0, -1].float()
        for other in (ids.repeat(4, 1), padded):
            logits = model(input_ids=other).logits[0, len(prompt) - 1].float()
            largest = max(largest, float((logits - alone).abs().max()))
    return largest


_STATIC_CAPACITY: Final = 64
_NUM_PACKED_ROWS, _PACKED_LENGTH = 24, 345  # enough that decode steps of the tiny model are packed, too


class SkippedCheck(Exception):
    """A check that does not apply, with the reason."""


@dataclass(frozen=True)
class LawSize:
    """The size in which laws are run."""

    new_tokens: int = 10
    schedules: int = 2
    is_quick: bool = False

    @classmethod
    def quick(cls) -> LawSize:
        """A few seconds for a tiny model; a model of the user runs some laws only."""
        return cls(new_tokens=5, schedules=1, is_quick=True)


Law = Callable[[CheckedModel, LawSize], None]


def run_laws(checked: CheckedModel, size: LawSize, progress: Callable[[str], None]) -> Iterator[CheckRow]:
    """The result of every law on a model."""
    for name, law in LAWS.items():
        progress(f"laws, {checked.name}: {name}")
        is_left_out = size.is_quick and checked.folder is not None and name not in _QUICK_LAWS
        yield run_check(checked.name, name, partial(_run, _leave_out if is_left_out else law, checked, size))


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


def _run(law: Law, checked: CheckedModel, size: LawSize) -> None:
    if checked.is_half:
        raise SkippedCheck("the laws hold in float32; in half precision sums depend on the batch")
    if checked.model.config.is_encoder_decoder:
        raise SkippedCheck("the prompts of the doctor are for models without an encoder")
    law(checked, size)


# ------------------------------------------------------------------------ requests
def _greedy(checked: CheckedModel, size: LawSize, **fields: Any) -> list[Request]:
    """Greedy requests with prompts of different lengths."""
    values = {"max_new_tokens": size.new_tokens, "do_sample": False, **fields}
    return [
        Request(prompt, GenerationConfig(**values)) for prompt in token_prompts(checked.model, LAW_LENGTHS)
    ]


def _mixed(checked: CheckedModel, size: LawSize) -> list[Request]:
    """Requests with different methods: greedy, sampling, beams and processors."""
    methods: list[dict[str, Any]] = [
        {},
        {"do_sample": True, "seed": 7, "top_k": 20, "temperature": 0.9},
        {"num_beams": 3},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    ]
    return [
        replace(request, generation_config=request.generation_config.replace(**fields))
        for request, fields in zip(_greedy(checked, size), methods, strict=True)
    ]


# ------------------------------------------------------------------------ laws
def _leave_out(*_: object) -> None:
    raise SkippedCheck("left out by --quick")


def _batch(checked: CheckedModel, size: LawSize) -> None:
    check_batch(checked.model, _mixed(checked, size), checked.tolerance)


def _mixed_law(check: Callable[..., None]) -> Law:
    """A law on mixed requests, by the check of `descant.testing` that tries several schedules."""

    def law(checked: CheckedModel, size: LawSize) -> None:
        check(checked.model, _mixed(checked, size), size.schedules, tolerance=checked.tolerance)

    return law


def _drafts(checked: CheckedModel, size: LawSize) -> None:
    _require_kv(checked, "drafts are verified on a KV cache")
    plain = outcomes(checked.model, _greedy(checked, size))
    drafted = outcomes(checked.model, _greedy(checked, size, prompt_lookup_num_tokens=4))
    for index, (expected, other) in enumerate(zip(plain, drafted, strict=True)):
        # Verification skips positions, so that it has fewer logits.
        compare(replace(expected, logits={}), replace(other, logits={}), f"request {index} with drafts")


def _verification(checked: CheckedModel, size: LawSize) -> None:
    _require_kv(checked, "drafts are verified on a KV cache")
    requests = _greedy(checked, size)[: size.schedules + 1]
    check_drafts(checked.model, requests, rounds=size.schedules, tolerance=checked.tolerance)


def _cache_law(make: Callable[[], Any]) -> Law:
    law = _mixed_law(partial(check_generation, make))

    def check(checked: CheckedModel, size: LawSize) -> None:
        _require_kv(checked, "the model has no KV cache")
        law(checked, size)

    return check


def _packed(checked: CheckedModel, size: LawSize) -> None:
    model = checked.model
    path = next(path for path in fast_paths(model) if path.name == "packed forwards")
    if not path.is_on:
        raise SkippedCheck(path.detail)
    num_rows, longest = (_NUM_PACKED_ROWS, _PACKED_LENGTH) if checked.folder is None else (4, 30)
    lengths = [longest - 2 * row for row in range(num_rows)]
    config = GenerationConfig(max_new_tokens=size.new_tokens, do_sample=False)
    requests = [Request(prompt, config) for prompt in token_prompts(model, lengths)]
    packed = outcomes(model, requests)
    with _unpacked(model):
        padded = outcomes(model, requests)
    _compare_all(padded, packed, "packed", checked.tolerance)


def _prepacked(checked: CheckedModel, size: LawSize) -> None:
    model = checked.model
    if reason := unprepackable_reason(model):
        raise SkippedCheck(reason)
    requests = _greedy(checked, size)
    plain = outcomes(model, requests)
    with prepack_weights(model):
        prepacked = outcomes(model, requests)
    _compare_all(plain, prepacked, "with prepacked weights", checked.tolerance)


def _compiled(checked: CheckedModel, size: LawSize) -> None:
    if checked.model.device.type != "cuda":
        raise SkippedCheck("the step is compiled by default on CUDA only")
    plain = outcomes(checked.model, _greedy(checked, size))
    requests = _greedy(checked, size, cache_implementation="static")
    _compare_all(plain, outcomes(checked.model, requests), "with a compiled step", checked.tolerance)


def _compiled_layers(checked: CheckedModel, size: LawSize) -> None:
    if size.is_quick:
        raise SkippedCheck("left out by --quick: layers take seconds to compile")
    requests = _greedy(checked, size)
    plain = outcomes(checked.model, requests)
    with compile_layers(checked.model):
        compiled = outcomes(checked.model, requests)
    _compare_all(plain, compiled, "with compiled layers", checked.tolerance)


def _compare_all(plain: Sequence[Any], other: Sequence[Any], label: str, tolerance: float) -> None:
    for index, (expected, found) in enumerate(zip(plain, other, strict=True)):
        compare(expected, found, f"request {index} {label}", tolerance)


def _require_kv(checked: CheckedModel, reason: str) -> None:
    if as_model(checked.model).traits.cache_type != "kv":
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
    "admission at any step, beside requests that fail": _mixed_law(check_admission),
    "budgets, chunks and preemption": _mixed_law(check_schedule),
    "seeded sampling": _mixed_law(check_seed),
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


def run_parity(checked: CheckedModel, new_tokens: int, progress: Callable[[str], None]) -> Iterator[CheckRow]:
    """The result of every case on a model."""
    for case in PARITY_CASES:
        progress(f"parity, {checked.name}: {case.name}")
        yield run_check(checked.name, case.name, partial(_check, checked, case, new_tokens))


def run_half(checked: CheckedModel, new_tokens: int, progress: Callable[[str], None]) -> Iterator[ShareRow]:
    """The share of equal tokens of a few cases in each half precision."""
    for dtype in HALF_DTYPES:
        progress(f"half precision, {checked.name}: {dtype}")
        try:
            model = checked.load(dtype)
        except Exception as error:  # a device without this dtype, or without the memory
            yield ShareRow(checked.name, "load", dtype, None, _failure(error))
            continue
        for case in HALF_CASES:
            try:
                ours, theirs = _run_both(model, case, new_tokens)
            except Exception as error:  # a kernel that is missing in this dtype
                yield ShareRow(checked.name, case.name, dtype, None, _failure(error))
                continue
            yield ShareRow(checked.name, case.name, dtype, float((ours == theirs).double().mean()))
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


def _check(checked: CheckedModel, case: ParityCase, new_tokens: int) -> str:
    """Raise AssertionError unless both give the same tokens; in half precision, return their share."""
    model = checked.model
    if model.config.is_encoder_decoder:
        raise SkippedCheck("the prompts of the doctor are for models without an encoder")
    ours, theirs = _run_both(model, case, new_tokens)
    if torch.equal(ours, theirs):
        return ""
    if checked.is_half:
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
    """The distance of the model's logits of two tokens after a row's prompt and these new tokens."""
    prompt = token_prompts(model, case.lengths)[row]
    ids = torch.tensor([[*prompt, *new.tolist()]], device=model.device)
    logits = model(input_ids=ids).logits[0, -1].float()
    return abs(float(logits[tokens[0]] - logits[tokens[1]]))


def _failure(error: Exception) -> str:
    return one_line(f"{type(error).__name__}: {error}", 200)


def fast_path_rows(checked: CheckedModel) -> list[FastPathRow]:
    """The fast paths of a model after a ragged step, in which a model may show that it cannot be packed."""
    try:
        session = Session(checked.model)
        if not session.traits.is_encoder_decoder:
            config = GenerationConfig(max_new_tokens=2, do_sample=False)
            session.admit(*(Request(prompt, config) for prompt in token_prompts(checked.model, (3, 20))))
            for _ in session.drain():
                pass
        paths = fast_paths(session.model)
    except Exception as error:  # whatever a device or a library raises belongs into the report
        return [FastPathRow(checked.name, "all", "unknown", f"{type(error).__name__}: {error}", "")]
    return [
        FastPathRow(checked.name, path.name, "on" if path.is_on else "off", path.detail, path.switch)
        for path in paths
    ]


def tiny_model(device: torch.device) -> CheckedModel:
    """The tiny random model, the same on every machine."""

    def make(dtype: str) -> Any:
        return toy().to(device, getattr(torch, dtype))

    return _checked_model("tiny", make("float32"), make)


def own_model(folder: str, dtype: str, device: torch.device) -> CheckedModel:
    """The user's model."""

    def make(name: str) -> Any:
        return load(folder, name, str(device))[0]

    return _checked_model("model", make(dtype), make, folder)


def _checked_model(
    name: str, model: Any, make: Callable[[str], Any], folder: str | None = None
) -> CheckedModel:
    """A model with its rounding, which is not known where a plain forward fails: the laws then say why."""
    try:
        rounding: float | None = logit_rounding(model)
    except Exception:  # a model that needs more inputs, a device without a kernel
        rounding = None
    return CheckedModel(name, model, make, rounding, folder)
