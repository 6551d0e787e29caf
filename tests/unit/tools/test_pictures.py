"""The pictures of the guide: one per sampler, as it is computed, and legible."""

import math
import re
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from descant.decoding.pipeline import DEFAULT_ORDER, LOGITS_WARPERS
from tools.docs import pictures
from tools.docs.doc_blocks import ROOT

PAGE = (ROOT / "docs" / "guide" / "shape.md").read_text(encoding="utf-8")
SVG = "{http://www.w3.org/2000/svg}"


def example() -> list[float]:
    """The probabilities of the example, in float64."""
    scores = [3.4 * math.exp(-((place / 6) ** 1.4)) - 0.02 * place for place in range(20)]
    total = math.fsum(math.exp(score) for score in scores)
    return [math.exp(score) / total for score in scores]


P = example()
ENTROPY = -math.fsum(p * math.log(p) for p in P)


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_the_drawing_says_what_is_kept_and_can_be_read(name: str) -> None:
    made = pictures.shape(name)
    assert made.before == pytest.approx(P, abs=1e-6)
    root = ElementTree.fromstring(pictures.svg(name))
    bars = root.findall(f".//{SVG}rect")
    assert [one.get("class") for one in bars] == [("cut", "kept")[law > 0] for law in made.after]
    for one, old, new in zip(bars, made.before, made.after, strict=True):
        height = float(one.attrib["height"])
        assert height == pytest.approx(100 * pictures.PERCENT * (new or old), abs=0.01)
        assert float(one.attrib["y"]) + height == pytest.approx(pictures.GROUND, abs=0.02)

    numbers = [text for text in root.findall(f".//{SVG}text") if text.get("class") == "number"]
    assert len(numbers) == sum(law > 0 for law in made.after)
    # A digit at that size is at most 6.5 wide, and nothing above the bars may reach the two lines of words.
    assert all(len(text.text or "") * 6.5 < pictures.PITCH for text in numbers)
    words = pictures.WIDTH - 20 - 8 * max(len(pictures.setting(name)), 46)
    assert all(float(one.attrib["y"]) > 48 for one in numbers if float(one.attrib["x"]) > words)
    assert all(float(one.attrib["y"]) > 12 for one in numbers)

    title, desc = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    assert title is not None
    assert desc is not None
    assert root.get("aria-labelledby") == f"{title.get('id')} {desc.get('id')}"
    assert (desc.text or "").count("cut") == sum(law == 0 for law in made.after)


def test_every_sampler_has_a_picture_and_every_picture_a_place() -> None:
    samplers = {stage.name for stage in LOGITS_WARPERS} - {"renormalize_logits", "watermarking_config"}
    assert samplers <= pictures.PICTURES.keys()
    marks = [mark["name"] for mark in pictures.MARK.finditer(PAGE) if mark["name"]]
    assert sorted(marks) == sorted(pictures.PICTURES)


def test_every_field_of_the_chain_is_explained() -> None:
    prose = re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)
    named = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", prose))))
    assert [name for name in DEFAULT_ORDER if name not in named] == []


def test_the_page_says_what_temperature_the_dynamic_one_is() -> None:
    share = ENTROPY / math.log(20)
    assert f"entropy is {share:.0%} of".replace("%", " %") in PAGE.replace("\n", " ")
    assert f"the temperature is {0.2 + 1.6 * share:.2f}" in PAGE.replace("\n", " ")


def test_the_hook_puts_pictures_and_the_order_in_their_place() -> None:
    page = pictures.on_page_markdown(PAGE, page=SimpleNamespace(), config={}, files=[])
    assert "<!--" not in page
    assert page.count("<figure") == page.count("</svg>\n</figure>") == len(pictures.PICTURES)
    table = pictures.order().splitlines()[2:]
    assert [line.split("`")[1] for line in table] == list(DEFAULT_ORDER)
    assert pictures.order() in page
    assert pictures.on_page_markdown("# Nothing <!-- else -->") == "# Nothing <!-- else -->"
