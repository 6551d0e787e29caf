"""What an import of Descant loads, and what it loads at first use."""

from __future__ import annotations

import subprocess
import sys

import pytest

import descant

# torch and transformers take seconds to import, which `descant --help` does not need.
NOT_LOADED = "assert not {'torch', 'transformers', 'numpy', 'rich'} & set(sys.modules)\n"
# Dependencies of transformers' models, which most of Descant does not need.
MODELS = "transformers.modeling_utils"


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_torch_is_not_imported_before_use() -> None:
    run(
        "import sys\nimport descant\n"
        + NOT_LOADED
        + "from descant.config.generation_config import GenerationConfig\nfrom descant import ConfigError\n"
        + "from descant.cli.application import build_app\nbuild_app()\n"
        + NOT_LOADED
        + "assert descant.generate.__module__ == 'descant.api.generate'\nassert 'torch' in sys.modules\n"
        + f"assert {MODELS!r} not in sys.modules\n"
        + f"assert descant.BayesianDetectorModel and {MODELS!r} in sys.modules\n"
    )


@pytest.mark.parametrize(
    "first",
    [
        "from descant.config.generation_config import GenerationConfig",
        "from descant.engine.explain import explain_config; from descant import GenerationConfig",
        "import descant.testing; from descant import GenerationConfig",
        "from descant import *",
    ],
)
def test_a_config_explains_itself_whatever_was_imported_first(first: str) -> None:
    run(f"{first}\nassert 'beam search, 2 beams' in GenerationConfig(num_beams=2).explain()")


def test_packages_are_attributes_without_an_import_of_their_own() -> None:
    run(
        "import descant\nassert descant.errors.InputError is descant.InputError\n"
        "assert descant.cli.EXTRA == 'cli'"
    )


def test_a_name_that_is_nowhere_is_an_error_as_usual() -> None:
    assert not hasattr(descant, "nonsense")
    with pytest.raises(AttributeError, match="module 'descant' has no attribute 'nonsense'"):
        _ = descant.nonsense  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match="cannot import name 'nonsense'"):
        from descant import nonsense  # type: ignore[attr-defined]  # noqa: F401
