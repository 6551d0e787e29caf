"""tools/release: what the commands of RELEASING.md judge, on small cases."""

from __future__ import annotations

import copy
import re
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from hatch_build import bill_of_materials
from tools.release import builds, image, licences, recipe

ROOT = Path(__file__).resolve().parents[3]
METADATA = """\
Metadata-Version: 2.4
Name: descant
Version: 0.2.0
License-Expression: Apache-2.0
Requires-Python: >=3.11
Requires-Dist: torch>=2.7
Requires-Dist: transformers<6,>=5.19
Provides-Extra: cli
Requires-Dist: rich>=13; extra == 'cli'
Provides-Extra: serve
Requires-Dist: Starlette>=0.46; extra == 'serve'
Requires-Dist: uvloop>=0.21; (sys_platform != 'win32') and extra == 'serve'

The long description.
"""
PARSED = HeaderParser().parsestr(METADATA)


def test_the_bill_of_materials_is_the_metadata() -> None:
    bill = bill_of_materials(METADATA)
    assert bill == bill_of_materials(METADATA)
    assert {part["name"]: part["scope"] for part in bill["components"]} == {
        "rich": "optional",
        "starlette": "optional",
        "torch": "required",
        "transformers": "required",
        "uvloop": "optional",
    }
    assert builds.sbom_differences(PARSED, bill) == []


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda bill: bill["components"].pop(), "requirements"),
        (
            lambda bill: bill["components"][0]["properties"][0].update(value="rich>=12; extra == 'cli'"),
            "requirements",
        ),
        (lambda bill: bill["metadata"]["component"].update(version="0.1.0"), "package"),
    ],
)
def test_a_bill_that_says_something_else_is_found(change: Any, what: str) -> None:
    bill = copy.deepcopy(bill_of_materials(METADATA))
    change(bill)
    assert [text.partition(":")[0] for text in builds.sbom_differences(PARSED, bill)] == [what]


def test_the_recipe_has_what_the_metadata_and_the_command_require() -> None:
    template = yaml.safe_load(recipe.RECIPE.read_text(encoding="utf-8"))
    written = recipe.complete(template, PARSED, "0" * 64)
    assert written["context"] == {"name": "descant", "version": "0.2.0", "python_min": "3.11"}
    assert written["source"]["sha256"] == "0" * 64
    assert written["requirements"]["run"] == [
        "python >=${{ python_min }}",
        "pytorch >=2.7",
        "transformers >=5.19,<6",
        "rich >=13",
    ]
    modules = re.findall(
        r'"(descant[\w.]*)"', (ROOT / "tools/docs/public_face.py").read_text(encoding="utf-8")
    )
    assert set(template["tests"][0]["python"]["imports"]) <= set(modules)


@pytest.mark.parametrize(
    ("metadata", "found", "allowed"),
    [
        ({"license_expression": "MIT AND PSF-2.0"}, ["MIT AND PSF-2.0"], True),
        ({"license_expression": "Apache-2.0 OR GPL-3.0-only"}, ["Apache-2.0", "GPL-3.0-only"], True),
        ({"license_expression": "MIT AND GPL-3.0-only"}, ["MIT AND GPL-3.0-only"], False),
        ({"classifier": ["License :: OSI Approved :: BSD License"], "license": "UNKNOWN"}, ["BSD"], True),
        ({"license": "Apache License\nVersion 2.0, January 2004"}, ["Apache-2.0"], True),
        ({"classifier": ["License :: Other/Proprietary License"]}, ["Other/Proprietary License"], False),
        ({"license": "GPLv3"}, ["GPLv3"], False),
        ({}, ["none"], False),
    ],
)
def test_a_licence_is_read_and_judged(metadata: dict[str, Any], found: list[str], allowed: bool) -> None:
    assert licences.licences({"name": "package", **metadata}) == found
    assert licences.allowed(found) is allowed


def test_the_image_has_the_files_that_its_build_reads() -> None:
    steps = list(image.instructions((ROOT / "deploy/Dockerfile").read_text(encoding="utf-8"), "cpu"))
    assert [keyword for keyword, _ in steps if keyword in {"ENTRYPOINT", "RUN"}] == [
        "RUN",
        "RUN",
        "ENTRYPOINT",
    ]
    copied = {name for keyword, rest in steps if keyword == "COPY" for name in rest.split()[:-1]}
    assert {"pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "constraints.txt", "src"} <= copied
    assert [name for name in copied if not (ROOT / name).exists()] == []


def test_the_commands_of_the_steps_are_there() -> None:
    text = (ROOT / "RELEASING.md").read_text(encoding="utf-8")
    commands = set(re.findall(r"python -m tools\.release\.(\w+)", text))
    files = {path.stem for path in (ROOT / "tools" / "release").glob("*.py")} - {"__init__"}
    assert commands == files
