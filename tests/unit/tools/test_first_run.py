"""The path of a newcomer is that of the README."""

from __future__ import annotations

import subprocess

from tools import first_run


def test_the_line_for_cpus_is_the_first() -> None:
    titles = [title for title, _ in first_run.steps([])]
    assert titles[0] == "pip install torch --index-url https://download.pytorch.org/whl/cpu"
    assert titles[1] == 'pip install "descant[cli]"'
    assert titles[2].startswith("hf download ")
    assert titles[3:] == ["the first example", "the commands that write run.html"]


def test_its_commands_are_those_of_the_page() -> None:
    *_, (_, example), (_, commands) = first_run.steps([])
    assert "descant.generate(" in example[-1]
    assert "--html run.html" in commands[-1]
    for _, command in first_run.steps([]):
        if command[0] == "bash":
            subprocess.run(["bash", "-n", "-c", command[-1]], check=True)
