"""A batch is its rows, a late comer is an early one, and a seed is a request's own: for every method."""

from __future__ import annotations

import pytest

from descant import Failed, Finished, GenerationConfig, InputError, RowError, Session
from descant.testing import check_admission, check_batch, check_seed, compare, failing_request, outcomes
from descant.testing.outcome import Schedule
from tests.contracts.methods import DECODER_ONLY, METHODS, SEEDED, mixed, of_method
from tests.contracts.subjects import METHODS as PLAIN
from tests.contracts.subjects import MODELS, requests
from tests.contracts.subjects import of_method as plain_requests

# Rotary positions, learned positions, and an encoder-decoder.
DECODERS = ("llama", "gpt2")
# In CI each by itself; `pytest -m slow` runs the rest, and all of them share the sessions below.
SHOWN = {
    "llama": (
        "contrastive", "contrastive-sequential", "groups", "constrained", "constrained-groups", "banned",
        "trie", "trie-beams", "healed", "dola", "dola-beams", "dola-groups", "dola-contrastive", "guided",
        "guided-beams", "guided-contrastive", "guided-groups", "guided-constrained",
    ),
    "gpt2": ("contrastive", "dola-groups", "guided-contrastive", "guided-constrained"),
    "t5": ("contrastive", "constrained-groups"),
}  # fmt: skip
EVERY = [
    *((name, method) for name in MODELS for method in PLAIN),
    *(
        pytest.param(name, method, marks=() if method in SHOWN[name] else pytest.mark.slow)
        for name in SHOWN
        for method in (METHODS if name == "t5" else (*METHODS, *DECODER_ONLY))
    ),
]
SAMPLED = [(name, method) for name in MODELS for method, given in PLAIN.items() if "seed" in given]


def given_for(tiny, name, method, new):
    """Requests of a method that differ in prompt and length."""
    if method in PLAIN:
        return plain_requests(tiny(name), method)
    return of_method(tiny(name), method, 3, new=new)


@pytest.mark.parametrize(("name", "method"), EVERY)
def test_a_batch_equals_its_rows(tiny, name, method):
    check_batch(tiny(name).model, given_for(tiny, name, method, 5))


@pytest.mark.parametrize(("name", "method"), EVERY)
def test_a_late_comer_equals_an_early_one(tiny, name, method):
    schedules = 4 if method in PLAIN else 1
    check_admission(tiny(name).model, given_for(tiny, name, method, 4)[:3], schedules=schedules)


@pytest.mark.parametrize(
    ("name", "method"), [*SAMPLED, *((name, method) for name in DECODERS for method in SEEDED)]
)
def test_a_seed_is_the_requests_own(tiny, name, method):
    check_seed(tiny(name).model, given_for(tiny, name, method, 7)[:3], schedules=2)


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_failing_request_leaves_the_others_unaffected(tiny, name):
    given = plain_requests(tiny(name), "greedy")
    given[1] = failing_request(given[1], 2)
    found = outcomes(tiny(name).model, given)
    assert isinstance(found[1].error, RowError)
    assert found[1].error.request == 1
    for place in (0, 2, 3):
        compare(outcomes(tiny(name).model, [given[place]])[0], found[place], f"request {place}")


def test_unseeded_sampling_is_refused(tiny):
    given = requests(tiny("llama"), [GenerationConfig(do_sample=True)], (3,))
    with pytest.raises(InputError, match="must be seeded"):
        check_batch(tiny("llama").model, given)
    with pytest.raises(InputError, match="at least one that samples"):
        check_seed(tiny("llama").model, plain_requests(tiny("llama"), "greedy"))


@pytest.mark.ci_cases("llama")
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_all_methods_share_a_session(tiny, name):
    given = mixed(tiny(name))
    alone = [outcomes(tiny(name).model, [one])[0] for one in given]
    assert [str(one.error) for one in alone if one.error is not None] == []
    for order in (range(len(given)), range(len(given))[::-1]):
        found = outcomes(tiny(name).model, given, Schedule.at_once(list(order)))
        for place, expected in enumerate(alone):
            compare(expected, found[place], f"request {place} among all methods")
            unmet = [[one.unmet_constraints for one in some.hypotheses] for some in (expected, found[place])]
            assert unmet[0] == unmet[1], f"request {place} among all methods"


@pytest.mark.ci_cases("t5")
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_all_methods_come_and_go(tiny, name):
    check_admission(tiny(name).model, mixed(tiny(name), seed=1), schedules=3)


def _held(strategy: object) -> int:
    """The size of a strategy's state of its requests, besides that of one step."""
    own = {
        name: one
        for name, one in vars(strategy).items()
        if name not in ("_finish_reasons", "_next_states", "_token_states")
    }
    count = sum(len(one) for one in own.values() if isinstance(one, dict | list))
    past, pools = own.get("_hidden_states"), own.get("_finished_pools")
    return count + (0 if past is None else len(past._requests)) + (0 if pools is None else len(pools._keys))


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_nothing_is_remembered_of_what_has_left(tiny, name):
    """Requests that end, that fail and that are cancelled: no strategy and no wrapper keeps any."""
    given = mixed(tiny(name))
    session = Session(tiny(name).model)
    session.admit(*given, *(failing_request(one, 2) for one in given))
    doomed = set(session.admit(*given))
    for _ in range(3):
        doomed -= {one.request for one in session.step() if isinstance(one, Finished | Failed)}
    assert sum(map(_held, session._tables.default.running.strategies.values())) > len(given)
    for number in doomed:
        session.cancel(number)
    while len(session):
        session.step()
    strategies = session._tables.default.running.strategies.values()
    assert {type(one).__name__: _held(one) for one in strategies if _held(one)} == {}
    model = session._tables.default.model
    while hasattr(model, "inner"):
        assert not getattr(model, "_negative_prompts", None)
        model = model.inner
