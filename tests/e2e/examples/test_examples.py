"""Every program of examples/ runs, and prints the output that the page shows.

One runs in its own process, as a user would run it; the others run in forks of one process.
"""

import ast
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support import pretrained
from tests.support.forkserver import ForkServer
from tools.docs import examples

NAMES = sorted(path.stem for path in examples.FOLDER.glob("*.py"))
OWN_PROCESS = "see_why"


@pytest.fixture(scope="module")
def page() -> dict[str, tuple[str, str]]:
    return examples.page_blocks()


@pytest.fixture
def fork(fork_server: ForkServer) -> examples.Runner:
    def run(program: Path, folder: Path, environment: Mapping[str, str]) -> tuple[int, str, str]:
        done = fork_server.run([program], folder=folder, environment=environment)
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.mark.parametrize("name", NAMES)
def test_a_program_prints_what_the_page_shows(
    name: str, page: dict[str, tuple[str, str]], fork: examples.Runner
) -> None:
    for model in re.findall(r'"models/([\w.-]+)"', examples.source(name)):
        pretrained.folder(model)  # the error for a missing model names the command that builds it
    code, printed = page[name]
    assert code == examples.source(name), "run tools/docs/examples.py"
    runner = examples.in_own_process if name == OWN_PROCESS else fork
    assert examples.run(name, runner).printed == printed


def test_the_page_and_the_list_are_current(page: dict[str, tuple[str, str]]) -> None:
    assert sorted(examples.PROGRAM_PAGES) == NAMES
    printed = {name: text for name, (_, text) in page.items()}
    assert examples.PAGE.read_text(encoding="utf-8") == examples.render(printed), "run tools/docs/examples.py"
    table = examples.LIST.read_text(encoding="utf-8")
    assert table == examples.listing(examples.listed_seconds()), "run tools/docs/examples.py"


@pytest.mark.parametrize("name", NAMES)
def test_a_program_is_small_and_says_what_it_shows_and_how_to_run_it(name: str) -> None:
    text = examples.source(name)
    assert len(text.splitlines()) <= 65
    doc = ast.get_docstring(ast.parse(text)) or ""
    assert doc.partition("\n")[0].endswith(".")
    assert f"python examples/{name}.py" in doc
    needed = re.search(r"python tools/models\.py (.+)", doc)
    assert needed is not None
    used = {Path(found).parts[0] for found in re.findall(r'"models/([\w./-]+)"', text)}
    assert set(needed[1].split()) == used
    assert " the Hub" in text


def test_a_program_that_fails_is_an_error_with_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fork: examples.Runner
) -> None:
    (tmp_path / "broken.py").write_text("print('so far')\nraise OSError('no further')\n", encoding="utf-8")
    monkeypatch.setattr(examples, "FOLDER", tmp_path)
    for runner in (examples.in_own_process, fork):
        with pytest.raises(examples.ExampleError, match=r"broken\.py: exit code 1(.|\n)*OSError: no further"):
            examples.run("broken", runner)


def test_a_program_runs_in_an_empty_folder_beside_the_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fork: examples.Runner
) -> None:
    text = (
        "import os\nprint(os.listdir(), os.environ['HF_HUB_OFFLINE'], '  ')\nopen('made.html', 'w').close()\n"
    )
    (tmp_path / "look.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(examples, "FOLDER", tmp_path)
    for runner in (examples.in_own_process, fork):
        assert examples.run("look", runner).printed == "['models'] 1"
