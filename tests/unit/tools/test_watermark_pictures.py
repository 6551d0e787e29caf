"""The pictures of watermarks: their colours show the token scores, and they are legible."""

import itertools
import re
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from descant.decoding.watermark.report import split_spans
from tools.docs import watermark_pictures

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", watermark_pictures.KEYS)
def test_the_text_has_the_mark_that_the_picture_claims(name: str) -> None:
    found = watermark_pictures.detection(name)
    assert (found.verdict == "marked") == (name != "unmarked")
    assert found.scheme == watermark_pictures.settings(name).scheme
    if name == "passage":
        assert found.span is not None
        # The middle third is the marked one; its edges are found as well as a few tokens can tell.
        overlap = min(found.span[1], 2 * watermark_pictures.TOKENS) - max(
            found.span[0], watermark_pictures.TOKENS
        )
        assert overlap > 0.7 * (found.span[1] - found.span[0])
        assert overlap > 0.6 * watermark_pictures.TOKENS


@pytest.mark.parametrize("name", watermark_pictures.KEYS)
def test_the_drawing_shows_the_token_scores(name: str) -> None:
    found, text = watermark_pictures.detection(name), watermark_pictures.Text.read(name)
    root = ElementTree.fromstring(watermark_pictures.svg(name, watermark_pictures.STYLE))
    drawn = [one for one in root.iter(f"{SVG}g") if one.get("class") in ("for", "against", "even", "none")]
    shown = split_spans(found, text.pieces)
    titles = [one.findtext(f"{SVG}title") for one in drawn]
    for part in shown:
        [title] = part.titles
        sign = "none" if part.level is None else (part.level > 0) - (part.level < 0)
        kind = {"none": "none", -1: "against", 0: "even", 1: "for"}[sign]
        assert drawn[titles.index(title)].get("class") == kind
    # Their texts, joined, are the text: only white space that would begin a line is left out.
    words = "".join(one.findtext(f"{SVG}text") or "" for one in drawn)
    assert "".join("".join(text.pieces).split()) in "".join(words.replace("↵", "").split())
    # No token reaches over the edge, and none lies upon another.
    boxes = [
        (float(one.attrib["y"]), float(one.attrib["x"]), float(one.attrib["textLength"]))
        for one in (group.find(f"{SVG}text") for group in drawn)
        if one is not None
    ]
    assert all(
        x >= watermark_pictures.LEFT and x + width <= watermark_pictures.WIDTH for _, x, width in boxes
    )
    for (row, x, width), (after, follows, _) in itertools.pairwise(boxes):
        assert after > row or follows >= x + width - 0.2
    height = float(root.attrib["height"])
    assert max(row for row, _, _ in boxes) < height
    title, desc = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    assert title is not None
    assert desc is not None
    assert root.get("aria-labelledby") == f"{title.get('id')} {desc.get('id')}"
    assert found.verdict in (title.text or "")


def test_the_hook_puts_pictures_in_their_place() -> None:
    page = "\n\n".join(f"<!-- marked: {name} -->" for name in watermark_pictures.KEYS)
    made = watermark_pictures.on_page_markdown(page, page=SimpleNamespace(), config={}, files=[])
    assert "<!--" not in made
    assert made.count("<figure") == made.count("</svg>\n</figure>") == len(watermark_pictures.KEYS)
    # A blank line would end the HTML for Markdown.
    assert all("\n\n" not in one for one in re.findall(r"<figure.*?</figure>", made, re.DOTALL))
    ids = re.findall(r' id="([^"]+)"', made)
    assert len(ids) == len(set(ids)) == 2 * len(watermark_pictures.KEYS)
    assert (
        watermark_pictures.on_page_markdown("# Nothing <!-- picture: top_k -->")
        == "# Nothing <!-- picture: top_k -->"
    )
    with pytest.raises(ValueError, match=r"a picture must be one of green, unmarked, .* got 'blue'"):
        watermark_pictures.fill_page("<!-- marked: blue -->")
