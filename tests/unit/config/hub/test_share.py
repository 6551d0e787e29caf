"""Recipes pushed to the Hub: the folder's files, exactly, and nothing that could not be loaded again."""

import os

import pytest

from descant.config import hub as face
from descant.config.generation_config import GenerationConfig
from descant.config.hub import cache_folder
from descant.errors import HubError, RecipeError
from descant.recipes.loading import push_recipe
from descant.recipes.recipe_files import RecipeFiles, select_files

GENERATE = "from .other import x\n\n\ndef generate(model, input_ids=None, **rest):\n    return input_ids\n"


@pytest.fixture
def folder(tmp_path):
    """A recipe with a sibling module, tests, a config, and what a working folder has besides."""
    root = tmp_path / "last-words"
    files = {
        "generate.py": GENERATE, "other.py": "x = 1\n", "requirements.txt": "torch\n",
        "README.md": "---\ntags: [custom_generate]\n---\n# Last\n", "tests/test_it.py": "x = 1\n",
        ".git/config": "token = secret\n", "__pycache__/generate.pyc": "no", ".env": "HF_TOKEN=secret",
    }  # fmt: skip
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    GenerationConfig(do_sample=True, top_p=0.5).save_pretrained(root, "bold.json")
    return root


@pytest.fixture
def ann(hub):
    hub.user("ann", "hf_anns")
    hub.login("hf_anns")
    return hub


SHARED = {"generate.py", "other.py", "README.md", "requirements.txt", "tests/test_it.py", "bold.json"}


def fetched(repo: str) -> RecipeFiles:
    """The recipe as another user gets it."""
    commit = face.resolve_commit(repo)
    return RecipeFiles.from_files(face.fetch_files(repo, commit.sha, select_files(commit.files, repo)), repo)


def test_a_recipe_is_pushed_as_it_is(ann, folder):
    sha = push_recipe(folder, "ann/last-words", private=True, message="first")
    repo = ann.repos["ann/last-words"]
    assert (repo.head, repo.private, repo.commits[sha].message) == (sha, True, "first")
    assert repo.files == {name: (folder / name).read_bytes() for name in SHARED}
    assert "secret" not in repr(repo.files)
    assert fetched("ann/last-words").digest == RecipeFiles.from_folder(folder).digest
    assert push_recipe(folder, "last-words") == sha  # the user's, and nothing has changed
    (folder / "other.py").write_text("x = 2\n")
    assert push_recipe(folder, "ann/last-words") != sha
    assert repo.files["other.py"] == b"x = 2\n"
    assert repo.commits[repo.head].message == "Upload the recipe last-words"


def test_what_the_folder_has_no_more_is_an_error_until_it_is_pruned(ann, folder):
    push_recipe(folder, "ann/last-words")
    repo = ann.repos["ann/last-words"]
    before = repo.head
    (folder / "other.py").rename(folder / "another.py")
    (folder / "generate.py").write_text(GENERATE.replace(".other", ".another"))
    with pytest.raises(RecipeError, match=r"`ann/last-words` holds files .*: other\.py; .*prune=True"):
        push_recipe(folder, "ann/last-words")
    assert repo.head == before
    push_recipe(folder, "ann/last-words", prune=True)
    assert set(repo.files) == (SHARED - {"other.py"}) | {"another.py"}
    assert fetched("ann/last-words").digest == RecipeFiles.from_folder(folder).digest


def test_a_models_own_files_are_left_alone(ann, folder, tmp_path):
    model = {
        "model.safetensors": b"0" * 2_000_000,
        "config.json": b"{}",
        "modeling_x.py": b"",
        ".gitattributes": b"",
    }
    repo = ann.repo("ann/model", {**model, "custom_generate/stale.py": "", "custom_generate/generate.py": ""})
    (tmp_path / "layout").mkdir()
    folder.rename(tmp_path / "layout" / "custom_generate")
    for moved in ("README.md", "tests", "bold.json"):
        (tmp_path / "layout" / "custom_generate" / moved).rename(tmp_path / "layout" / moved)
    push_recipe(tmp_path / "layout", "ann/model", prune=True)
    assert model.items() <= repo.files.items()
    assert "custom_generate/stale.py" not in repo.files
    assert repo.files["custom_generate/generate.py"] == GENERATE.encode()
    assert not [asked for asked in ann.since() if "/resolve/" in asked]
    assert fetched("ann/model").digest == RecipeFiles.from_folder(tmp_path / "layout").digest


def break_link(folder):
    (folder / "evil.py").symlink_to("/etc/passwd")


def break_pickle(folder):
    (folder / "weights.pkl").write_bytes(b"\x80\x04.")


def break_giant(folder):
    with (folder / "giant.py").open("wb") as file:
        os.truncate(file.fileno(), 1 << 30)


def break_requirements(folder):
    (folder / "requirements.txt").write_text("evil @ https://example.com/evil.zip\n")


def break_code(folder):
    (folder / "generate.py").unlink()


@pytest.mark.parametrize("broken", [break_link, break_pickle, break_giant, break_requirements, break_code])
def test_nothing_odd_is_pushed(ann, folder, broken):
    broken(folder)
    with pytest.raises(RecipeError):
        push_recipe(folder, "ann/last-words")
    assert ann.asked == []
    assert ann.repos == {}


def test_a_push_that_may_not_be_is_named(hub, folder):
    with pytest.raises(HubError, match="there is none"):
        push_recipe(folder, "ann/last-words")
    with pytest.raises(HubError, match="there is none"):
        push_recipe(folder, "last-words", token=False)
    assert hub.asked == []
    hub.user("eve", "hf_eves")
    with pytest.raises(HubError, match="the token may not"):
        push_recipe(folder, "ann/last-words", token="hf_eves")
    with pytest.raises(HubError, match="write owner/name"):
        push_recipe(folder, "ann/last words", token="hf_eves")
    hub.offline()
    with pytest.raises(HubError, match="nothing can be pushed offline"):
        push_recipe(folder, "ann/last-words", token="hf_eves")
    assert hub.repos == {}


def test_pushing_runs_nothing(ann, folder):
    (folder / "generate.py").write_text("raise SystemExit('it ran')\n" + GENERATE)
    push_recipe(folder, "ann/last-words")
    assert ann.repos["ann/last-words"].files["generate.py"].startswith(b"raise SystemExit")


def test_a_config_is_pushed_and_read_through_a_cache_of_its_own(ann, tmp_path):
    config = GenerationConfig(num_beams=4)
    sha = config.push_to_hub("ann/configs", private=True, commit_message="first")
    repo = ann.repos["ann/configs"]
    assert (repo.head, repo.private, repo.commits[sha].message) == (sha, True, "first")
    assert repo.files == {"generation_config.json": config.to_json_string().encode()}
    config.push_to_hub("configs", config_file_name="beams.json")
    own = tmp_path / "cache"
    for name in (None, "beams.json"):
        assert GenerationConfig.from_pretrained("ann/configs", name, own, revision="main") == config
    assert (own / "models--ann--configs").is_dir()
    assert not cache_folder("ann/configs").exists()
