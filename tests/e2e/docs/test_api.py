"""Every public name has one entry in the reference, an example that runs, and a test."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

import descant
from tools.docs import api_pages, doc_blocks


def test_every_public_name_has_an_entry_an_example_and_a_test() -> None:
    assert api_pages.missing() == []


def test_the_check_sees_all_three_packages() -> None:
    names = {name for names in api_pages.public_objects().values() for name in names}
    assert {"descant.generate", "descant.testing.toy", "descant.parts.Sampling"} <= names
    assert {f"descant.{name}" for name in descant.__all__} <= names


def test_a_name_without_entry_example_or_test_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    known = api_pages.public_objects()
    monkeypatch.setattr(
        api_pages, "public_objects", lambda: {**known, "descant.nowhere.Unheard": {"descant.Unheard"}}
    )
    assert api_pages.missing() == [
        "descant.Unheard: 0 entries in the reference",
        "descant.Unheard: no example that runs",
        "descant.Unheard: no test",
    ]


def test_an_import_or_a_string_is_no_example() -> None:
    assert api_pages.used_names("from descant import TopKLogitsWarper\nprint('TopKLogitsWarper')") == {
        "print"
    }
    assert "TopKLogitsWarper" in api_pages.used_names("import descant\ndescant.TopKLogitsWarper(3)")


def test_entries_become_what_mkdocstrings_reads(tmp_path: Path) -> None:
    page = "# Title\n\n<!-- api: generate,\nEvent -->\n\n<!-- api of descant.testing: toy -->\n"
    made = api_pages.expand(page, api_pages.PAGES / "generate.md")
    assert re.findall(r"^::: (\S+)$", made, re.MULTILINE) == [
        "descant.api.generate.generate",
        "descant.engine.session.Event",
        "descant.models.loading.tiny_llama.toy",
    ]
    assert "(../../guide/" in made
    assert "<!--" not in made


def test_every_page_is_in_the_index() -> None:
    index = (api_pages.PAGES / "index.md").read_text(encoding="utf-8")
    others = {page.name for page in api_pages.PAGES.glob("*.md")} - {"index.md"}
    assert set(re.findall(r"^\| \[[^\]]+\]\(([\w-]+\.md)\)", index, re.MULTILINE)) == others


def test_commands_are_all_there_with_their_options() -> None:
    from descant.cli.application import COMMAND_GROUPS, COMMANDS

    page = api_pages.commands()
    heads = re.findall(r"^## descant (.+)$", page, re.MULTILINE)
    grouped = {f"{group} {name}" for group, (_, some) in COMMAND_GROUPS.items() for name in some}
    assert {*COMMANDS, *grouped} == set(heads)
    assert len(heads) == len(set(heads))
    assert page.count("every field of [GenerationConfig]") >= 1


def test_every_entry_has_a_docstring_and_types() -> None:
    import importlib
    import inspect

    bare: list[str] = []
    for path in api_pages.public_objects():
        module, _, name = path.rpartition(".")
        thing: Any = getattr(importlib.import_module(module), name)
        if inspect.isfunction(thing):
            annotated = inspect.signature(thing)
            typed = all(one.annotation is not one.empty for one in annotated.parameters.values())
            if not typed or annotated.return_annotation is annotated.empty:
                bare.append(f"{path}: types")
        if (inspect.isclass(thing) or inspect.isfunction(thing)) and not (thing.__doc__ or "").strip():
            bare.append(f"{path}: docstring")
    assert bare == []


def test_code_of_before_is_not_counted_as_an_example_of_ours() -> None:
    before = [block for page in doc_blocks.sources() for block in doc_blocks.read(page) if block.before]
    assert before
    assert all("descant" not in api_pages.used_names(block.text) for block in before)
    assert all(ast.parse(block.text) for block in before)
