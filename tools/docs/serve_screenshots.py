"""The screenshots of the guide's page on the page of a server: SmolLM2 behind a real server, in Chromium.

python tools/docs/serve_screenshots.py [NAME ...]        write docs/pictures/NAME.png (default: all)
"""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from playwright.sync_api import Browser  # noqa: E402

from tests.e2e.browser import chromium  # noqa: E402
from tests.e2e.serve_page.page_driver import ServedPage  # noqa: E402
from tests.support import pretrained  # noqa: E402
from tests.support.server_process import ServerProcess  # noqa: E402

FOLDER = ROOT / "docs" / "pictures"


@dataclass(frozen=True)
class Shot:
    """One screenshot: the settings, the text that is sent, and the display."""

    text: str
    method: str
    fields: Mapping[str, object] = field(default_factory=dict)
    mode: str = "chat"
    is_traced: bool = False
    hover: int | None = None  # the token whose alternatives are shown
    num_nodes: int | None = None  # taken when the tree has so many; None: at the end
    dark: bool = False
    phone: bool = False


RIVERS = "Name two rivers of Europe and say where each ends."
LANGUAGE = "The best way to learn a language is"
SHOTS: Mapping[str, Shot] = {
    "serve-chat": Shot(RIVERS, "sampling", {"temperature": 0.7, "seed": 5, "max_tokens": 64}, hover=9),
    "serve-tree": Shot(
        LANGUAGE, "beams", {"num_beams": 4, "max_tokens": 24}, "completion", is_traced=True, num_nodes=36
    ),
    "serve-diverse": Shot(
        "Suggest a name for a small bookshop.", "diverse", {"max_tokens": 16}, is_traced=True, dark=True
    ),
    "serve-phone": Shot(
        LANGUAGE, "beams", {"num_beams": 4, "max_tokens": 24}, "completion",
        is_traced=True, num_nodes=36, dark=True, phone=True,
    ),
    "serve-settings-phone": Shot("", "beams", phone=True),
}  # fmt: skip


def take(browser: Browser, server: ServerProcess, shot: Shot, path: Path) -> None:
    """Open the page, do what the shot says, and take the screenshot."""
    width, height = (390, 760) if shot.phone else (1280, 800)
    scheme = "dark" if shot.dark else "light"
    context = browser.new_context(
        **chromium.options(width, height, offline=False, color_scheme=scheme, has_touch=shot.phone)
    )
    page = ServedPage(chromium.sheet(context), server.url + "/")
    page.set_mode(shot.mode)
    if shot.phone:
        page.page.locator("#fold").click()
    if shot.is_traced:
        page.record_traces()
    page.choose(shot.method, shot.fields)
    if shot.text:
        page.send(shot.text)
        if shot.num_nodes is not None:
            page.until(f"document.querySelectorAll('.tree [data-node]').length >= {shot.num_nodes}")
        else:
            page.wait_for_end()
    page.page.mouse.move(2, 2)
    if shot.hover is not None:
        page.page.locator(".flow .tok .ink").nth(shot.hover).hover()
    page.page.wait_for_timeout(200)
    page.page.screenshot(path=path)
    page.check()
    context.close()


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*SHOTS, []], metavar="NAME")
    chosen = parser.parse_args().names or list(SHOTS)
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (
        ServerProcess(pretrained.folder("smollm2"), "--traces", "4") as server,
        chromium.started() as browser,
    ):
        for name in chosen:
            take(browser, server, SHOTS[name], FOLDER / f"{name}.png")
            print(name, (FOLDER / f"{name}.png").stat().st_size)
    return 0


if __name__ == "__main__":
    sys.exit(main())
