"""The picture of the page "Speculation": how often a guess stands, by its place in the run, as measured.

    python tools/docs/acceptance_chart.py FILE       write it there, as a file of its own

As a hook of mkdocs it puts it into the page, in the place of the comment `<!-- acceptance -->`. It decodes
with the models of `tools/models.py`; where they are not there the page says so, and a strict build fails.
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
from transformers.utils import logging as chatter

import descant
from descant.core.records import Speculation

ROOT = Path(__file__).resolve().parents[2]
MARK = "<!-- acceptance -->"
MODELS = ("smollm2", "smol-draft", "stories15m")
PLACES = 5  # tokens guessed at a time
TOKENS = 20  # decoded after each prompt

# A text to copy with one change, code that repeats itself, and a story that does not.
PROMPTS = (
    "Correct the spelling: The cat sat on the mat and lookd at the dog. The dog lookd at the cat.\n"
    "Corrected: The",
    'def add(a, b):\n    """Add two numbers."""\n    return a + b\n\n\n'
    'def sub(a, b):\n    """Subtract two numbers."""\n    return',
    "Once upon a time there was a little girl named Lily. She",
)

LOG = logging.getLogger("mkdocs.hooks.acceptance")  # a strict build counts its warnings

# The drawing: a panel for each way, in it a column for each place, in the units of the view box.
WIDTH, HEIGHT = 640, 214
LEFT, PANEL, PITCH, BAR = 42, 120, 21, 17
GROUND, PERCENT = 162, 1.3

STYLE = """<style>
svg { color: #1f2328; --md-default-bg-color: #fff; background: var(--md-default-bg-color) }
@media (prefers-color-scheme: dark) { svg { color: #e6edf3; --md-default-bg-color: #0d1117 } }
</style>"""


@dataclass(frozen=True)
class Count:
    """What became of one way's guesses over all prompts: how many were tried and stood, place by place."""

    name: str
    tried: tuple[int, ...]
    accepted: tuple[int, ...]
    forwards: int

    @classmethod
    def of(cls, name: str, reports: Sequence[Speculation]) -> "Count":
        """The sum of what is reported of each sequence."""

        def total(part: str) -> tuple[int, ...]:
            lines = [getattr(one, part) for one in reports]
            return tuple(sum(line[at] for line in lines if at < len(line)) for at in range(PLACES))

        return cls(name, total("drafted"), total("accepted"), sum(one.forwards for one in reports))

    @property
    def gain(self) -> float:
        """How many guesses stand in a forward."""
        return sum(self.accepted) / self.forwards


def folder() -> Path:
    """Where the models are."""
    return Path(os.environ.get("DESCANT_MODELS") or ROOT / "models")


def missing() -> list[str]:
    """The models that are not there."""
    return [name for name in MODELS if not (folder() / name / "config.json").exists()]


@functools.cache
def measured() -> tuple[Count, ...]:
    """Every way on the same prompts, as one batch each."""
    chatter.disable_progress_bar()
    model, draft, foreign = (AutoModelForCausalLM.from_pretrained(folder() / name) for name in MODELS)
    tokenizer, other = (
        AutoTokenizer.from_pretrained(folder() / name, padding_side="left") for name in MODELS[::2]
    )
    inputs = tokenizer(list(PROMPTS), return_tensors="pt", padding=True)
    network = {"num_assistant_tokens": PLACES, "num_assistant_tokens_schedule": "constant"}
    schedule = {"num_assistant_tokens_schedule": "constant"}
    both = {"tokenizer": tokenizer, "assistant_tokenizer": other}
    ways: Mapping[str, Mapping[str, Any]] = {
        "prompt lookup": {"prompt_lookup_num_tokens": PLACES, **schedule},
        "suffix lookup": {"suffix_lookup_num_tokens": PLACES, **schedule},
        "draft model": {"assistant_model": draft, **network},
        "other tokenizer": {"assistant_model": foreign, **both, **network},
        "early exit": {"assistant_early_exit": 24, **network},
    }
    common = {"max_new_tokens": TOKENS, "return_dict_in_generate": True}
    return tuple(
        Count.of(name, descant.generate(model, **inputs, **fields, **common).speculation)
        for name, fields in ways.items()
    )


def svg(counts: Sequence[Count], style: str = "") -> str:
    """The picture: a bar is how many forwards tried a guess in that place, its solid part where it stood."""
    parts = [panel(at, count) for at, count in enumerate(counts)]
    words = "Share of the guesses that stand, by their place in the run"
    listed = " ".join(
        f"{count.name}: {', '.join(map(fraction, count.accepted, count.tried))}." for count in counts
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'aria-labelledby="acceptance-title acceptance-desc" width="{WIDTH}" '
            f'height="{HEIGHT}" style="max-width:100%;height:auto">',
            f'<title id="acceptance-title">{html.escape(words)}</title>',
            f'<desc id="acceptance-desc">Accepted of tried, place by place. {html.escape(listed)}</desc>',
            *([style] if style else []),
            '<g font-family="system-ui, sans-serif" font-size="10" fill="currentColor">',
            *grid(),
            *parts,
            f'<text x="{LEFT - 8}" y="{GROUND + 14}" text-anchor="end" opacity="0.75">place</text>',
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
    """One way: its bars, its name, and what a forward gains."""
    left = LEFT + PANEL * at + (PANEL - PITCH * PLACES) / 2
    middle = left + PITCH * PLACES / 2
    share = [100 * PERCENT / count.forwards * tries for tries in count.tried]
    stood = [100 * PERCENT / count.forwards * right for right in count.accepted]
    bars = []
    for place in range(PLACES):
        x, centre = left + PITCH * place + (PITCH - BAR) / 2, left + PITCH * (place + 0.5)
        bars.append(
            f'<rect class="tried" x="{x + 0.5}" y="{GROUND - share[place]:.2f}" width="{BAR - 1}" '
            f'height="{share[place]:.2f}" fill="none" stroke="currentColor" opacity="0.6"/>'
            f'<rect class="accepted" x="{x}" y="{GROUND - stood[place]:.2f}" width="{BAR}" '
            f'height="{stood[place]:.2f}" style="fill:var(--md-accent-fg-color, #526cfe)"/>'
            f'<text class="number" x="{centre}" y="{GROUND - share[place] - 4:.1f}" text-anchor="middle">'
            f"{number(count.accepted[place], count.tried[place])}</text>"
            f'<text x="{centre}" y="{GROUND + 14}" text-anchor="middle" opacity="0.75">{place + 1}</text>'
        )
    return (
        "".join(bars)
        + f'<text class="name" x="{middle}" y="{GROUND + 31}" text-anchor="middle" font-size="12">'
        + f"{html.escape(count.name)}</text>"
        + f'<text class="gain" x="{middle}" y="{GROUND + 46}" text-anchor="middle" opacity="0.75">'
        + f"+ {count.gain:.2f} a forward</text>"
    )


def number(right: int, tries: int) -> str:
    """The share that stands in percent, short enough to stand above its bar; nothing where none was tried."""
    return f"{100 * right / tries:.0f}" if tries else ""


def fraction(right: int, tries: int) -> str:
    """The same in full."""
    return f"{right} of {tries}"


def filled(text: str, made: Callable[[], Sequence[Count]] = measured) -> str:
    """A page's Markdown with the picture in its place, or with what it wants where a model is missing."""
    if MARK not in text:
        return text
    lacking = missing()
    if lacking:
        command = f"python tools/models.py {' '.join(lacking)}"
        LOG.warning("the picture of acceptance needs models that are not there: run %s", command)
        return text.replace(MARK, f"*Not drawn in this build, for want of models: `{command}` makes them.*")
    return text.replace(MARK, f'<figure data-search-exclude style="margin-left:0">\n{svg(made())}\n</figure>')


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for every page."""
    return filled(markdown)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    file = parser.parse_args().file
    if lacking := missing():
        print(f"models are missing: run python tools/models.py {' '.join(lacking)}", file=sys.stderr)
        return 1
    file.write_text(svg(measured(), STYLE) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
