"""The files of a new recipe: valid, formatted, and consistent with their README."""

from __future__ import annotations

import runpy
import subprocess
import sys

import pytest
import torch

import descant
from descant.errors import InputError
from descant.recipes.recipe_files import RECIPE_KINDS, RecipeFiles
from descant.recipes.scaffold import new_recipe, template_files
from tools.docs import doc_blocks


@pytest.mark.parametrize("kind", RECIPE_KINDS)
def test_a_new_folder_is_a_recipe_of_its_kind(tmp_path, kind):
    folder = new_recipe("my-method", kind, tmp_path)
    contents = RecipeFiles.from_folder(folder)
    assert contents.defined_kinds() == (kind,)
    assert {name: data.decode() for name, data in contents.files.items()} == template_files("my-method", kind)
    assert len(contents.files["generate.py"].splitlines()) < 80
    assert contents.readme.startswith("---\nlibrary_name: transformers\ntags:\n- custom_generate\n")
    assert "# my-method\n" in contents.readme
    assert "$" not in contents.readme


@pytest.mark.parametrize("kind", RECIPE_KINDS)
def test_its_code_is_tidy(tmp_path, kind):
    folder = new_recipe("my-method", kind, tmp_path)
    for words in (["check", "--select", "B,C4,E,F,I,PT,RET,RUF,SIM,UP,W"], ["format", "--check", "--diff"]):
        # As in a folder of another user, without our settings.
        line = [sys.executable, "-m", "ruff", *words, "--isolated", "--no-cache", str(folder)]
        result = subprocess.run(line, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.usefixtures("extent")
@pytest.mark.parametrize(
    "kind", [kind for kind in RECIPE_KINDS if kind != "strategy"]
)  # see tests/e2e/cli/test_recipe.py
def test_it_fulfils_the_contracts_and_passes_its_own_tests(tmp_path, own_lock, kind):
    folder = new_recipe("my-method", kind, tmp_path)
    recipe = descant.load_recipe(folder, trust_remote_code=True)
    tests = runpy.run_path(str(folder / "tests" / "test_recipe.py"))
    own = {name: one for name, one in tests.items() if name.startswith("test_")}
    assert len(own) == 2
    assert "test_it_fulfils_the_contracts" in own
    for one in own.values():
        one(recipe)


@pytest.mark.parametrize("kind", RECIPE_KINDS)
def test_the_example_of_its_readme_runs(tmp_path, monkeypatch, capsys, real, kind):
    monkeypatch.chdir(tmp_path)
    folder = new_recipe("my-method", kind, tmp_path)
    [example] = [block for block in doc_blocks.read(folder / "README.md") if block.language == "python"]
    stories = real("stories15m")
    names = {"model": stories.model, "tokenizer": stories.tokenizer}
    exec(example.text, names)  # noqa: S102 - the example as a reader would run it
    assert capsys.readouterr().out.startswith("Once upon a time")
    assert names["ids"].shape[1] > names["inputs"]["input_ids"].shape[1]


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", ".hidden", "-x", "a/b", "../a", "/a", "a b", "a--b", "a..b", "a.", "a-", "a.git", "é",
     "a\n", "a\x1b[31m", "x" * 97, "$name"],
)  # fmt: skip
def test_a_bad_name_makes_nothing(tmp_path, name):
    with pytest.raises(InputError, match="`name` must be letters, digits"):
        new_recipe(name, "strategy", tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["a", "A1", "my-method", "my_method", "v1.5", "x" * 96])
def test_a_good_name_makes_a_folder(tmp_path, name):
    assert new_recipe(name, "processor", tmp_path).is_dir()


def test_what_a_killed_run_left_is_removed(tmp_path):
    left = tmp_path / f".fine.{'0' * 32}.descant-part"
    left.mkdir()
    (left / "torn").write_text("x")
    new_recipe("fine", "strategy", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["fine"]


def test_a_bad_kind_makes_nothing(tmp_path):
    with pytest.raises(InputError, match="`kind` must be one of generate, strategy, drafter, processor, wr"):
        new_recipe("fine", "beam", tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_is_there_stays(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "folder", "link"):
        with pytest.raises(InputError, match="must not exist yet"):
            new_recipe(name, "strategy", tmp_path)
    assert (tmp_path / "file").read_text() == "mine"
    assert not list((tmp_path / "folder").iterdir())
    assert not (tmp_path / "nowhere").exists()


def test_a_folder_that_cannot_be_made_is_an_error_of_ours(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"`name` must be a folder that can be created \(Not a directory\)"):
        new_recipe("fine", "strategy", tmp_path / "file")


def test_the_function_leaves_no_padding_of_samples_it_did_not_take(tiny, tmp_path):
    names: dict[str, object] = {}
    exec(template_files("my-method", "generate")["generate.py"], names)  # noqa: S102 - our own text
    model = tiny("llama").model
    for seed in range(8):
        ids = names["generate"](model, torch.tensor([[5, 9, 14]]), seed=seed, max_new_tokens=20)
        assert int(ids[0, -1]) == tiny("llama").eos or ids.shape[1] == 23
