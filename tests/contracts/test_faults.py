"""Faults of code from outside the engine, at every seam, end only the requests that they belong to.

A dry run of a batch counts the calls of every seam: of user functions, strategies, drafters, wrappers and the
model. Then each seam fails at chosen calls, once or from then on, by raising, by an interrupt or by garbage.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from descant import Failed, GenerationConfig, LogitsProcessor, Request, SchedulerConfig, Session
from descant.decoding.constraints import Constraint, PhrasalConstraint
from descant.testing import FaultInjector, Outcome, check_isolation, outcomes
from tests.contracts.methods import of_method
from tests.contracts.subjects import requests
from tools.sweep.kinds import representative
from tools.sweep.trial import subject_of

NEW = 5
OTHERS: list[dict[str, Any]] = [
    {"do_sample": True, "seed": 7, "num_return_sequences": 2},
    {"num_beams": 2},
    {"penalty_alpha": 0.6, "top_k": 3},
]
PLAIN: dict[str, dict[str, Any]] = {
    "greedy": {},
    "fanned": {"do_sample": True, "seed": 3, "num_return_sequences": 3},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "beam sampling": {"num_beams": 3, "do_sample": True, "seed": 5},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
}
KINDS = {
    "decoder": (
        "llama",
        (*PLAIN, "contrastive", "contrastive-sequential", "groups", "constrained", "banned"),
    ),
    "guided": ("llama", ("guided", "guided-beams", "guided-contrastive", "dola", "dola-beams")),
    "speculative": ("llama", ("draft model", "prompt lookup")),
    "encoder-decoder": ("bart", ("greedy", "fanned", "beams", "contrastive", "groups", "constrained")),
    "recurrent": ("", ("greedy", "fanned", "beams")),
}
CASES = [(kind, method) for kind, (_, methods) in KINDS.items() for method in methods]


def _raise(kind: type[BaseException]) -> Callable[[], Any]:
    def fault() -> Any:
        raise kind("injected")

    return fault


# How a call fails, and whether every later one does.
FAULTS: dict[str, tuple[Callable[[], Any], bool]] = {
    "raises": (_raise(RuntimeError), False),
    "raises from then on": (_raise(RuntimeError), True),
    "out of memory": (_raise(MemoryError), False),
    "interrupted": (_raise(KeyboardInterrupt), False),
    "returns None": (lambda: None, False),
    "returns another shape": (lambda: torch.zeros(2, 3, 4, 5), False),
}


PROCEDURES = ("add_requests", "remove_requests", "commit", "drop")  # these return nothing


class Counting(LogitsProcessor):
    """A processor with a state, from outside."""

    def __init__(self) -> None:
        self.state = {"number_of_tokens": 0.0}

    def process(self, context, scores):
        return scores * (1 + context.state("number_of_tokens") * 0.01)

    def advance(self, context, before, after, tokens):
        return {"number_of_tokens": context.state("number_of_tokens")[:, 0] + 1}


class UserConstraint(Constraint):
    """A constraint from outside, whose methods are seams."""

    def __init__(self, inner: Constraint, injector: FaultInjector) -> None:
        self.inner, self.injector = inner, injector

    def _call(self, name: str, *args: Any) -> Any:
        return self.injector.wrap(f"constraint.{name}", getattr(self.inner, name))(*args)

    def advance(self):
        return self._call("advance")

    def does_advance(self, token_id):
        return self._call("does_advance", token_id)

    def update(self, token_id):
        return self._call("update", token_id)

    def reset(self):
        self._call("reset")

    def remaining(self):
        return self._call("remaining")

    def copy(self, stateful=False):
        return UserConstraint(self.inner.copy(stateful), self.injector)


def with_functions(request: Request, injector: FaultInjector) -> Request:
    """The request with functions of every kind, each a seam."""
    processors: list[Any] = [injector.wrap("processor", lambda ids, scores: scores * 1.5)]
    if request.generation_config.banned_phrases is None:
        counting = Counting()
        injector.patch(counting, "stateful processor", ("process", "advance"))
        processors.append(counting)
    criterion = injector.wrap("criterion", lambda ids, scores: torch.zeros(len(ids), dtype=torch.bool))
    return replace(request, logits_processor=processors, stopping_criteria=[criterion])


@functools.cache
def subject(tiny: Any, kind: str, method: str) -> tuple[Any, list[Request]]:
    """A model, and the request of a method followed by its neighbours."""
    name = KINDS[kind][0]
    configs = [GenerationConfig(**given, max_new_tokens=NEW) for given in OTHERS]
    if not name:
        found = subject_of(representative("recurrent"))
        given = [GenerationConfig(**PLAIN[method], max_new_tokens=NEW), *configs[:2]]
        texts = [one["input_ids"][0].tolist() for one in found.prompts]
        return found.model, [Request(texts[at % len(texts)], config) for at, config in enumerate(given)]
    one = tiny(name)
    if method == "draft model":
        first = [replace(requests(one, [GenerationConfig(max_new_tokens=NEW)], (6,))[0])]
        first = [replace(first[0], assistant_model=tiny("llama").model)]
    elif method in PLAIN:
        first = requests(one, [GenerationConfig(**PLAIN[method], max_new_tokens=NEW)], (6,))
    else:
        first = of_method(one, method, 1, new=NEW)
    return one.model, [*first, *requests(one, configs, (4, 7, 3), seed=8)]


@functools.cache
def small_pool(tiny: Any, kind: str, method: str) -> SchedulerConfig:
    """A scheduler whose pool holds little more than the largest request, with prompts in chunks."""
    model, given = subject(tiny, kind, method)
    sized = SchedulerConfig(block_size=2)
    largest = max(Session(model, scheduler=sized).demand(one).max_blocks(sized) for one in given)
    return SchedulerConfig(block_size=2, num_blocks=largest + 4, chunk_tokens=3, headroom=0.0)


@functools.cache
def expectation(
    tiny: Any, kind: str, method: str, scheduled: bool = False
) -> tuple[list[Outcome], dict[str, int]]:
    """What each request gives alone, and how often each seam is called."""
    model, given = subject(tiny, kind, method)
    scheduler = small_pool(tiny, kind, method) if scheduled else None
    unused = FaultInjector("", 0, lambda: None)
    first = with_functions(given[0], unused)
    expected = [outcomes(model, [one])[0] for one in (first, *given[1:])]
    assert [one.error for one in expected] == [None] * len(expected)
    dry = FaultInjector("", 0, lambda: None)
    check_isolation(
        model, lambda it: [with_functions(given[0], it), *given[1:]], dry, expected, scheduler=scheduler
    )
    return expected, dict(dry.calls)


def faults_of(calls: dict[str, int]) -> list[tuple[str, int, str]]:
    """Seams, calls and kinds of faults: the first, second and a middle call of each seam."""
    return [
        (seam, call, fault)
        for seam, count in sorted(calls.items())
        for call in sorted({1, 2, count // 4} & set(range(1, count // 2 + 1)))
        for fault in FAULTS
        if not (fault.startswith("returns") and seam.endswith(PROCEDURES))
    ]


def inject(
    tiny: Any, kind: str, method: str, chosen: Sequence[tuple[str, int, str]], scheduled: bool = False
) -> int:
    """Inject these faults one by one; their number."""
    model, given = subject(tiny, kind, method)
    expected, _ = expectation(tiny, kind, method, scheduled)
    scheduler = small_pool(tiny, kind, method) if scheduled else None
    for seam, call, name in chosen:
        fault, repeats = FAULTS[name]
        injector = FaultInjector(seam, call, fault, repeats)
        try:
            check_isolation(
                model,
                lambda it: [with_functions(given[0], it), *given[1:]],
                injector,
                expected,
                owners={0},
                scheduler=scheduler,
            )
        except Exception as error:
            raise AssertionError(f"{kind}, {method}, {seam}, call {call}, {name}") from error
        assert injector.num_faults, f"{seam} is not called {call} times"
    return len(chosen)


@pytest.mark.parametrize(("kind", "method"), CASES)
def test_a_fault_ends_only_its_own_requests(tiny, kind, method):
    """A slice of all faults, another one for each method."""
    every = faults_of(expectation(tiny, kind, method)[1])
    start = CASES.index((kind, method))
    assert inject(tiny, kind, method, every[start % 41 :: 41]) > 1


@pytest.mark.parametrize(
    ("method", "seam"), [("dola", "wrapper dola.forward"), ("guided", "wrapper guidance.remove_requests")]
)
def test_a_wrapper_that_stays_broken_fails_only_requests_that_use_it(tiny, method, seam):
    assert inject(tiny, "guided", method, [(seam, 1, "raises from then on")]) == 1


# One for each kind of model; the first four have found defects.
SMALL_POOL_FAULTS = [
    ("guided", "guided", "wrapper guidance.add_requests", 2, "interrupted"),
    ("guided", "guided-beams", "strategy ContrastiveSearch.finish", 1, "interrupted"),
    ("guided", "dola", "model.add_requests", 1, "raises from then on"),
    ("encoder-decoder", "constrained", "strategy BeamSearch.drop", 1, "interrupted"),
    ("decoder", "beams", "stateful processor.advance", 2, "raises"),
    ("recurrent", "fanned", "model.forward", 2, "raises from then on"),
    ("speculative", "prompt lookup", "criterion", 2, "returns None"),
]


@pytest.mark.parametrize(("kind", "method", "seam", "call", "fault"), SMALL_POOL_FAULTS)
def test_a_fault_in_a_small_pool_ends_only_its_own_requests(tiny, kind, method, seam, call, fault):
    """The same with a scheduler: requests wait, are read in chunks and preempted."""
    assert inject(tiny, kind, method, [(seam, call, fault)], True) == 1


@pytest.mark.parametrize("method", ["greedy", "fanned", "beams"])
def test_requests_in_the_small_pool_are_preempted(tiny, method):
    model, given = subject(tiny, "decoder", method)
    session = Session(model, scheduler=small_pool(tiny, "decoder", method))
    session.admit(*given)
    assert all(not isinstance(event, Failed) for event in session.drain())
    assert session.report().preemptions


CONSTRAINT_FAULTS = [
    (seam, call, fault)
    for seam in ("advance", "does_advance", "update", "remaining")
    for call in (2, 3, 9)  # `remaining` is called when a request is admitted
    for fault in ("raises", "raises from then on")
]


@pytest.mark.parametrize(("seam", "call", "fault"), CONSTRAINT_FAULTS)
def test_a_constraint_that_raises_fails_only_its_own_request(tiny, seam, call, fault):
    """Constrained requests share a strategy; one of them has a constraint from outside."""
    one = tiny("llama")

    def given(injector: FaultInjector) -> list[Request]:
        config = GenerationConfig(max_new_tokens=NEW, num_beams=3)
        phrases = [PhrasalConstraint([5, 9, 11]), PhrasalConstraint([7]), PhrasalConstraint([8, 6])]
        constraints = [UserConstraint(phrases[0], injector), *phrases[1:]]
        configs = [config.replace(constraints=[each]) for each in constraints]
        return requests(one, [*configs, GenerationConfig(max_new_tokens=NEW)], (5, 4, 7, 3))

    unused = FaultInjector("", 0, lambda: None)
    expected = [outcomes(one.model, [each])[0] for each in given(unused)]
    injector = FaultInjector(f"constraint.{seam}", call, *FAULTS[fault])
    check_isolation(one.model, given, injector, expected, owners={0})
    assert injector.num_faults


@pytest.mark.slow
@pytest.mark.parametrize("scheduled", [False, True], ids=["", "in a small pool"])
@pytest.mark.parametrize(("kind", "method"), CASES)
def test_every_fault_ends_only_its_own_requests(tiny, kind, method, scheduled):
    faults = faults_of(expectation(tiny, kind, method, scheduled)[1])
    print(f"{inject(tiny, kind, method, faults, scheduled)} faults")


@pytest.mark.slow
def test_the_battery_has_2000_faults(tiny):
    counts = [len(faults_of(expectation(tiny, *case)[1])) for case in CASES]
    assert sum(counts) >= 2000


def test_a_row_without_drafts_goes_on_beside_one_with_drafts_and_one_whose_forward_raises(tiny):
    model = copy.deepcopy(tiny("llama").model)

    def refuse(_, args):
        if bool((args[0] == 90).any()):
            raise RuntimeError("90")

    def says_90(ids, scores):  # as its second token: the step after it has drafts
        return scores.index_fill(1, torch.tensor([90]), 100.0) if ids.shape[1] == 3 else scores

    model.get_input_embeddings().register_forward_pre_hook(refuse)
    config = GenerationConfig(max_new_tokens=NEW)
    drafted = config.replace(prompt_lookup_num_tokens=3, logit_bias={7: 100.0})
    session = Session(model)
    session.admit(
        Request([5, 6], config, logits_processor=[says_90]),
        Request([5, 9, 7, 5, 9], drafted),
        Request([8, 3], config),
    )
    assert [event.request for event in session.drain() if isinstance(event, Failed)] == [0]
