"""How much of the laws' wide sweeps CI runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import slices


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Every method and every model, but not each with each."""
    slices.cut(items, Path(__file__).parent, 3)
