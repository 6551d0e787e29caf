"""A page of a real JupyterLab, in Chromium: an output object displays its picture."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page

from tests.e2e.browser import chromium

TOKEN = "a-token-of-this-test"
OPTIONS = (
    "--no-browser", "--allow-root", "--ip=127.0.0.1", "--port=0", "--expose-app-in-browser",
    f"--IdentityProvider.token={TOKEN}",
    # It asks nobody for news and versions.
    "--LabApp.news_url=None", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
)  # fmt: skip

# The cells of the open notebook; those out of sight are not in the page.
CODE = (
    """window.jupyterapp.shell.currentWidget.model.toJSON().cells.filter(cell => cell.cell_type === "code")"""
)


@pytest.fixture
def address(folder: Path, tmp_path: Path) -> Iterator[str]:
    """A JupyterLab on the folder of the notebooks."""
    runtime = tmp_path / "runtime"
    # Nothing of the user's own Jupyter is read or written.
    own = {f"JUPYTER_{name.upper()}_DIR": str(tmp_path / name) for name in ("config", "data", "runtime")}
    command = [sys.executable, "-m", "jupyterlab", *OPTIONS, f"--ServerApp.root_dir={folder}"]
    with (tmp_path / "log").open("w", encoding="utf-8") as log:
        server = subprocess.Popen(command, env={**os.environ, **own}, stdout=log, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + 120
            # The server creates this file before it writes the address into it.
            while not (ready := [path for path in runtime.glob("jpserver-*.json") if path.stat().st_size]):
                assert server.poll() is None, (tmp_path / "log").read_text(encoding="utf-8")
                assert time.monotonic() < deadline, (tmp_path / "log").read_text(encoding="utf-8")
                time.sleep(0.1)
            yield json.loads(ready[0].read_text(encoding="utf-8"))["url"]
        finally:
            server.terminate()
            server.wait(60)


def run_all(page: Page, address: str, name: str) -> None:
    """Open a notebook and run its cells."""
    page.goto(f"{address}lab/tree/{name}?token={TOKEN}")
    page.wait_for_selector(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-CodeCell")
    # Before the kernel is connected, the command would ask which kernel to take.
    kernel = "window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel"
    page.wait_for_function(f"{kernel}?.connectionStatus === 'connected' && {kernel}?.status === 'idle'")
    page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells'); }")


def test_an_output_object_is_displayed_as_a_picture(address: str, tmp_path: Path) -> None:
    with chromium.started() as browser:
        page = browser.new_context(**chromium.options(1400, 1000, offline=False)).new_page()
        page.set_default_timeout(60_000)
        run_all(page, address, "see_a_beam_search.ipynb")
        pictures = page.locator(".jp-OutputArea-output iframe")
        page.wait_for_function(f"{CODE}.every(cell => cell.execution_count !== null)")
        errors = f"{CODE}.flatMap(cell => cell.outputs).filter(output => output.output_type === 'error')"
        assert page.evaluate(errors) == []
        pictures.first.scroll_into_view_if_needed()
        frame = pictures.first.content_frame
        nodes = frame.locator("svg [data-node]")
        nodes.first.wait_for(state="visible")
        page.screenshot(path=tmp_path / "beam-search.png")
        box = pictures.first.bounding_box()
        assert box is not None
        assert box["width"] > 600
        assert box["height"] > 200
        assert nodes.count() > 15
        assert "immerse" in "".join(nodes.all_text_contents())
