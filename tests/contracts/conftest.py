"""How much of the laws' wide sweeps CI runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import ci_slices


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Every method and every model, but not each with each."""
    ci_slices.cut(items, Path(__file__).parent, 3)
