"""The charts of the page "Scheduling", drawn from the simulated figures in `tools/simulate/sweeps.json`.

    python tools/docs/scheduling_charts.py FOLDER       write every chart to this folder

As a mkdocs hook it replaces the comments `<!-- scheduling: NAME -->` of the page. To make the figures again:
`python -m tools.simulate sweep`.
"""

import argparse
import html
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SWEEPS = Path(__file__).resolve().parents[1] / "simulate" / "sweeps.json"
MARK = re.compile(r"<!-- scheduling: (?P<name>[\w-]+) -->")

# Layout in units of the view box: two panels beside each other.
WIDTH, HEIGHT = 640, 236
LEFT, PANEL, GAP = 46, 248, 64
TOP, GROUND = 44, 178

DASHES = ("", "5 3", "1.5 3")
STYLE = """<style>
svg { color: #1f2328; --md-default-bg-color: #fff; background: var(--md-default-bg-color) }
@media (prefers-color-scheme: dark) { svg { color: #e6edf3; --md-default-bg-color: #0d1117 } }
</style>"""


@dataclass(frozen=True)
class Panel:
    """Lines over one x axis."""

    title: str
    x_label: str
    ticks: tuple[str, ...]  # of the x axis
    lines: Mapping[str, Sequence[float]]
    log: bool = False
    places: tuple[float, ...] = ()  # of the ticks; empty: equally far from each other

    def left_of(self, at: int) -> float:
        """How far a tick is from the left, as a share of the width."""
        places = self.places or tuple(range(len(self.ticks)))
        return (places[at] - places[0]) / ((places[-1] - places[0]) or 1)


def load_panels(data: Mapping[str, Any]) -> tuple[Panel, Panel]:
    """Wait for the first token, and good answers, over the load."""
    load = data["load"]
    rates = tuple(point["rate"] for point in load["Poisson"])
    ticks = tuple(map(str, rates))
    waits = {
        "median": [point["first_token"]["p50"] for point in load["Poisson"]],
        "99 %": [point["first_token"]["p99"] for point in load["Poisson"]],
        "99 %, bursts": [point["first_token"]["p99"] for point in load["bursts"]],
    }
    good = {name: [point["goodput"] for point in points] for name, points in load.items()}
    return (
        Panel("wait for the first token, s", "requests a second", ticks, waits, log=True, places=rates),
        Panel("good answers a second", "requests a second", ticks, good, places=rates),
    )


def chunk_panels(data: Mapping[str, Any]) -> tuple[Panel, Panel]:
    """Time between tokens, and wait for the first, over the tokens of a step."""
    points = data["chunk"]
    ticks = tuple(short(point["tokens"]) for point in points)
    between = {
        "99 %": [1000 * point["between_tokens"]["p99"] for point in points],
        "median": [1000 * point["between_tokens"]["p50"] for point in points],
    }
    first = {
        "99 %": [point["first_token"]["p99"] for point in points],
        "median": [point["first_token"]["p50"] for point in points],
    }
    return (
        Panel("time between tokens, ms", "tokens of a step", ticks, between, log=True),
        Panel("wait for the first token, s", "tokens of a step", ticks, first, log=True),
    )


def policy_panels(data: Mapping[str, Any]) -> tuple[Panel, Panel]:
    """Good answers, and the wait of the most urgent, over the load, by preemption policy."""
    policies = data["policy"]
    ticks = tuple(str(point["rate"]) for point in policies["never"])
    good = {name: [point["goodput"] for point in points] for name, points in policies.items()}
    urgent = {
        name: [point["first_token_by_level"][0] for point in points] for name, points in policies.items()
    }
    return (
        Panel("good answers a second", "requests a second", ticks, good),
        Panel("wait of the most urgent third, 99 %, s", "requests a second", ticks, urgent, log=True),
    )


CHARTS: Mapping[str, tuple[str, Callable[[Mapping[str, Any]], tuple[Panel, Panel]]]] = {
    "load": ("Simulated: wait and good answers over the load", load_panels),
    "chunk": ("Simulated: latency over the tokens of a step", chunk_panels),
    "policy": ("Simulated: preemption policies with a small pool", policy_panels),
}


def short(tokens: int | None) -> str:
    """A number of tokens for a tick."""
    if tokens is None:
        return "whole"
    return f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)


def number(value: float) -> str:
    """A value for a label: two digits that count."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}" if value >= 10 else f"{value:.2g}"


def axis(panel: Panel) -> list[float]:
    """The values at which a panel has a line: from the smallest to the largest that are round."""
    values = [value for line in panel.lines.values() for value in line]
    if panel.log:
        low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        return [10.0**power for power in range(low, max(high, low + 1) + 1)]
    top = max(values)
    step = 10 ** math.floor(math.log10(top))
    step = next(size * step for size in (0.1, 0.2, 0.25, 0.5, 1, 2) if top / (size * step) <= 5)
    return [step * at for at in range(math.ceil(top / step) + 1)]


def height(panel: Panel, value: float) -> float:
    """Where a value is on the y axis of its panel."""
    marks = axis(panel)
    if panel.log:
        share = math.log10(value / marks[0]) / math.log10(marks[-1] / marks[0])
    else:
        share = value / marks[-1]
    return GROUND - share * (GROUND - TOP)


def draw_panel(panel: Panel, left: float) -> list[str]:
    """One panel: its grid, its lines with a dot at each point, and their names."""
    parts = [f'<text x="{left}" y="16" font-size="12">{html.escape(panel.title)}</text>']
    for mark in axis(panel):
        y = height(panel, mark)
        parts.append(
            f'<line x1="{left}" x2="{left + PANEL}" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" '
            f'opacity="{0.5 if mark == axis(panel)[0] else 0.13}"/>'
            f'<text x="{left - 6}" y="{y + 3.5:.1f}" text-anchor="end">{number(mark)}</text>'
        )
    for at, tick in enumerate(panel.ticks):
        parts.append(
            f'<text x="{left + PANEL * panel.left_of(at):.1f}" y="{GROUND + 15}" text-anchor="middle" '
            f'opacity="0.75">{html.escape(tick)}</text>'
        )
    parts.append(
        f'<text x="{left + PANEL / 2}" y="{GROUND + 30}" text-anchor="middle" opacity="0.75">'
        f"{html.escape(panel.x_label)}</text>"
    )
    for place, (name, values) in enumerate(panel.lines.items()):
        points = [(left + PANEL * panel.left_of(at), height(panel, value)) for at, value in enumerate(values)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        colour = 'style="stroke:var(--md-accent-fg-color, #526cfe)"' if not place else 'stroke="currentColor"'
        dash = f' stroke-dasharray="{DASHES[place]}"' if DASHES[place] else ""
        key = left + place * PANEL / 3
        parts.append(
            f'<polyline class="line" fill="none" {colour} stroke-width="2"{dash} points="{path}"/>'
            f'<line x1="{key}" x2="{key + 16}" y1="{GROUND + 45}" y2="{GROUND + 45}" {colour} '
            f'stroke-width="2"{dash}/><text class="key" x="{key + 20}" y="{GROUND + 48.5}">'
            f"{html.escape(name)}</text>"
        )
    return parts


def svg(name: str, data: Mapping[str, Any], style: str = "") -> str:
    """A chart of two panels; its description has every figure."""
    title, make = CHARTS[name]
    panels = make(data)
    listed = " ".join(
        f"{panel.title}: "
        + "; ".join(
            f"{line} "
            + ", ".join(f"{tick}: {number(value)}" for tick, value in zip(panel.ticks, values, strict=True))
            for line, values in panel.lines.items()
        )
        + "."
        for panel in panels
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'aria-labelledby="{name}-title {name}-desc" width="{WIDTH}" height="{HEIGHT}" '
            'style="max-width:100%;height:auto">',
            f'<title id="{name}-title">{html.escape(title)}</title>',
            f'<desc id="{name}-desc">{html.escape(listed)}</desc>',
            *([style] if style else []),
            '<g font-family="system-ui, sans-serif" font-size="10" fill="currentColor">',
            *draw_panel(panels[0], LEFT),
            *draw_panel(panels[1], LEFT + PANEL + GAP),
            "</g>",
            "</svg>",
        ]
    )


def load_data() -> dict[str, Any]:
    """The committed figures."""
    data: dict[str, Any] = json.loads(SWEEPS.read_text(encoding="utf-8"))
    return data


def fill_page(text: str) -> str:
    """A page's Markdown with its comments replaced by charts."""

    def replacement(mark: re.Match[str]) -> str:
        if mark["name"] not in CHARTS:
            raise ValueError(f"a chart must be one of {', '.join(CHARTS)}, got {mark['name']!r}")
        chart = svg(mark["name"], load_data())
        return f'<figure data-search-exclude style="margin-left:0">\n{chart}\n</figure>'

    return MARK.sub(replacement, text)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for every page."""
    return fill_page(markdown)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name in CHARTS:
        (folder / f"{name}.svg").write_text(svg(name, load_data(), STYLE) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
