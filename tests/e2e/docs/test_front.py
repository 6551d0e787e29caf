"""The front door: the README's picture is the library's own, and the chooser leads to every method's page."""

from __future__ import annotations

import re
from pathlib import Path

from tools.docs import doc_blocks, readme_picture

ROOT = doc_blocks.ROOT
GUIDE = ROOT / "docs" / "guide"
# Pages about how it is built, measured or named, and those that are choosers themselves.
OTHERS = re.compile(
    r"(architecture|choose|command-line|devices|errors|glossary|migrate(-\d)?|performance|reliability|stability|works-with|\w+-by-example)\.md"
)


def links(path: Path) -> set[str]:
    """The pages that a page links to, without their anchors."""
    return {
        target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8"))
    }


def test_the_chooser_leads_to_every_page_about_decoding() -> None:
    pages = {page.name for page in GUIDE.glob("*.md") if not OTHERS.fullmatch(page.name)}
    assert len(pages) > 15
    assert pages - links(GUIDE / "choose.md") == set()


def test_every_file_that_the_readme_links_to_is_there() -> None:
    named = {target for target in links(ROOT / "README.md") if "://" not in target}
    assert len(named) > 20
    assert [target for target in named if not (ROOT / target).exists()] == []


def test_the_glossary_is_in_order() -> None:
    words = re.findall(r"^\| ([^|]+?) \|", (GUIDE / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)[
        1:
    ]
    words = [word for word in words if not word.startswith("-")]
    assert len(words) > 40
    assert words == sorted(words, key=str.casefold)


def test_the_first_example_is_short() -> None:
    [first, *_] = [block for block in doc_blocks.read(ROOT / "README.md") if block.language == "python"]
    lines = [line for line in first.text.splitlines() if line and not line.startswith(("import ", "from "))]
    assert len(lines) <= 6


def test_the_picture_in_the_readme_is_of_its_first_example() -> None:
    """Made by tools/docs/readme_picture.py; scores may differ in the last place between machines."""

    def without_scores(picture: str) -> str:
        return re.sub(r"\u2212\d+\.\d\d", "", picture)

    kept = readme_picture.PICTURE.read_text(encoding="utf-8")
    assert len(re.findall(r"\u2212\d+\.\d\d", kept)) > 10
    assert without_scores(readme_picture.draw()) == without_scores(kept)
