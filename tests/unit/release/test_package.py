"""What is published: the wheel, the source distribution, and the page that PyPI shows of them."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
import yaml
from hatchling.builders.sdist import SdistBuilder
from markdown_it import MarkdownIt

import descant

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
URLS: dict[str, str] = PROJECT["urls"]


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> Message:
    """The metadata of a wheel of this checkout."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        kernels = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.cpp")}
        assert kernels
        assert kernels <= {*archive.namelist()}
        [name] = [one for one in archive.namelist() if one.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def rendered(metadata: Message) -> str:
    """The long description as HTML."""
    text = metadata.get_payload()
    assert isinstance(text, str)
    return str(MarkdownIt("commonmark").enable("table").render(text))


def targets(html: str) -> list[str]:
    return re.findall(r'(?:href|src)="([^"]*)"', html)


def test_the_long_description_has_absolute_links_only(metadata: Message) -> None:
    html = rendered(metadata)
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "<img" in html
    assert len(targets(html)) > 30
    assert [target for target in targets(html) if not target.startswith("https://")] == []


def test_its_links_lead_to_pages_that_are_built(metadata: Message) -> None:
    pages = [
        target.removeprefix(f"{URLS['Documentation']}latest/").partition("#")[0]
        for target in targets(rendered(metadata))
        if target.startswith(URLS["Documentation"])
    ]
    assert len(pages) > 30

    def source(page: str) -> Path:
        if page and not page.endswith("/"):
            return ROOT / "docs" / page
        folder = ROOT / "docs" / page
        return folder / "index.md" if (folder / "index.md").exists() else folder.with_suffix(".md")

    assert [page for page in pages if not source(page).exists()] == []


def test_its_links_to_the_source_name_files(metadata: Message) -> None:
    start = f"{URLS['Source']}/blob/main/"
    files = [one.removeprefix(start) for one in targets(rendered(metadata)) if one.startswith(start)]
    assert {"CHANGELOG.md", "CONTRIBUTING.md"} <= set(files)
    assert [name for name in files if not (ROOT / name).exists()] == []


def test_the_source_distribution_has_what_a_packager_needs() -> None:
    names = {file.distribution_path for file in SdistBuilder(str(ROOT)).recurse_included_files()}
    top = {"LICENSE", "README.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "RELEASING.md", "CITATION.cff"}
    scripts = {".ci/run", ".ci/versions", ".github/workflows/ci.yml"}
    wanted = {*top, *scripts, "hatch_build.py", "constraints.txt", "mkdocs.yml"}
    assert wanted - names == set()
    assert not [name for name in names if name.startswith(("models/", "site/", ".venv/"))]


class PlainLoader(yaml.SafeLoader):
    """A loader that reads tags of mkdocs as plain text."""


PlainLoader.add_multi_constructor("", lambda loader, suffix, node: suffix)


def read_yaml(name: str) -> Any:
    return yaml.load((ROOT / name).read_text(encoding="utf-8"), PlainLoader)


def test_the_site_has_the_same_addresses() -> None:
    site = read_yaml("mkdocs.yml")
    assert site["site_url"] == URLS["Documentation"]
    assert site["repo_url"] == URLS["Source"]


def test_the_citation_is_of_this_version() -> None:
    citation = read_yaml("CITATION.cff")
    assert citation["version"] == descant.__version__
    assert citation["repository-code"] == URLS["Source"]
    assert citation["url"] == URLS["Documentation"]
    assert citation["license"] == PROJECT["license"]
    assert citation["keywords"] == PROJECT["keywords"]
