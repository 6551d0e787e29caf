"""Packages that only some tests need, and that the rest are better without."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

__all__ = ["need_hqq"]


def need_hqq() -> None:
    """Leave a test out where hqq is missing; with DESCANT_NEEDS_HQQ=1 that is a failure.

    transformers imports hqq wherever it finds it, and torch's compiler with it, so that most tests are run
    without. Tests that call this are marked `hqq`.
    """
    if find_spec("hqq") is None:
        if os.environ.get("DESCANT_NEEDS_HQQ") == "1":
            pytest.fail("hqq is missing: pip install descant[hqq]")
        pytest.skip("hqq is not installed: pip install descant[hqq]")
