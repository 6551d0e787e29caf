"""The modules that importing Descant loads, and those it loads on demand."""

from __future__ import annotations

import subprocess
import sys

import descant

# Dependencies of transformers' models: seconds that `descant --help` and `descant tree` do not need.
HEAVY = "transformers.modeling_utils"
CODE = f"""
import sys
import descant
from descant.cli.application import build_app
build_app()
assert {HEAVY!r} not in sys.modules, "loaded for nothing"
assert descant.BayesianDetectorModel.__name__ == "BayesianDetectorModel"
assert {HEAVY!r} in sys.modules
"""


def test_models_are_not_imported_before_use() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_name_that_is_nowhere_is_an_error_as_usual() -> None:
    assert not hasattr(descant, "nonsense")
