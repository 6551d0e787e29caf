"""Write the tables of docs/guide/watermarks.md from the figures of `bench.detection`, or check them.

python tools/docs/watermark_tables.py             write
python tools/docs/watermark_tables.py --check     fail if the page differs from the figures
"""

import argparse
import difflib
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "guide" / "watermarks.md"
FIGURES = ROOT / "bench" / "results" / "detection.json"
BEGIN: Final = "<!-- Written by tools/docs/watermark_tables.py ({}): edit there. -->\n"
END: Final = "<!-- End of the block of tools/docs/watermark_tables.py. -->\n"
BLOCK: Final = re.compile(
    re.escape(BEGIN).replace(r"\{\}", r"([a-z ]+)") + ".*?" + re.escape(END), flags=re.DOTALL
)

NAMES: Final = {
    "lefthash": "green list, `lefthash`",
    "selfhash": "green list, `selfhash`, width 4",
    "synthid": "SynthID, depth 30, 5-grams",
    "gumbel": "Gumbel, 16 nonces",
}
MODELS: Final = {"smollm2": "SmolLM2-135M", "stories15m": "stories15M", "minimind2-small": "MiniMind2-Small"}
METHODS: Final = {
    "sampled": "sampling",
    "beams": "beam search, 4 beams",
    "sampled beams": "beam sampling, 4 beams",
    "lookup": "sampling, prompt lookup",
}
Figures = dict[str, Any]


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, numbers to the right."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, rule, *lines))


def percent(share: float, digits: int = 1) -> str:
    """A share as a percentage."""
    return f"{100.0 * share:.{digits}f} %"


def between(found: Figures, digits: int) -> str:
    """A rate and its interval."""
    low, high = (100.0 * found[end] for end in ("low", "high"))
    return f"{percent(found['rate'], digits)} ({low:.{digits}f} to {high:.{digits}f})"


def texts(figures: Figures) -> str:
    """A summary of the tested texts."""
    counts: dict[str, dict[str, int]] = figures["texts"]
    none = counts["none"]
    people = sum(many for name, many in none.items() if name.startswith("human"))
    tests = figures["false"]["lefthash"]["0.01"]["exact"]["count"]
    marked = [
        sum(many for name, many in one.items() if name.startswith("sampled, "))
        for mark, one in counts.items()
        if mark != "none"
    ]
    large = counts["lefthash"].get("sampled, smollm2", 0)
    return (
        f"Unmarked: {sum(none.values()):,} texts of 200 tokens, {people:,} of them written by people "
        "(documents, licences and docstrings of installed packages), the others by the models without a "
        f"watermark; each tested with {tests // sum(none.values())} random keys, {tests:,} tests per scheme "
        "(a key of `selfhash` is expensive to build, so 28 texts share one; the tests of Gumbel tokens use "
        f"one nonce each, those of text try all 16). Marked: {min(marked)} texts of 200 new tokens per "
        f"scheme, {large} of them by SmolLM2-135M, with random keys (SynthID: one per three texts, "
        "`selfhash`: one per eleven, otherwise one each); sampled at temperature 1 with `top_k=50`.\n"
    )


def false(figures: Figures) -> str:
    """The false positive rate."""
    head = ["scheme", "level", "called marked", "sigma", "atoms spread", "sigma", "from text alone"]
    lines = []
    for mark, found in figures["false"].items():
        for level, digits in (("0.01", 2), ("0.001", 3)):
            exact, spread, read = (found[level][kind] for kind in ("exact", "randomised", "text"))
            lines.append(
                [
                    NAMES[mark],
                    percent(float(level)),
                    between(exact, digits),
                    f"{exact['sigma']:+.1f}",
                    percent(spread["rate"], digits),
                    f"{spread['sigma']:+.1f}",
                    percent(read["rate"], digits),
                ]
            )
    return table(head, lines)


def true(figures: Figures) -> str:
    """The true positive rate."""
    head = ["scheme", "50 tokens", "100", "200", "200, quantile", "200, text alone", "median z"]
    lines = []
    for mark, found in figures["true"].items():
        whole = found["200"]
        shares = [found["50"]["p"], found["100"]["p"], whole["p"], whole["quantile"], found["text"]["p"]]
        lines.append([NAMES[mark], *(percent(one["rate"]) for one in shares), f"{whole['z']:.1f}"])
    return table(head, lines)


def models(figures: Figures) -> str:
    """The true positive rate by model."""
    names = list(next(iter(figures["true"].values()))["models"])
    head = ["scheme", *(MODELS[name] for name in names), *(f"{MODELS[name]}, median z" for name in names)]
    lines = []
    for mark, found in figures["true"].items():
        by_model = [found["models"][name] for name in names]
        lines.append(
            [
                NAMES[mark],
                *(percent(one["p"]["rate"]) for one in by_model),
                *(f"{one['z']:.1f}" for one in by_model),
            ]
        )
    return table(head, lines)


def edits(figures: Figures) -> str:
    """The true positive rate after edits."""
    marks = list(figures["edits"])
    head = ["words", *(NAMES[mark] for mark in marks)]
    lines = [["none changed", *(percent(figures["true"][mark]["text"]["p"]["rate"]) for mark in marks)]]
    for name in figures["edits"][marks[0]]:
        kind, share = name.rsplit(" ", 1)
        cells = [percent(figures["edits"][mark][name]["rate"]) for mark in marks]
        lines.append([f"{percent(float(share), 0)} {kind}", *cells])
    return table(head, lines)


def rows(figures: Figures) -> str:
    """The true positive rate by decoding method."""
    head = ["scheme", "model", "decoded by", "texts", "median z", "found, 50 tokens", "found, 200 tokens"]
    lines = []
    for mark, found in figures["rows"].items():
        for name, one in found.items():
            model, method = name.split(", ", 1)
            shares = [percent(one[part]["rate"]) for part in ("short", "p")]
            lines.append(
                [
                    NAMES[mark],
                    MODELS[model],
                    METHODS[method],
                    str(one["p"]["count"]),
                    f"{one['z']:.1f}",
                    *shares,
                ]
            )
    return table(head, lines)


def bayes(figures: Figures) -> str:
    """SynthID's trained detector."""
    names = {"weighted": "weighted mean", "bayesian": "Bayesian, trained"}
    head = ["detector", *(f"{length} tokens" for length in figures["bayes"])]
    lines = [
        [shown, *(between(methods[name], 1) for methods in figures["bayes"].values())]
        for name, shown in names.items()
    ]
    return table(head, lines)


BLOCKS: Final[dict[str, Callable[[Figures], str]]] = {
    "texts": texts,
    "false positives": false,
    "true positives": true,
    "models": models,
    "edits": edits,
    "rows": rows,
    "bayes": bayes,
}


def render(page: str, figures: Figures) -> str:
    """The page with current blocks."""

    def block(found: re.Match[str]) -> str:
        name = found[1]
        return f"{BEGIN.format(name)}\n{BLOCKS[name](figures)}\n{END}"

    return BLOCK.sub(block, page)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    old = PAGE.read_text(encoding="utf-8")
    new = render(old, json.loads(FIGURES.read_text(encoding="utf-8")))
    if not check:
        PAGE.write_text(new, encoding="utf-8")
        return 0
    difference = difflib.unified_diff(old.splitlines(), new.splitlines(), "the page", "figures", lineterm="")
    print("\n".join(difference), end="")
    return int(old != new)


if __name__ == "__main__":
    sys.exit(main())
