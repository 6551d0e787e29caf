"""The charts of the page on scheduling: every figure is in them, each line has its points, and they fit."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from tools.docs import scheduling_charts
from tools.docs.doc_blocks import ROOT
from tools.docs.scheduling_charts import CHARTS, fill_page, height, load_data, svg
from tools.simulate.cost_model import load_costs

PAGE = (ROOT / "docs" / "guide" / "scheduling.md").read_text(encoding="utf-8")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", CHARTS)
def test_every_point_is_drawn_at_its_value(name):
    tree = ElementTree.fromstring(svg(name, load_data()))
    panels = CHARTS[name][1](load_data())
    lines = list(tree.iter(f"{SVG}polyline"))
    expected = [(panel, values) for panel in panels for values in panel.lines.values()]
    assert len(lines) == len(expected)
    for line, (panel, values) in zip(lines, expected, strict=True):
        points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
        assert [y for _, y in points] == pytest.approx([height(panel, value) for value in values], abs=0.06)
        assert [x for x, _ in points] == sorted(x for x, _ in points)
        assert len(points) == len(panel.ticks)


def test_the_page_has_every_chart_once_and_says_that_they_are_simulated():
    marks = re.findall(r"<!-- scheduling: ([\w-]+) -->", PAGE)
    assert sorted(marks) == sorted(CHARTS)
    filled = fill_page(PAGE)
    assert "<!-- scheduling" not in filled
    assert filled.count("<svg") == len(CHARTS)
    assert "simulated" in PAGE
    with pytest.raises(ValueError, match="a chart must be one of load, chunk, policy, got 'none'"):
        fill_page("<!-- scheduling: none -->")
    assert scheduling_charts.on_page_markdown("no chart") == "no chart"


def test_the_page_has_the_figures_of_the_cost_models():
    costs = load_costs()
    h100, cpu = costs["h100"], costs["cpu"]
    assert (
        f"| {1e3 * h100.step:.1f} ms | {1e6 * h100.prompt_token:.1f} µs | {1e6 * h100.decode_row:.1f} µs "
        f"| {1e9 * h100.kv_token:.1f} ns |" in PAGE
    )
    assert (
        f"| {1e3 * cpu.step:.0f} ms | {1e3 * cpu.prompt_token:.1f} ms | {1e3 * cpu.decode_row:.1f} ms "
        f"| {1e6 * cpu.kv_token:.1f} µs |" in PAGE
    )
    longer = [cost.seconds(128, 8, 4000) / cost.seconds(0, 8, 4000) for cost in (h100, cpu)]
    assert f"takes {longer[0]:.1f} times as long" in PAGE
    assert f"{longer[1]:.1f} times on the CPU" in PAGE
