"""A batch is its rows, a late comer is an early one, and a seed is a request's own."""

from __future__ import annotations

import pytest

from descant import GenerationConfig, InputError, RowError
from descant.testing import check_admission, check_batch, check_seed, compare, failing_request, outcomes
from tests.contracts.subjects import METHODS, MODELS, mixed, of_method, requests

SEEDED = [name for name, given in METHODS.items() if "seed" in given]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MODELS)
def test_a_batch_equals_its_rows(tiny, name, method):
    check_batch(tiny(name).model, of_method(tiny(name), method))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MODELS)
def test_a_late_comer_equals_an_early_one(tiny, name, method):
    check_admission(tiny(name).model, of_method(tiny(name), method, 3), schedules=4)


@pytest.mark.ci_cases("t5-beam-sampling", "llama-sampling-fanned", "mistral-sampling-cut", "opt-sampling")
@pytest.mark.parametrize("method", SEEDED)
@pytest.mark.parametrize("name", MODELS)
def test_a_seed_is_the_requests_own(tiny, name, method):
    check_seed(tiny(name).model, of_method(tiny(name), method, 3), schedules=3)


@pytest.mark.ci_cases("llama", "t5")
@pytest.mark.parametrize("name", MODELS)
def test_methods_share_a_batch(tiny, name):
    check_batch(tiny(name).model, mixed(tiny(name)))


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_failing_request_leaves_the_others_unaffected(tiny, name):
    given = of_method(tiny(name), "greedy")
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
        check_seed(tiny("llama").model, of_method(tiny("llama"), "greedy"))
