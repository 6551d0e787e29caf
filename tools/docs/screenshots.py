"""The screenshots of the page "See it": runs of SmolLM2, drawn by the library and rendered in Chromium.

python tools/docs/screenshots.py [NAME ...]        write docs/pictures/NAME.png (default: all)
"""

import argparse
import functools
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from playwright.sync_api import Browser, Page  # noqa: E402

import descant  # noqa: E402
from tests.e2e.browser import chromium  # noqa: E402
from tests.support import pretrained  # noqa: E402

FOLDER = ROOT / "docs" / "pictures"
LANGUAGE = "The best way to learn a language is"
CODE = """def add(a, b):
    return a + b

def sub(a, b):
    return a - b

def mul(a, b):
    return"""

# Runs by name: prompt and config fields.
RUNS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "beams": (LANGUAGE, {"num_beams": 4, "num_return_sequences": 2, "max_new_tokens": 16}),
    "drawn": (
        LANGUAGE,
        {"do_sample": True, "seed": 2, "temperature": 1.1, "min_p": 0.05, "max_new_tokens": 16},
    ),
    "many": ("In a village by the sea, an old man", {"num_beams": 16, "max_new_tokens": 40}),
    "diverse": (
        "The weather today is",
        {
            "num_beams": 6, "num_beam_groups": 3, "diversity_penalty": 1.0, "num_return_sequences": 3,
            "max_new_tokens": 14,
        },
    ),
    "constrained": ("The scientist looked at the", {"num_beams": 4, "max_new_tokens": 12}),
    "sampling": (
        "The lighthouse keeper opened the door and",
        {
            "do_sample": True, "seed": 4, "temperature": 0.8, "top_k": 50, "top_p": 0.9,
            "repetition_penalty": 1.2, "max_new_tokens": 60,
        },
    ),
    "speculation": (CODE, {"prompt_lookup_num_tokens": 5, "max_new_tokens": 60}),
}  # fmt: skip


@dataclass(frozen=True)
class Shot:
    """One screenshot: the run, the view, the actions before it, and the display."""

    run: str
    view: str
    step: int | None = None  # position of the slider
    hover: str | None = None  # element under the pointer
    click: str | None = None  # element clicked first
    dark: bool = False
    phone: bool = False
    beside: str | None = None


SHOTS: Mapping[str, Shot] = {
    "tree": Shot("beams", "tree", click="#tree .node.best >> nth=3"),
    "tree-dark": Shot("beams", "tree", step=6, dark=True),
    "tree-phone": Shot("beams", "tree", phone=True),
    "tree-diverse": Shot("diverse", "tree"),
    "tree-constrained": Shot("constrained", "tree"),
    "tree-many": Shot("many", "tree", click="#fit"),
    "text": Shot("sampling", "text", hover="#view-text .flow .tok .word >> nth=8"),
    "text-phone": Shot("sampling", "text", phone=True, dark=True),
    "processors": Shot("sampling", "processors", step=8),
    "processors-phone": Shot("sampling", "processors", step=8, phone=True),
    "speculation": Shot("speculation", "speculation"),
    "speculation-phone": Shot("speculation", "speculation", phone=True, dark=True),
    "beside": Shot("beams", "beside", beside="drawn"),
    "beside-dark": Shot("beams", "beside", beside="drawn", dark=True),
}


@functools.cache
def trace_of(name: str) -> descant.Trace:
    """The trace of a run."""
    prompt, fields = RUNS[name]
    loaded = pretrained.load("smollm2")
    arguments = dict(fields)
    if name == "constrained":
        arguments["force_words_ids"] = [loaded.tokens(" telescope"), loaded.tokens(" bright star")]
    inputs = loaded.tokenizer(prompt, return_tensors="pt")
    trace: descant.Trace = descant.generate(
        loaded.model, **inputs, **arguments, trace=True, tokenizer=loaded.tokenizer
    ).trace
    return trace


def take(browser: Browser, shot: Shot, path: Path) -> None:
    """Open the page of a run, apply the actions, and take the screenshot."""
    width, height = (390, 844) if shot.phone else (1280, 800)
    context = browser.new_context(
        **chromium.options(width, height, color_scheme="dark" if shot.dark else "light", has_touch=shot.phone)
    )
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        other = trace_of(shot.beside) if shot.beside else None
        page.write_text(trace_of(shot.run).html(beside=other, title="SmolLM2"), encoding="utf-8")
        opened = chromium.sheet(context).open(page)
        arrange(opened.page, shot)
        opened.page.screenshot(path=path)
        opened.check()
    context.close()


def arrange(page: Page, shot: Shot) -> None:
    """Apply the actions of a screenshot to the page."""
    page.locator(f"#tab-{shot.view}").click()
    if shot.step is not None:
        page.locator("#step").fill(str(shot.step))
    if shot.click:
        page.locator(shot.click).click()
    if shot.phone:
        page.locator(".tabs").evaluate("one => scrollTo(0, one.getBoundingClientRect().top - 8)")
    page.mouse.move(2, 2)
    if shot.hover:
        page.locator(shot.hover).hover()
    page.wait_for_timeout(300)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*SHOTS, []], metavar="NAME")
    chosen = parser.parse_args().names or list(SHOTS)
    FOLDER.mkdir(parents=True, exist_ok=True)
    with chromium.started() as browser:
        for name in chosen:
            take(browser, SHOTS[name], FOLDER / f"{name}.png")
            print(name, (FOLDER / f"{name}.png").stat().st_size)
    return 0


if __name__ == "__main__":
    sys.exit(main())
