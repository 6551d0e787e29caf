"""A request whose keys and values are not finite does no harm: beside it and after it all is as alone."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch

from descant import Failed, Finished, GenerationConfig, Request, Session
from tests.contracts.test_interrupts import cache_cases
from tests.support.tiny_models import prompts
from tests.unit.decoding.guidance import pairs

BROKEN = 90  # a token whose embedding, and so whose keys and values, are not finite


@cache
def broken_model(name: str, value: float) -> Any:
    """A tiny model with one token that is not finite."""
    model = copy.deepcopy(pairs.made(name, 0))
    with torch.no_grad():
        model.get_input_embeddings().weight[BROKEN] = value
    return model


def plain_requests(name: str, fields: dict[str, Any], lengths: tuple[int, ...]) -> list[Request]:
    """Requests without the broken token, which cannot choose it."""
    own = pairs.arch(name, 0)
    texts = [[token if token != BROKEN else 5 for token in text] for text in prompts(own, lengths, 7)]
    config = {**fields, "suppress_tokens": [BROKEN], "eos_token_id": None}
    return [
        request(name, text, GenerationConfig(**config, max_new_tokens=16 - number))
        for number, text in enumerate(texts)
    ]


def broken_request(name: str, fields: dict[str, Any], length: int, **more: Any) -> Request:
    """A request with the broken token in the middle."""
    text = [7] * (length // 2) + [BROKEN] + [8] * (length // 2)
    return request(name, text, GenerationConfig(**fields, **more, eos_token_id=None))


def request(name: str, text: list[int], config: GenerationConfig) -> Request:
    """A request with a prompt, or for an encoder-decoder one whose decoder starts with it."""
    own = pairs.arch(name, 0)
    if own.start is None:
        return Request(text, config)
    return Request([own.start, *text], config, {"input_ids": torch.tensor([5, 6, 7, 8])})


def finished(events: list[Any]) -> dict[int, list[int]]:
    """The tokens of the requests that finished."""
    return {one.request: one.hypotheses[0].tokens.tolist() for one in events if isinstance(one, Finished)}


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["nan", "inf"])
@pytest.mark.parametrize(
    ("cache_name", "name", "settings"), [*cache_cases(), ("dynamic", "bart", {}), ("dynamic", "mamba", {})]
)
def test_what_is_not_finite_stays_with_its_request(
    cache_name: str, name: str, settings: dict[str, Any], value: float
) -> None:
    model, fields = broken_model(name, value), {"cache_implementation": cache_name}
    if settings:
        fields["cache_config"] = settings
    plain = plain_requests(name, fields, (5, 11, 3, 6, 2, 4))
    expected = []
    for one in plain:
        session = Session(model)
        session.admit(one)
        expected += list(finished(list(session.drain())).values())
    session = Session(model)
    # One fails at once, one goes on with zeros in place of its logits, and is longer than those beside it.
    fails = broken_request(name, fields, 16, max_new_tokens=4)
    goes_on = broken_request(name, fields, 12, max_new_tokens=6, remove_invalid_values=True)
    numbers = session.admit(plain[0], goes_on, plain[1], fails, plain[2])
    events = []
    for _ in range(4):
        events += session.step()
    numbers += session.admit(plain[3], broken_request(name, fields, 20, max_new_tokens=2), plain[4])
    for _ in range(4):
        events += session.step()
    numbers += session.admit(plain[5])
    events += session.drain()
    found = finished(events)
    assert [found.get(numbers[place]) for place in (0, 2, 4, 5, 7, 8)] == expected
    assert {one.request for one in events if isinstance(one, Failed)} == {numbers[3], numbers[6]}


def test_beams_beside_and_after_what_is_not_finite() -> None:
    model, fields = broken_model("llama", float("nan")), {"num_beams": 3, "cache_implementation": "dynamic"}
    for cache_name in ("dynamic", "paged", "static"):
        fields["cache_implementation"] = cache_name
        plain = plain_requests("llama", fields, (5, 3))
        expected = []
        for one in plain:
            session = Session(model)
            session.admit(one)
            expected += list(finished(list(session.drain())).values())
        session = Session(model)
        first = session.admit(broken_request("llama", fields, 14, max_new_tokens=5), plain[0])
        events = session.step() + session.step()
        second = session.admit(plain[1])
        events += session.drain()
        found = finished(events)
        assert [found[first[1]], found[second[0]]] == expected
