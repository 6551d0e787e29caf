"""The case of a seed: a plain one, and what is added to some of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tools.fuzz.cases import Action, Ask, Case
from tools.fuzz.changes import CHANGES, OF_ADAPTERS
from tools.fuzz.fields import NEIGHBOURS, length_fields, stop_fields
from tools.fuzz.generator import ask_of, can_share, plain_case
from tools.fuzz.subjects import ADAPTED, subject

__all__ = ["DIMENSIONS", "case_of"]

Dimension = Callable[[random.Random, Case], Case]


def case_of(seed: int) -> Case:
    """The case of a seed."""
    case = plain_case(seed)
    for name, (chance, add) in DIMENSIONS.items():
        rng = random.Random(f"{name} {seed}")  # of its own: a new dimension changes no other
        if rng.random() < chance:
            case = add(rng, case)
    return case


def _with(rng: random.Random, case: Case, ask: Ask) -> Case:
    """The case with a further request, which comes at some step, instead of one if these are many."""
    if len(case.asks) > 2:
        return replace(case, asks=(ask.on(case.asks[0].store), *case.asks[1:]))
    step = rng.randint(0, case.last_step + 1)
    actions = {**case.actions, step: (*case.actions.get(step, ()), Action("admit", (len(case.asks),)))}
    return replace(case, asks=(*case.asks, ask.on(case.asks[0].store)), actions=actions)


def _neighbour(rng: random.Random, case: Case) -> Case:
    """A grammar, guidance or DoLa beside the others."""
    rewinds = all(ask.store is None or ask.store.rewinds for ask in case.asks) and case.other.rewinds
    return _with(rng, case, ask_of(rng, subject(case.subject_name), rewinds, case.asks, NEIGHBOURS))


def _branching(rng: random.Random, case: Case) -> Case:
    """A strategy of a third party that forks."""
    on, known = subject(case.subject_name), rng.choice(case.asks)
    ends = {**length_fields(rng, len(known.prompt)), **stop_fields(rng, on)}
    return _with(rng, case, Ask("branching", known.prompt, ends, known.source, branches=rng.randint(1, 4)))


def _long(rng: random.Random, case: Case) -> Case:
    """Prompts with a part in common that is long enough to be attended once for all rows."""
    on = subject(case.subject_name)
    part = tuple(rng.choices(on.tokens, k=rng.randint(60, 66)))
    return replace(case, asks=tuple(_longer(ask, part) for ask in case.asks))


def _longer(ask: Ask, part: tuple[int, ...]) -> Ask:
    lengths = {k: v + len(part) for k, v in ask.fields.items() if k in ("max_length", "min_length")}
    prompt = (*ask.prompt[:1], *part, *ask.prompt[1:])
    return replace(ask, prompt=prompt, fields={**ask.fields, **lengths})


def _adapters(rng: random.Random, case: Case) -> Case:
    """Adapters: the active one, another, or none."""
    if case.subject_name not in ADAPTED:
        return case
    asks = tuple(replace(ask, adapter=rng.choice((None, "A", "B", "B", "__base__"))) for ask in case.asks)
    return replace(case, asks=asks, has_adapters=True)


def _scheduler(rng: random.Random, case: Case) -> Case:
    """Prompts in chunks, and steps and running rows with a limit."""
    fields: dict[str, Any] = {"max_running_rows": rng.choice((8, 12, 256))}
    if rng.random() < 0.7:
        fields["chunk_tokens"] = rng.randint(1, 6)
        fields |= {"chunk_half_context": rng.randint(1, 8)} if rng.random() < 0.2 else {}
    if rng.random() < 0.3:
        fields["max_step_tokens"] = rng.randint(8, 40)
    return replace(case, scheduler=fields)


def _pool(rng: random.Random, case: Case) -> Case:
    """A pool with little more room than the largest request needs, which requests outgrow together."""
    fields = {
        **(case.scheduler or {}),
        "block_size": rng.choice((2, 3, 4, 16)),
        "headroom": rng.choice((0.0, 0.0, 0.01, 0.2)),
        "preemption": rng.choice(("growth", "growth", "priority", "priority", "priority", "never")),
        "ageing": rng.choice((0.0, 1.0, 1.0)),
    }
    asks = []
    for ask in case.asks:
        more = rng.choice((0, 8, 16))  # tokens: a short result ends before the pool is full
        longer = {k: v + more for k, v in ask.fields.items() if k in ("max_new_tokens", "max_length")}
        asks.append(replace(ask, priority=rng.randint(0, 2), fields={**ask.fields, **longer}))
    return replace(case, asks=tuple(asks), scheduler=fields, spare_blocks=rng.choice((0, 0, 1, 2, 5)))


def _change(rng: random.Random, case: Case) -> Case:
    """Weights that change while a prefix cache holds what they gave."""
    if not can_share(subject(case.subject_name), case.asks[0].store):
        return case
    names = [*CHANGES, *(OF_ADAPTERS if case.has_adapters else ())]
    return replace(case, prefix_cache=rng.choice((2, 4)), change=rng.choice(names))


def _engine(rng: random.Random, case: Case) -> Case:
    """An engine, which also scores prompts."""
    on = subject(case.subject_name)
    asks = tuple(
        ask if on.encodes or rng.random() < 0.4 else replace(ask, prompt_logprobs=rng.randint(0, 2))
        for ask in case.asks
    )
    actions = {0: (Action("admit", tuple(range(len(asks)))),)}
    return replace(case, asks=asks, actions=actions, in_engine=True, trace=False)


# By name: how often, and what is added. Later ones see what earlier ones have added.
DIMENSIONS: Mapping[str, tuple[float, Dimension]] = {
    "neighbour": (0.35, _neighbour),
    "branching": (0.12, _branching),
    "long": (0.12, _long),
    "adapters": (0.3, _adapters),
    "scheduler": (0.35, _scheduler),
    "pool": (0.25, _pool),
    "change": (0.2, _change),
    "engine": (0.12, _engine),
}
