"""The pictures and the table of the page "Shape the distribution", computed with the real processors.

    python tools/docs/pictures.py FOLDER       write every picture to this folder

As a mkdocs hook it replaces the comments `<!-- picture: NAME -->` and `<!-- order -->` of the pages, so that
no generated picture is part of the checkout.
"""

import argparse
import html
import itertools
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from descant.config.generation_config import GenerationConfig
from descant.core.context import Context, PromptInfo
from descant.decoding.pipeline import (
    CUSTOM,
    LOGITS_PROCESSORS,
    LOGITS_WARPERS,
    PROCESSOR_SPECS,
    ProcessorSpec,
)

TOKENS = 20

# The config of each picture, besides `do_sample=True, top_k=0`; the page has one comment for each.
PICTURES: Mapping[str, Mapping[str, Any]] = {
    "before": {},
    "temperature": {"temperature": 0.6},
    "temperature-hot": {"temperature": 1.6},
    "dynamic_temperature_range": {"temperature": 1.0, "dynamic_temperature_range": 0.8},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.75},
    "min_p": {"min_p": 0.1},
    "typical_p": {"typical_p": 0.5},
    "epsilon_cutoff": {"epsilon_cutoff": 0.02},
    "eta_cutoff": {"eta_cutoff": 0.05},
    "top_h": {"top_h": 0.5},
    "top_n_sigma": {"top_n_sigma": 1.0},
    "p_less": {"p_less": True},
    "xtc_probability": {"xtc_probability": 1.0, "xtc_threshold": 0.1},
    "mirostat_tau": {"mirostat_tau": 2.0},
    "adaptive_p_target": {"min_p": 0.05, "adaptive_p_target": 0.1},
}

# Layout in units of the view box: 29 per token horizontally, 2.2 per percent vertically.
WIDTH, HEIGHT = 640, 200
LEFT, PITCH, BAR = 42, 29, 19
GROUND, PERCENT = 162, 2.2

STYLE = """<style>
svg { color: #1f2328; --md-default-bg-color: #fff; background: var(--md-default-bg-color) }
@media (prefers-color-scheme: dark) { svg { color: #e6edf3; --md-default-bg-color: #0d1117 } }
</style>"""

HALO = "paint-order:stroke;stroke:var(--md-default-bg-color, #fff);stroke-width:3px"  # around numbers

MARK = re.compile(r"<!-- (?:picture: (?P<name>[\w-]+)|(?P<order>order)) -->")


@dataclass(frozen=True)
class Shape:
    """The effect of a config on the example: each token's probability before and after, 0 where it is cut."""

    before: list[float]
    after: list[float]

    @property
    def kept(self) -> int:
        """The number of tokens that remain."""
        return sum(one > 0 for one in self.after)

    @property
    def mass(self) -> float:
        """The total probability of these tokens before."""
        return sum(old for old, new in zip(self.before, self.after, strict=True) if new > 0)


def example() -> Tensor:
    """The scores of every picture: a head, a slope and a long tail [1, V]."""
    place = torch.arange(float(TOKENS))
    return (3.4 * torch.exp(-((place / 6) ** 1.4)) - 0.02 * place)[None]


def shape(name: str) -> Shape:
    """The effect of a picture's config on the example, at the first step of a row."""
    config = GenerationConfig(do_sample=True, **{"top_k": 0, **PICTURES[name]})
    ids, scores = torch.zeros(1, 1, dtype=torch.long), example()
    before = scores.softmax(-1)
    for spec in PROCESSOR_SPECS:
        if spec.is_enabled(config):
            params = {"min_tokens_to_keep": 1, **spec.processor.params_from_config(config, PromptInfo(1))}
            scores = spec.processor.process(Context.standalone(ids, params), scores)
    return Shape(before[0].tolist(), scores.softmax(-1)[0].tolist())


def setting(name: str) -> str:
    """A picture's config, as keyword arguments."""
    shown = PICTURES[name] or {"do_sample": True, "top_k": 0}
    return ", ".join(f"{field}={value}" for field, value in shown.items())


def svg(name: str, style: str = "") -> str:
    """A picture: solid bars are new probabilities, hollow bars cut tokens, ticks the old probabilities."""
    made = shape(name)
    share = "all" if made.kept == TOKENS else f"{made.kept} of {TOKENS}"
    mass = "" if made.kept == TOKENS else f", {100 * made.mass:.0f} % of the probability"
    caption = f"keeps {share} tokens{mass}"
    listed = ", ".join(
        f"{rank}: {number(new)}" if new > 0 else f"{rank}: cut" for rank, new in enumerate(made.after, 1)
    )
    bars = [bar(at, *pair) for at, pair in enumerate(zip(made.before, made.after, strict=True))]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'aria-labelledby="{name}-title {name}-desc" width="{WIDTH}" '
            f'height="{HEIGHT}" style="max-width:100%;height:auto">',
            f'<title id="{name}-title">{html.escape(setting(name))}: {caption}</title>',
            f'<desc id="{name}-desc">Probability of each token in percent, by rank. {listed}.</desc>',
            *([style] if style else []),
            '<g font-family="system-ui, sans-serif" font-size="10" fill="currentColor">',
            *grid(),
            f'<text x="{WIDTH - 20}" y="18" text-anchor="end" font-size="13" '
            f'font-family="ui-monospace, monospace">{html.escape(setting(name))}</text>',
            f'<text x="{WIDTH - 20}" y="35" text-anchor="end" font-size="12" opacity="0.75">{caption}</text>',
            *bars,
            f'<text x="{LEFT - 8}" y="{GROUND + 32}" text-anchor="end" opacity="0.75">rank</text>',
            "</g>",
            "</svg>",
        ]
    )


def grid() -> list[str]:
    """Lines at round percentages, and their numbers."""
    lines = []
    for percent in (0, 20, 40):
        y = GROUND - PERCENT * percent
        lines.append(
            f'<line x1="{LEFT - 4}" x2="{WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" '
            f'opacity="{0.6 if percent == 0 else 0.15}"/>'
        )
        lines.append(f'<text x="{LEFT - 8}" y="{y + 3.5:.1f}" text-anchor="end">{percent} %</text>')
    return lines


def bar(at: int, before: float, after: float) -> str:
    """One token: its bar, its number, whether it is kept, and its rank."""
    x, middle = LEFT + PITCH * at + (PITCH - BAR) / 2, LEFT + PITCH * at + PITCH / 2
    old, new = PERCENT * 100 * before, PERCENT * 100 * after
    rank = f'<text x="{middle}" y="{GROUND + 32}" text-anchor="middle" opacity="0.75">{at + 1}</text>'
    dot = f'cx="{middle}" cy="{GROUND + 12}" r="4"'
    if after > 0:
        return (
            f'<rect class="kept" x="{x}" y="{GROUND - new:.2f}" width="{BAR}" height="{new:.2f}" '
            'style="fill:var(--md-accent-fg-color, #526cfe)"/>'
            f'<line class="before" x1="{x - 3}" x2="{x + BAR + 3}" y1="{GROUND - old:.2f}" '
            f'y2="{GROUND - old:.2f}" stroke="currentColor" stroke-width="1.5" opacity="0.7"/>'
            f'<text class="number" x="{middle}" y="{GROUND - max(old, new) - 5:.1f}" text-anchor="middle" '
            f'style="{HALO}">{html.escape(number(after))}</text>'
            f'<circle {dot} style="fill:var(--md-accent-fg-color, #526cfe)"/>{rank}'
        )
    return (
        f'<rect class="cut" x="{x + 0.5}" y="{GROUND - old:.2f}" width="{BAR - 1}" height="{old:.2f}" '
        'fill="none" stroke="currentColor" opacity="0.6"/>'
        f'<circle {dot} fill="none" stroke="currentColor" opacity="0.6"/>{rank}'
    )


def number(probability: float) -> str:
    """A probability in percent, short enough to fit above its bar."""
    percent = 100 * probability
    if percent < 0.05:
        return "<0.1"
    return f"{percent:.1f}" if percent < 9.95 else f"{percent:.0f}"


def order() -> str:
    """The processor order as a table: every processor that a field enables, in the order they run."""
    lines = ["| | field | processor | |", "|---|---|---|---|"]
    entries: list[tuple[ProcessorSpec | None, str]] = [(spec, "") for spec in LOGITS_PROCESSORS]
    entries += [(None, "")] + [(spec, "sampling only") for spec in LOGITS_WARPERS]
    # One field may enable one of several processors.
    groups = itertools.groupby(entries, key=lambda entry: entry[0] and entry[0].name)
    for place, (name, group) in enumerate(groups, 1):
        if name is None:
            lines.append(f"| {place} | `{CUSTOM}` | your own, in the order given | |")
            continue
        specs = list(group)
        kinds = " or ".join(f"`{type(spec.processor).__name__}`" for spec, _ in specs if spec)
        note = "" if name == "renormalize_logits" else specs[0][1]
        lines.append(f"| {place} | `{name}` | {kinds} | {note} |")
    return "\n".join(lines)


def fill_page(text: str) -> str:
    """A page's Markdown with its comments replaced by pictures and the table."""

    def replacement(mark: re.Match[str]) -> str:
        name = mark["name"]
        if name is None:
            return order()
        if name not in PICTURES:
            raise ValueError(f"a picture must be one of {', '.join(PICTURES)}, got {name!r}")
        return f'<figure data-search-exclude style="margin-left:0">\n{svg(name)}\n</figure>'

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
    for name in PICTURES:
        (folder / f"{name}.svg").write_text(svg(name, STYLE) + "\n", encoding="utf-8")
    print(f"{len(PICTURES)} pictures in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
