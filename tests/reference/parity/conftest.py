"""What several parity files build, and how much of them CI runs."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from tests.reference.parity.subjects import deepened
from tests.support import ci_slices, tiny_models


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """The oracle is slow: CI asks it a quarter of what is asked in the battery."""
    ci_slices.cut(items, Path(__file__).parent, 4)


@pytest.fixture(scope="session")
def deep(tmp_path_factory):
    """`deep(name)`: the tiny architecture with more layers, built once."""
    root, loaded = tmp_path_factory.mktemp("deep"), {}

    def get(name):
        if name not in loaded:
            arch = deepened(name)
            with mock.patch.dict(tiny_models.ARCHITECTURES, {arch.name: arch}):
                tiny_models.build(arch.name, root / name)
                loaded[name] = tiny_models.load(arch.name, root / name)
        return loaded[name]

    return get
