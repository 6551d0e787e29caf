"""One representative of each kind of model decodes as in transformers; `python -m tools.sweep` tries all."""

from __future__ import annotations

import json

import pytest
import transformers

from tools.sweep.catalogue import entries
from tools.sweep.kinds import KINDS, representative
from tools.sweep.report import PAGE, RESULTS, page, reduced_document
from tools.sweep.trial import trial


@pytest.mark.parametrize("kind", KINDS)
def test_a_representative_of_each_kind_works(kind: str) -> None:
    record = trial(representative(kind))
    assert record["status"] == "works", record["reason"]


def test_the_page_of_models_is_made_of_the_results() -> None:
    data = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert PAGE.read_text(encoding="utf-8") == page(data)
    assert RESULTS.read_text(encoding="utf-8") == reduced_document(data)


def test_the_results_are_of_every_class_of_this_transformers() -> None:
    data = json.loads(RESULTS.read_text(encoding="utf-8"))
    if data["versions"]["transformers"] != transformers.__version__:
        pytest.skip(
            "another transformers lists other classes: run `python -m tools.sweep` and keep its results"
        )
    assert {record["name"] for record in data["results"]} == {entry.name for entry in entries()}
    assert not [record["name"] for record in data["results"] if record["status"] in ("differs", "fails")]


def test_kinds_are_of_classes_that_work() -> None:
    data = json.loads(RESULTS.read_text(encoding="utf-8"))
    works = {record["name"] for record in data["results"] if record["status"] == "works"}
    assert set(KINDS.values()) <= works
