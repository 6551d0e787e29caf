"""The smallest case that still differs: fewer requests, actions and fields."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, replace
from typing import Any

from tools.fuzz.cases import Case

__all__ = ["reduce_case"]


def reduce_case(case: Case, differs: Callable[[Case], bool]) -> Case:
    """Leave out whatever can be left out while the case still differs."""
    again = True
    while again:
        again = False
        for smaller in _smaller(case):
            if differs(smaller):
                case, again = smaller, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    for index in range(len(case.asks)) if len(case.asks) > 1 else ():
        yield _without(case, index)
    for step, actions in case.actions.items():
        for place, action in enumerate(actions):
            if action.kind != "admit":
                rest = (*actions[:place], *actions[place + 1 :])
                yield replace(case, actions={**case.actions, step: rest})
    if case.last_step:
        merged = tuple(one for step in sorted(case.actions) for one in case.actions[step])
        if all(one.kind == "admit" for one in merged):
            yield replace(case, actions={0: merged})
    yield from _without_extras(case)
    for index, ask in enumerate(case.asks):
        variants = [replace(ask, fields=_dropped(ask.fields, name)) for name in ask.fields]
        variants += [*_without_extras(ask), *([ask.without_drafter()] if ask.is_drafted else [])]
        if len(ask.prompt) > 1:
            variants += [replace(ask, prompt=ask.prompt[:-1]), replace(ask, prompt=ask.prompt[:1])]
        for one in variants:
            yield replace(case, asks=(*case.asks[:index], one, *case.asks[index + 1 :]))


def _without_extras(one: Any) -> Iterator[Any]:
    """A case or a request, without one of the things that it need not have."""
    for each in fields(one):
        if each.default is not MISSING and getattr(one, each.name) != each.default and each.name != "source":
            yield replace(one, **{each.name: each.default})


def _dropped(fields: dict[str, object], name: str) -> dict[str, object]:
    return {key: value for key, value in fields.items() if key != name}


def _without(case: Case, ask: int) -> Case:
    """The case without one request."""
    actions = {
        step: tuple(
            replace(one, asks=tuple(index - (index > ask) for index in one.asks if index != ask))
            for one in some
            if one.kind == "refuse" or set(one.asks) - {ask}
        )
        for step, some in case.actions.items()
    }
    asks = (*case.asks[:ask], *case.asks[ask + 1 :])
    return replace(case, asks=asks, actions={step: some for step, some in actions.items() if some})
