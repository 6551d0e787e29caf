"""Every python block of the README and the docs runs, and prints the output that the page shows."""

import re
import traceback
from pathlib import Path
from typing import Any

import pytest

from tests.support import pretrained
from tests.support.forkserver import ForkServer
from tests.unit.config.hub.server import Hub
from tools.docs import doc_blocks

FILES = {str(path.relative_to(doc_blocks.ROOT)): path for path in doc_blocks.sources()}
PLAIN = [
    pytest.param(name, marks=pytest.mark.reference if doc_blocks.needs_transformers4(path) else ())
    for name, path in FILES.items()
    if not any(
        kind(path)
        for kind in (
            doc_blocks.is_isolated,
            doc_blocks.is_programs,
            doc_blocks.needs_clients,
            doc_blocks.needs_vllm,
        )
    )
]


@pytest.mark.parametrize("name", PLAIN)
def test_every_python_block_runs(name: str) -> None:
    doc_blocks.run(FILES[name])


@pytest.mark.parametrize("name", [name for name, path in FILES.items() if doc_blocks.is_isolated(path)])
def test_every_isolated_page_runs(
    name: str, hub: Hub, tmp_path: Path, monkeypatch: Any, fork_server: ForkServer
) -> None:
    hub.user("you", "hf_yours")
    hub.login("hf_yours")
    (tmp_path / "models").symlink_to(pretrained.folder("smollm2").parent)
    monkeypatch.setenv("DESCANT_RECIPES_LOCK", str(tmp_path / ".lock"))
    assert doc_blocks.run(FILES[name], tmp_path, fork_server.programs) > 3


@pytest.mark.parametrize("name", FILES)
def test_every_bash_block_names_files_that_exist(name: str) -> None:
    named = [
        word
        for block in doc_blocks.read(FILES[name])
        if block.language == "bash"
        for word in re.findall(r"(?<![\w/.])(?:\.ci|tools|tests|bench|examples)/[\w./-]*", block.text)
    ]
    missing = [word for word in named if not (doc_blocks.ROOT / word).exists()]
    assert not missing


def page(folder: Path, text: str) -> Path:
    path = folder / "page.md"
    path.write_text(text, encoding="utf-8")
    return path


def test_blocks_share_a_namespace_and_keep_their_line_numbers(tmp_path: Path) -> None:
    second = "```python\nx += 1\nraise OSError(x)\n```\n"
    path = page(tmp_path, f"# Title\n\n```python\nx = 1\n```\n\ntext\n\n{second}")
    with pytest.raises(doc_blocks.BlockError, match=r"page\.md:9: OSError: 2") as caught:
        doc_blocks.run(path)
    cause = caught.value.__cause__
    assert cause is not None
    frame = traceback.extract_tb(cause.__traceback__)[-1]
    assert (frame.lineno, frame.line) == (11, "raise OSError(x)")


def test_the_stated_output_is_compared(tmp_path: Path) -> None:
    assert doc_blocks.run(page(tmp_path, "```python\nprint(1 + 1)\n```\n\n```text\n2\n```\n")) == 1
    with pytest.raises(doc_blocks.BlockError, match=r"page\.md:5: the block above printed something else"):
        doc_blocks.run(page(tmp_path, "```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n"))


@pytest.mark.parametrize("info", ["", "py", "python {skip}", "pycon"])
def test_an_unknown_language_is_an_error(tmp_path: Path, info: str) -> None:
    with pytest.raises(doc_blocks.BlockError, match="language must be one of"):
        doc_blocks.run(page(tmp_path, f"```{info}\nx\n```\n"))


@pytest.mark.parametrize(
    "line",
    [
        "open('stray.txt', 'w')",
        "import os; os.open('stray.txt', os.O_CREAT)",
        "import os; os.mkdir('stray')",
        "import os; os.remove('stray.txt')",
        "import pathlib; pathlib.Path('stray.txt').touch()",
        "import os; os.rename('/nowhere', 'stray.txt')",
    ],
)
def test_examples_cannot_write_into_the_checkout(tmp_path: Path, line: str) -> None:
    with pytest.raises(doc_blocks.BlockError, match="must not write into the checkout"):
        doc_blocks.run(page(tmp_path, f"```python\n{line}\n```\n"))
    assert not list(doc_blocks.ROOT.glob("stray*"))
