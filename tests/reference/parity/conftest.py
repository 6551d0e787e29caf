"""Models that several parity files build."""

from __future__ import annotations

from unittest import mock

import pytest

from tests.reference.parity.subjects import deepened
from tests.support import tiny_models


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
