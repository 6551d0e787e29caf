"""One representative of each kind of model decodes as in transformers; `python -m sweep` tries all."""

from __future__ import annotations

import pytest

from sweep.kinds import KINDS, representative
from sweep.trial import trial


@pytest.mark.parametrize("kind", KINDS)
def test_a_representative_of_each_kind_works(kind: str) -> None:
    record = trial(representative(kind))
    assert record["status"] == "works", record["reason"]
