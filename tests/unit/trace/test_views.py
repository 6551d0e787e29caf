"""The page's views, as far as their files can be read: what they share with other pictures, their colours."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

import pytest

from descant.trace.pictures.text import SHADE_LEVELS
from descant.trace.trace_data import PICTURES

VIEWS = ("text", "processors", "speculation", "beside")
SCRIPTS = ("token.js", *(f"{name}.js" for name in VIEWS))
AA = 4.5  # the contrast that WCAG asks of a text


@cache
def asset(name: str) -> str:
    return (files("descant.trace.pictures") / "assets" / name).read_text("utf-8")


def colours(dark: bool) -> dict[str, str]:
    """The custom properties of the page's colours, those of a dark screen above the others."""
    found: dict[str, str] = {}
    for name in ("page.css", "views.css"):
        blocks = re.findall(r":root \{(.*?)\}", asset(name), re.DOTALL)
        assert len(blocks) == 2
        for block in blocks[: 2 if dark else 1]:
            found.update(re.findall(r"--([\w-]+): ([^;]+);", block))
    return found


def light(colour: str) -> float:
    """The relative luminance of "#rrggbb"."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)


# ------------------------------------------------------------------------ what is shared
def test_each_picture_has_a_view_of_its_name() -> None:
    named = [re.findall(r'descant\.view\(\{\s*name: "(\w+)"', asset(f"{name}.js")) for name in VIEWS]
    assert named == [[name] for name in PICTURES if name != "tree"]


def test_shades_are_those_of_the_other_pictures() -> None:
    found = [float(one) for one in re.findall(r"\{ from: ([\d.]+), label", asset("token.js"))]
    assert found == [least for least, _ in SHADE_LEVELS]


# ------------------------------------------------------------------------ rules that a style must not miss
def test_every_property_that_is_used_is_set() -> None:
    styles = asset("page.css") + asset("views.css")
    scripts = "".join(map(asset, SCRIPTS))
    known = set(re.findall(r"--([\w-]+):", styles)) | set(re.findall(r'setProperty\("--([\w-]+)"', scripts))
    assert set(re.findall(r"var\(--([\w-]+)", asset("views.css"))) <= known


def test_every_shade_has_a_colour_and_a_line_of_its_own() -> None:
    lines = dict(
        re.findall(r'\.tok\[data-shade="(\d)"\] \.ink \{[^}]*decoration-style: (\w+)', asset("views.css"))
    )
    assert sorted(lines) == ["1", "2", "3", "4"]
    assert len(set(lines.values())) == 4
    for dark in (False, True):
        assert len({colours(dark)[f"shade-{at}"] for at in range(5)}) == 5


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_texts_stand_out_from_what_is_behind_them(dark: bool) -> None:
    of = colours(dark)
    shades = [of[f"shade-{at}"] for at in range(1, 5)]
    pairs = [(of["ink"], ground) for ground in (*shades, of["guess"], of["card"], of["paper"])]
    pairs += [(of[name], of[ground]) for name in ("soft", "good", "bad") for ground in ("card", "paper")]
    pairs += [(of["accent"], of["accent-soft"]), (of["soft"], of["guess"])]
    # What stands for something else is pale, and yet it can be read on every shade.
    pairs += [(of["shade-mark"], ground) for ground in shades]
    assert {pair: contrast(*pair) for pair in pairs if contrast(*pair) < AA} == {}


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_bars_stand_out_from_their_ground(dark: bool) -> None:
    of = colours(dark)
    assert min(contrast(of[name], of["card"]) for name in ("bar", "bar-mid", "shade-line", "guess-line")) >= 3
