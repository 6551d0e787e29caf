"""The guide's page on the command line: every line of its bash blocks gives the output of the page."""

from __future__ import annotations

import shlex

import pytest

from tests.support import pretrained, sound_folders
from tools.docs import doc_blocks

PAGE = doc_blocks.ROOT / "docs" / "guide" / "command-line.md"
BLOCKS = doc_blocks.read(PAGE)
BASH = [at for at, block in enumerate(BLOCKS) if block.language == "bash"]


def test_every_command_is_on_the_page():
    commands = {line.split("descant ")[1].split()[0] for at in BASH for line in BLOCKS[at].text.splitlines()}
    assert commands == {"generate", "chat", "explain", "tree", "show", "recipe", "watermark", "doctor"}


@pytest.mark.parametrize("at", BASH, ids=[f"line-{BLOCKS[at].line}" for at in BASH])
def test_it_prints_the_output_of_the_page(descant, monkeypatch, tmp_path, at):
    (tmp_path / "models").symlink_to(pretrained.folder("smollm2").parent)
    monkeypatch.chdir(tmp_path)
    [line] = BLOCKS[at].text.splitlines()
    before, _, command = line.rpartition(" | ")
    words = shlex.split(command)
    given = shlex.split(before)
    assert words[0] == "descant"
    assert given[:1] in ([], ["echo"])
    if "--input" in words:  # the block above shows the file
        assert BLOCKS[at - 1].language == "json"
        (tmp_path / words[words.index("--input") + 1]).write_text(BLOCKS[at - 1].text, encoding="utf-8")
    for option in {"--key", "--watermark", "--json-schema", "--tools"} & set(
        words
    ):  # a block above shows that one
        above = [block for block in BLOCKS[:at] if block.language == "json"]
        (tmp_path / words[words.index(option) + 1]).write_text(above[-1].text, encoding="utf-8")
    if words[1] == "generate" and "--out" in words:
        sound_folders.FOLDERS["musicgen"](tmp_path / words[2])
    for folder in (word for word in words if word.startswith("./")):  # a block above shows its code
        above = [block for block in BLOCKS[:at] if block.language == "python"]
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "generate.py").write_text(above[-1].text, encoding="utf-8")
    if words[1] in ("tree", "show"):  # of the trace that a block above makes
        made = [BLOCKS[one].text for one in BASH if one < at and f"--trace {words[2]}" in BLOCKS[one].text]
        assert descant(*shlex.split(made[-1])[1:]).exit_code == 0
    result = descant(*words[1:], input="".join(f"{text}\n" for text in given[1:]) or None)
    expected = BLOCKS[at + 1]
    assert expected.language == "text"
    shown = (result.stdout or result.stderr).replace(str(tmp_path.resolve()), "/home/ann")
    assert doc_blocks.tidy(shown) == doc_blocks.tidy(expected.text)
    assert (result.exit_code == 2) == (not result.stdout)
