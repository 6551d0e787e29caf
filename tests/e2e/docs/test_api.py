"""Every public name has one entry in the reference, an example that runs, and a test."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tools.docs import api_pages


def test_every_public_name_has_an_entry_an_example_and_a_test() -> None:
    assert api_pages.missing() == []


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
