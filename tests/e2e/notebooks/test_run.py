"""Every notebook of examples/notebooks runs from the top, in a kernel, and says how to install Descant."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.e2e.notebooks.conftest import NOTEBOOKS
from tools.docs import notebook_links

NAMES = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
# What the outputs of a notebook must show. A page of Jupyter runs see_a_beam_search: test_jupyter_page.py.
SHOWN = {
    "first_steps": [
        r"seven, eight", r"contrastive search +'The robot", r"\bTrue\b", r"`temperature` has no use",
    ],
    "structured_output": [
        r"\{'name': 'Ann', 'age': 34, 'hobbies'", r"'negative'", r"'\d+ (July|August) 19\d\d'",
    ],
    "watermark": [r"unmarked +not marked", r"\nmarked +marked", r"its first words +too short to tell"],
}  # fmt: skip


def read(name: str) -> Any:
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


def outputs(notebook: Any) -> str:
    """The text of all outputs, one below the other."""
    found = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in found]
    return "\n".join(texts)


@pytest.fixture(scope="module")
def run(folder: Path) -> Iterator[Callable[[str], Any]]:
    """Runs a notebook with empty variables, in one kernel for all: torch is imported once."""
    reset = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("%reset -f")])
    client = NotebookClient(reset, timeout=300, resources={"metadata": {"path": str(folder)}})
    with client.setup_kernel():
        assert client.kc is not None

        def execute(notebook: Any) -> Any:
            client.nb = notebook
            client.reset_execution_trackers()
            for index, cell in enumerate(notebook.cells):
                client.execute_cell(cell, index)
            return notebook

        def fresh(name: str) -> Any:
            execute(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("%reset -f")]))
            return execute(read(name))

        yield fresh


@pytest.mark.parametrize("name", SHOWN)
def test_a_notebook_runs_and_shows(name: str, run: Callable[[str], Any]) -> None:
    text = outputs(run(name))
    assert [pattern for pattern in SHOWN[name] if not re.search(pattern, text)] == []
    assert "huggingface.co" not in text  # the model came from the folder


def test_all_notebooks_run_somewhere() -> None:
    assert {*SHOWN, "see_a_beam_search"} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_kept_without_outputs(name: str) -> None:
    """A page of a trace has 150 kB, GitHub does not run its script, and outputs grow old unseen."""
    notebook = read(name)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(code) > 4
    assert [cell for cell in code if cell.outputs or cell.execution_count is not None] == []
    assert (NOTEBOOKS / f"{name}.ipynb").stat().st_size < 20_000


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_says_first_how_to_install(name: str) -> None:
    first, second, *_ = read(name).cells
    assert first.cell_type == "markdown"
    assert "Colab or Kaggle" in first.source
    assert 'pip install "descant[' in first.source
    assert '%pip install -q "descant[' in second.source


def test_the_page_links_every_notebook_by_the_address_of_the_repository() -> None:
    page = (NOTEBOOKS.parents[1] / "docs" / "notebooks.md").read_text(encoding="utf-8")
    assert sorted(notebook_links.MARK.findall(page)) == NAMES
    repository = "https://github.com/some/where"
    made = notebook_links.on_page_markdown(page, SimpleNamespace(repo_url=repository + "/"))
    start = "https://colab.research.google.com/github/some/where/blob/main/examples/notebooks/"
    assert [name for name in NAMES if f"[Colab]({start}{name}.ipynb)" not in made] == []
    assert "<!--" not in made
    with pytest.raises(FileNotFoundError, match="no notebook `nothing`"):
        notebook_links.links("nothing", repository)
