"""Fixtures of the whole suite: one thread, no network, the reference, tiny models and pretrained ones."""

from __future__ import annotations

import gc
import itertools
import os

# Before torch and transformers are imported: both read the environment at import.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from descant.engine import session
from tests.reference.process.client import ReferenceClient
from tests.security import watch
from tests.support import ci_slices, pretrained, tiny_models
from tests.support.forkserver import ForkServer
from tests.unit.config.hub.server import hub  # noqa: F401 - a fixture

# These need vLLM, which has an interpreter of its own: tools/vllm_env.py.
collect_ignore = [] if find_spec("vllm") else ["vllm"]

torch.set_num_threads(1)
watch.begin()
if os.environ.get("DESCANT_TEST_OVERLAP") == "1":  # `Session(overlap=True)` wherever a test does not say
    session.DIRECT_DEVICES = ()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    """Unpickling in a fixture fails the first test that uses it."""
    yield
    watch.settle()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """No test may make Descant unpickle."""
    yield
    watch.settle()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Nor may what comes after it.

    What is alive after the last test of a file lives to the end: modules, models of the session. It is exempt
    from the garbage collector as well. Otherwise each full collection late in a run takes a second.
    """
    yield
    watch.settle()
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Set the markers `reference`, `heavy` and `slow`, before pytest selects by them."""
    # An argument with the name of a case selects less than a whole function.
    whole = not any("[" in argument for argument in config.args)
    ci_slices.mark(items, Path(__file__).parent, whole=whole)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Exempt everything that collection makes from the garbage collector.

    These are 1.5 million objects, which live to the end. Each full collection, as benchmarks and tests of
    memory start them, would traverse all of them, which takes almost a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def locks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Iterator[Path]]:
    """Lock files of recipes that are not there yet; no test touches the user's own."""
    folder = tmp_path_factory.mktemp("locks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DESCANT_RECIPES_LOCK", str(folder / "shared.lock"))  # for fixtures of many tests
        yield (folder / f"{number}.lock" for number in itertools.count())


@pytest.fixture(autouse=True)
def own_lock(locks: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's own lock file: what it trusts is not trusted in the next."""
    path = next(locks)
    monkeypatch.setenv("DESCANT_RECIPES_LOCK", str(path))
    return path


@pytest.fixture(params=["short", pytest.param("whole", marks=pytest.mark.slow)])
def extent(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of `check_recipe`, on a recipe that passes: half the tokens and one schedule in CI, else all."""
    if request.param == "short":
        monkeypatch.setattr("descant.testing.recipe._NUM_NEW_TOKENS", 10)
        monkeypatch.setattr("descant.testing.recipe._NUM_SCHEDULES", 1)
    return str(request.param)


@pytest.fixture(scope="session")
def reference() -> Iterator[ReferenceClient]:
    """transformers 4.52.4; its process starts at the first question."""
    client = ReferenceClient()
    yield client
    client.close()


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """Runs Python programs in forks of one process that has torch and Descant imported."""
    with ForkServer() as server:
        yield server


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tiny_models.Tiny]:
    """`tiny(name)`: a tiny random model, built once per run; keywords go to `from_pretrained`."""
    root = tmp_path_factory.mktemp("tiny")
    loaded: dict[Any, tiny_models.Tiny] = {}

    def get(name: str, **options: Any) -> tiny_models.Tiny:
        key = name, *sorted(options.items())
        if key not in loaded:
            if hasattr(torch, "privateuseone"):
                # transformers would leave its rotary frequencies uninitialised, for all later tests as well.
                raise RuntimeError(f"`{name}` must be loaded before devices are pretended")
            if not (root / name).exists():
                tiny_models.build(name, root / name)
            loaded[key] = tiny_models.load(name, root / name, **options)
        return loaded[key]

    return get


@pytest.fixture(scope="session")
def real() -> Callable[[str], pretrained.Pretrained]:
    """`real(name)`: a pretrained model; fails with the command that builds it when it is missing."""
    return pretrained.load
