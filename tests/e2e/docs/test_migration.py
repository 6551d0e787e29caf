"""The migration guide has every name that 4.52.4 has and the installed transformers has not.

The names of both packages are read live. Old code runs on 4.52.4, new code runs here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import descant
import descant.parts
from tools.docs import migration, migration_table
from tools.docs.migration import Comparison
from tools.docs.transformers4 import Transformers4, Transformers4Error

BOTH = ("constraints", "beams", "outputs", "caches", "inner", "methods", "cache methods", "fields", "kept")
NEWER = ("newer", "newer fields")  # only in the installed version


@pytest.fixture(scope="module")
def transformers4() -> Iterator[Transformers4]:
    one = Transformers4()
    yield one
    one.close()


@pytest.fixture(scope="module")
def compared(transformers4: Transformers4) -> Comparison:
    return Comparison.live(transformers4)


@pytest.fixture
def namespace() -> dict[str, Any]:
    made: dict[str, Any] = {"descant": descant}
    exec(migration_table.SETUP, made)  # noqa: S102
    return made


def test_the_two_versions_are_the_expected_ones(compared: Comparison) -> None:
    assert compared.old["version"] == "4.52.4"
    assert compared.new["version"].startswith("5.")
    assert len(compared.gone()) > 90  # a comparison that finds nothing would pass everything below


def test_every_name_that_is_gone_has_its_row_and_no_other(compared: Comparison) -> None:
    assert migration.mismatches(compared) == []


def test_the_page_is_current_and_has_every_table(compared: Comparison) -> None:
    tables = []
    for path in (migration.PAGE, migration.FIVE):
        page = path.read_text(encoding="utf-8")
        assert page == migration.render(page, compared), "run tools/docs/migration.py"
        tables += migration.TABLE.findall(page)
    assert sorted(tables) == sorted((*BOTH, *NEWER, "tensors", "defaults"))


def test_old_code_runs_on_4_52(compared: Comparison, transformers4: Transformers4) -> None:
    transformers4.run(migration_table.SETUP)
    tables = migration.rows(compared)
    lines = [row.before for table in BOTH for row in tables[table].values() if row.before]
    failed = {}
    for line in lines:
        try:
            transformers4.run(line)
        except Transformers4Error as error:
            failed[line] = str(error).splitlines()[-1]
    assert failed == {}
    assert len(lines) > 60


def test_code_of_5_runs_on_it(compared: Comparison, namespace: dict[str, Any]) -> None:
    tables = migration.rows(compared)
    for line in (row.before for table in NEWER for row in tables[table].values()):
        exec(line, namespace)  # noqa: S102


def test_new_code_runs_here(compared: Comparison, namespace: dict[str, Any]) -> None:
    for name, row in (
        (name, row) for table in migration.rows(compared).values() for name, row in table.items()
    ):
        assert row.after or row.note, name
        if row.after:
            try:
                exec(row.after, namespace)  # noqa: S102
            except descant.MissingExtra as error:
                assert f"needs the extra `{error.extra}`" in row.note, name  # noqa: PT017


def test_a_removed_method_gives_the_same_tokens(
    compared: Comparison, transformers4: Transformers4, namespace: dict[str, Any], tmp_path: Any
) -> None:
    namespace["model"].save_pretrained(tmp_path)
    transformers4.run(migration_table.SETUP)
    transformers4.run(f"model = transformers.LlamaForCausalLM.from_pretrained({str(tmp_path)!r}).eval()")
    for name in ("_contrastive_search", "_dola_decoding", "_group_beam_search", "_constrained_beam_search"):
        row = migration_table.METHODS[name]
        there = transformers4.run(f"print(({row.before})[0].tolist())").strip()
        here = eval(row.after, namespace)  # noqa: S307
        assert isinstance(here, torch.Tensor)
        assert str(here[0].tolist()) == there, name


def test_defaults_are_those_that_4_52_documents(compared: Comparison) -> None:
    other = {name for name, old, _, ours in migration.defaults(compared) if old != ours}
    page = migration.PAGE.read_text(encoding="utf-8")
    assert other == {"num_assistant_tokens_schedule"}
    assert all(f"`{name}`" in page for name in other)
