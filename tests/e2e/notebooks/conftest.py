"""A folder with the notebooks and the models, as a user of a clone has them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support import pretrained

NOTEBOOKS = Path(__file__).resolve().parents[3] / "examples" / "notebooks"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies: what runs writes nothing into the checkout."""
    made = tmp_path_factory.mktemp("notebooks")
    (made / "models").symlink_to(pretrained.folder("smollm2").parent)
    for path in NOTEBOOKS.glob("*.ipynb"):
        shutil.copy(path, made)
    return made
