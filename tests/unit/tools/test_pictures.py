"""The pictures of the guide: one per sampler, equal to a simple reference, and legible."""

import math
import re
from collections.abc import Sequence
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


def scaled(temperature: float) -> list[float]:
    return normal([p ** (1 / temperature) for p in P])


def normal(weights: Sequence[float]) -> list[float]:
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def cut(keep: Sequence[bool]) -> list[float]:
    return normal([p if stays else 0.0 for p, stays in zip(P, keep, strict=True)])


def first(count: int) -> list[float]:
    return cut([place < count for place in range(20)])


def reaching(order: Sequence[int], mass: float) -> list[float]:
    kept: set[int] = set()
    for place in order:
        kept.add(place)
        if math.fsum(P[one] for one in kept) >= mass:
            break
    return cut([place in kept for place in range(20)])


def entropic(share: float) -> list[float]:
    terms = [-p * math.log(p) for p in P]
    return first(sum(math.fsum(terms[: place + 1]) <= share * ENTROPY for place in range(20)))


def within(sigmas: float) -> list[float]:
    scores = [math.log(p) for p in P]
    mean = math.fsum(scores) / 20
    spread = math.sqrt(math.fsum((score - mean) ** 2 for score in scores) / 20)
    return cut([score >= max(scores) - sigmas * spread for score in scores])


def near(target: float, law: Sequence[float]) -> list[float]:
    far = [abs(p - target) / 0.3 for p in law]
    weights = [math.exp(-10 * d * d / (1 + d)) if p else 0.0 for p, d in zip(law, far, strict=True)]
    return normal(weights)


EXPECTED = {
    "before": P,
    "temperature": scaled(0.6),
    "temperature-hot": scaled(1.6),
    "dynamic_temperature_range": scaled(0.2 + 1.6 * ENTROPY / math.log(20)),
    "top_k": first(5),
    "top_p": reaching(range(20), 0.75),
    "min_p": cut([p >= 0.1 * max(P) for p in P]),
    "typical_p": reaching(sorted(range(20), key=lambda at: abs(-math.log(P[at]) - ENTROPY)), 0.5),
    "epsilon_cutoff": cut([p >= 0.02 for p in P]),
    "eta_cutoff": cut([p >= min(0.05, math.sqrt(0.05) * math.exp(-ENTROPY)) for p in P]),
    "top_h": entropic(0.5),
    "top_n_sigma": within(1.0),
    "p_less": cut([p >= math.fsum(q * q for q in P) for p in P]),
    "xtc_probability": cut([p <= min(q for q in P if q >= 0.1) for p in P]),
    "mirostat_tau": cut([-math.log2(p) <= 4.0 for p in P]),
    "adaptive_p_target": near(0.1, cut([p >= 0.05 * max(P) for p in P])),
}


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_shows_what_the_reference_keeps(name: str) -> None:
    made = pictures.shape(name)
    assert made.before == pytest.approx(P, abs=1e-6)
    assert made.after == pytest.approx(EXPECTED[name], abs=1e-6)
    assert [one > 0 for one in made.after] == [one > 0 for one in EXPECTED[name]]


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_the_drawing_says_the_same_and_can_be_read(name: str) -> None:
    root = ElementTree.fromstring(pictures.svg(name))
    bars = root.findall(f".//{SVG}rect")
    assert [one.get("class") for one in bars] == [("cut", "kept")[law > 0] for law in EXPECTED[name]]
    for one, old, new in zip(bars, P, EXPECTED[name], strict=True):
        height = float(one.attrib["height"])
        assert height == pytest.approx(100 * pictures.PERCENT * (new or old), abs=0.01)
        assert float(one.attrib["y"]) + height == pytest.approx(pictures.GROUND, abs=0.02)

    numbers = [text for text in root.findall(f".//{SVG}text") if text.get("class") == "number"]
    assert len(numbers) == sum(law > 0 for law in EXPECTED[name])
    # A digit at that size is at most 6.5 wide, and nothing above the bars may reach the two lines of words.
    assert all(len(text.text or "") * 6.5 < pictures.PITCH for text in numbers)
    words = pictures.WIDTH - 20 - 8 * max(len(pictures.setting(name)), 46)
    assert all(float(one.attrib["y"]) > 48 for one in numbers if float(one.attrib["x"]) > words)
    assert all(float(one.attrib["y"]) > 12 for one in numbers)

    title, desc = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    assert title is not None
    assert desc is not None
    assert root.get("aria-labelledby") == f"{title.get('id')} {desc.get('id')}"
    assert (desc.text or "").count("cut") == sum(law == 0 for law in EXPECTED[name])


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


def test_an_unknown_picture_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"must be one of before, .* got 'top_q'"):
        pictures.fill_page("<!-- picture: top_q -->")


def test_the_ids_of_a_page_are_unique() -> None:
    ids = re.findall(r'id="([^"]+)"', pictures.fill_page(PAGE))
    assert len(ids) == len(set(ids)) == 2 * len(pictures.PICTURES)
