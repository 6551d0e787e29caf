"""The chart of the page "Speculation": measured acceptance rate of drafts, by position in the draft.

    python tools/docs/acceptance_chart.py FILE       write the chart to a file

As a mkdocs hook it replaces the comment `<!-- acceptance -->` of the page by the chart. It decodes with the
models of `tools/models.py`; if a model is missing the page says so, and a strict build fails.
"""

import argparse
import functools
import html
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

import descant
from descant.core.records import Speculation

ROOT = Path(__file__).resolve().parents[2]
MARK = "<!-- acceptance -->"
MODELS = ("smollm2", "smol-draft", "stories15m")
PLACES = 5  # draft tokens per forward
TOKENS = 20  # decoded after each prompt

# A text to copy with one change, repetitive code, and a story without repetition.
PROMPTS = (
    "Correct the spelling: The cat sat on the mat and lookd at the dog. The dog lookd at the cat.\n"
    "Corrected: The",
    'def add(a, b):\n    """Add two numbers."""\n    return a + b\n\n\n'
    'def sub(a, b):\n    """Subtract two numbers."""\n    return',
    "Once upon a time there was a little girl named Lily. She",
)

LOG = logging.getLogger("mkdocs.hooks.acceptance")  # a strict build counts its warnings

# Layout in units of the view box: one panel per drafter, one column per draft position.
WIDTH, HEIGHT = 640, 214
LEFT, PANEL, PITCH, BAR = 42, 120, 21, 17
GROUND, PERCENT = 162, 1.3

STYLE = """<style>
svg { color: #1f2328; --md-default-bg-color: #fff; background: var(--md-default-bg-color) }
@media (prefers-color-scheme: dark) { svg { color: #e6edf3; --md-default-bg-color: #0d1117 } }
</style>"""


@dataclass(frozen=True)
class Count:
    """Drafted and accepted tokens of one drafter over all prompts, by draft position."""

    name: str
    tried: tuple[int, ...]
    accepted: tuple[int, ...]
    forwards: int

    @classmethod
    def of(cls, name: str, reports: Sequence[Speculation]) -> "Count":
        """The sum over the reports of all sequences."""

        def total(part: str) -> tuple[int, ...]:
            lines = [getattr(report, part) for report in reports]
            return tuple(sum(line[at] for line in lines if at < len(line)) for at in range(PLACES))

        return cls(name, total("drafted"), total("accepted"), sum(report.forwards for report in reports))

    @property
    def accepted_per_forward(self) -> float:
        """Accepted draft tokens per forward."""
        return sum(self.accepted) / self.forwards


def folder() -> Path:
    """The folder of the models."""
    return Path(os.environ.get("DESCANT_MODELS") or ROOT / "models")


def missing() -> list[str]:
    """The models that are not built."""
    return [name for name in MODELS if not (folder() / name / "config.json").exists()]


@functools.cache
def measure() -> tuple[Count, ...]:
    """The counts of every drafter on the same prompts, one batch each."""
    transformers_logging.disable_progress_bar()
    model, draft, foreign = (AutoModelForCausalLM.from_pretrained(folder() / name) for name in MODELS)
    tokenizer, other = (
        AutoTokenizer.from_pretrained(folder() / name, padding_side="left") for name in MODELS[::2]
    )
    inputs = tokenizer(list(PROMPTS), return_tensors="pt", padding=True)
    network = {"num_assistant_tokens": PLACES, "num_assistant_tokens_schedule": "constant"}
    schedule = {"num_assistant_tokens_schedule": "constant"}
    both = {"tokenizer": tokenizer, "assistant_tokenizer": other}
    drafters: Mapping[str, Mapping[str, Any]] = {
        "prompt lookup": {"prompt_lookup_num_tokens": PLACES, **schedule},
        "suffix lookup": {"suffix_lookup_num_tokens": PLACES, **schedule},
        "draft model": {"assistant_model": draft, **network},
        "other tokenizer": {"assistant_model": foreign, **both, **network},
        "early exit": {"assistant_early_exit": 24, **network},
    }
    common = {"max_new_tokens": TOKENS, "return_dict_in_generate": True}
    return tuple(
        Count.of(name, descant.generate(model, **inputs, **fields, **common).speculation)
        for name, fields in drafters.items()
    )


def svg(counts: Sequence[Count], style: str = "") -> str:
    """The chart: a bar is the share of forwards with a draft at its position, the solid part was accepted."""
    parts = [panel(at, count) for at, count in enumerate(counts)]
    caption = "Share of accepted drafts, by position in the draft"
    listed = " ".join(
        f"{count.name}: {', '.join(map(fraction, count.accepted, count.tried))}." for count in counts
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'aria-labelledby="acceptance-title acceptance-desc" width="{WIDTH}" '
            f'height="{HEIGHT}" style="max-width:100%;height:auto">',
            f'<title id="acceptance-title">{html.escape(caption)}</title>',
            f'<desc id="acceptance-desc">Accepted of drafted, by position. {html.escape(listed)}</desc>',
            *([style] if style else []),
            '<g font-family="system-ui, sans-serif" font-size="10" fill="currentColor">',
            *grid(),
            *parts,
            f'<text x="{LEFT - 8}" y="{GROUND + 14}" text-anchor="end" opacity="0.75">position</text>',
            "</g>",
            "</svg>",
        ]
    )


def grid() -> list[str]:
    """Lines at round percentages of the forwards, and their numbers."""
    lines = []
    for percent in (0, 50, 100):
        y = GROUND - PERCENT * percent
        lines.append(
            f'<line x1="{LEFT - 4}" x2="{WIDTH - 4}" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" '
            f'opacity="{0.6 if percent == 0 else 0.15}"/>'
        )
        lines.append(f'<text x="{LEFT - 8}" y="{y + 3.5:.1f}" text-anchor="end">{percent} %</text>')
    return lines


def panel(at: int, count: Count) -> str:
    """One drafter: its bars, its name, and the accepted tokens per forward."""
    left = LEFT + PANEL * at + (PANEL - PITCH * PLACES) / 2
    middle = left + PITCH * PLACES / 2
    share = [100 * PERCENT / count.forwards * drafts for drafts in count.tried]
    solid = [100 * PERCENT / count.forwards * drafts for drafts in count.accepted]
    bars = []
    for place in range(PLACES):
        x, centre = left + PITCH * place + (PITCH - BAR) / 2, left + PITCH * (place + 0.5)
        bars.append(
            f'<rect class="tried" x="{x + 0.5}" y="{GROUND - share[place]:.2f}" width="{BAR - 1}" '
            f'height="{share[place]:.2f}" fill="none" stroke="currentColor" opacity="0.6"/>'
            f'<rect class="accepted" x="{x}" y="{GROUND - solid[place]:.2f}" width="{BAR}" '
            f'height="{solid[place]:.2f}" style="fill:var(--md-accent-fg-color, #526cfe)"/>'
            f'<text class="number" x="{centre}" y="{GROUND - share[place] - 4:.1f}" text-anchor="middle">'
            f"{number(count.accepted[place], count.tried[place])}</text>"
            f'<text x="{centre}" y="{GROUND + 14}" text-anchor="middle" opacity="0.75">{place + 1}</text>'
        )
    return (
        "".join(bars)
        + f'<text class="name" x="{middle}" y="{GROUND + 31}" text-anchor="middle" font-size="12">'
        + f"{html.escape(count.name)}</text>"
        + f'<text class="gain" x="{middle}" y="{GROUND + 46}" text-anchor="middle" opacity="0.75">'
        + f"+ {count.accepted_per_forward:.2f} a forward</text>"
    )


def number(accepted: int, tried: int) -> str:
    """The accepted share in percent, to print above its bar; empty where nothing was drafted."""
    return f"{100 * accepted / tried:.0f}" if tried else ""


def fraction(accepted: int, tried: int) -> str:
    """The accepted share as a fraction."""
    return f"{accepted} of {tried}"


def fill_page(text: str, made: Callable[[], Sequence[Count]] = measure) -> str:
    """A page's Markdown with the chart, or with the command that builds the missing models."""
    if MARK not in text:
        return text
    absent = missing()
    if absent:
        command = f"python tools/models.py {' '.join(absent)}"
        LOG.warning("the acceptance chart needs models that are not built: run %s", command)
        return text.replace(MARK, f"*Not drawn in this build: models are missing. `{command}` builds them.*")
    return text.replace(MARK, f'<figure data-search-exclude style="margin-left:0">\n{svg(made())}\n</figure>')


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for every page."""
    return fill_page(markdown)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    file = parser.parse_args().file
    if absent := missing():
        print(f"models are missing: run python tools/models.py {' '.join(absent)}", file=sys.stderr)
        return 1
    file.write_text(svg(measure(), STYLE) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
