"""The attacks of `python -m tools.battery`, in small sizes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tools.battery.__main__ import NAMES, run_attack
from tools.battery.subject import sharing


@pytest.fixture(scope="module", autouse=True)
def shared_server() -> Iterator[None]:
    with sharing():
        yield


@pytest.mark.parametrize("name", NAMES)
def test_the_server_withstands(name):
    outcome = run_attack(name, is_small=True)
    assert not outcome.failures, outcome.line(name)
    assert outcome.figures


def test_an_attack_that_fails_is_seen():
    """The check of answers finds what it must find."""
    from tests.support.http_client import Answer
    from tools.battery.http_fuzz import KEY, check_answer
    from tools.battery.outcome import Outcome

    for body in (b'{"error": {"code": "internal_error"}}', b"Traceback (most", KEY.encode()):
        outcome = Outcome()
        check_answer(outcome, "GET /", Answer(200, {}, body))
        assert len(outcome.failures) == 1
