"""Random requests, and when each comes and goes."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tools.fuzz.cases import Action, Ask, Case, Enough, Tilt
from tools.fuzz.fields import METHODS, Methods, length_fields, method_names, processor_fields, stop_fields
from tools.fuzz.subjects import KINDS, Store, Subject, subject

__all__ = ["ask_of", "can_share", "plain_case"]


def plain_case(seed: int) -> Case:
    """The case of a seed without further dimensions."""
    rng = random.Random(f"case {seed}")
    name = rng.choices(list(KINDS), list(KINDS.values()))[0]
    on = subject(name)
    lossy = bool(on.lossy) and rng.random() < 0.25
    store = rng.choice(on.lossy) if lossy else rng.choice((None, *on.exact))
    others = [one for one in on.exact if store is None or one.name != store.name] or list(on.exact)
    other = rng.choice(others)
    rewinds = (store is None or store.rewinds) and other.rewinds
    count = rng.choice((1, 2, 2, 2, 2, 3, 3, 4))
    asks = []
    for index in range(count):
        ask = ask_of(rng, on, rewinds, asks)
        names_none = lossy and index > 0 and rng.random() < 0.3
        asks.append(ask if names_none else ask.on(store))
    return Case(
        seed,
        name,
        tuple(asks),
        other,
        _actions(rng, asks),
        prefix_cache=rng.choice((2, 4)) if can_share(on, store) and rng.random() < 0.2 else 0,
        trace=rng.random() < 0.1,
        through_generate=rng.random() < 0.3,
    )


def can_share(on: Subject, store: Store | None) -> bool:
    """Whether prompts may be kept for later requests."""
    return on.cache_type == "kv" and not on.encodes and (store is None or store.rewinds)


def ask_of(
    rng: random.Random,
    on: Subject,
    rewinds: bool,
    earlier: Sequence[Ask],
    methods: Methods = METHODS,
) -> Ask:
    """A request with one of the methods; `rewinds`: its caches can be cut to any length."""
    names = method_names(on, rewinds, methods)
    method = rng.choices(list(names), list(names.values()))[0]
    fields = methods[method][1](rng, on)
    text = _text(rng, on, earlier)
    prompt, source = (text, ()) if not on.encodes else (_begin(rng, on), text)
    fields |= length_fields(rng, len(prompt))
    fields |= stop_fields(rng, on)
    fields |= processor_fields(rng, on, method, fields)
    if rng.random() < 0.25:
        fields["logprobs"] = rng.randint(0, 3)
    chunks = on.cache_type == "kv" and not on.encodes and "penalty_alpha" not in fields
    if rng.random() < 0.1 and chunks:
        fields["prefill_chunk_size"] = rng.randint(1, 5)
    guided = "guidance" in method and rng.random() < 0.5
    return Ask(
        method,
        prompt,
        fields,
        source,
        negative=tuple(rng.choices(on.tokens, k=rng.randint(1, 9))) if guided else (),
        processors=(Tilt(rng.randrange(5)),) if rng.random() < 0.1 else (),
        criteria=(Enough(rng.choice((3, 7, 11))),) if rng.random() < 0.1 else (),
        drafts="draft model" in method,
        fails_after=rng.randint(0, 5) if rng.random() < 0.04 else None,
    )


def _begin(rng: random.Random, on: Subject) -> tuple[int, ...]:
    """What a decoder begins with, behind its start token."""
    assert on.start is not None
    more = rng.choices(on.tokens, k=rng.randint(1, 4)) if rng.random() < 0.25 else ()
    return (on.start, *more)


def _text(rng: random.Random, on: Subject, earlier: Sequence[Ask]) -> tuple[int, ...]:
    """A prompt: of few words or many, and sometimes one that begins as an earlier one."""
    length = rng.choice((1, 2, 3, 5, 7, 9, 12, 16))
    words = rng.sample(on.tokens, rng.choice((3, 6, 20)))
    text = tuple(rng.choices(words, k=length))
    if earlier and rng.random() < 0.3:
        known = rng.choice(earlier)
        text = ((known.source or known.prompt)[: rng.randint(1, 12)] + text)[:20]
    return text


def _actions(rng: random.Random, asks: Sequence[Ask]) -> dict[int, tuple[Action, ...]]:
    """When requests are admitted, cancelled and looked at, and when wrong ones are tried."""
    latest = rng.choice((0, 0, 2, 5))
    actions: dict[int, list[Action]] = {}
    for index in rng.sample(range(len(asks)), len(asks)):
        step = rng.randint(0, latest)
        before = actions.setdefault(step, [])
        if before and before[-1].kind == "admit" and rng.random() < 0.5:
            before[-1] = Action("admit", (*before[-1].asks, index))
        else:
            before.append(Action("admit", (index,)))
        if rng.random() < 0.2 and len(asks) > 1:
            later = step + rng.choice((0, 1, 1, 2, 5))
            actions.setdefault(later, []).append(Action("cancel", (index,)))
        if rng.random() < 0.1:
            actions.setdefault(step + rng.randint(1, 4), []).append(Action("peek", (index,)))
    if rng.random() < 0.15:
        step = rng.randint(0, latest)
        actions.setdefault(step, []).append(Action("refuse"))
    return {step: tuple(some) for step, some in actions.items()}
