"""The page of the guide on the tools of others: its blocks run beside them, and print what the page shows."""

from __future__ import annotations

from pathlib import Path

from tests.support.client_programs import ClientEnvironment
from tools.docs import doc_blocks


def test_the_page_runs(tmp_path: Path) -> None:
    pages = [str(path) for path in doc_blocks.sources() if doc_blocks.needs_clients(path)]
    environment = {"PYTHONPATH": str(doc_blocks.ROOT / "src")}
    arguments = [doc_blocks.ROOT / "tools" / "docs" / "doc_blocks.py", "run", *pages]
    ClientEnvironment(tmp_path).run("python", *arguments, cwd=doc_blocks.ROOT, env=environment, timeout=600)
    assert pages
