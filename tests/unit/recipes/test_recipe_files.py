"""A recipe's files: read once, without leaving the folder, and hashed as they run."""

from __future__ import annotations

import hashlib
import os
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from descant.errors import RecipeError
from descant.recipes import recipe_files as reading
from descant.recipes.recipe_files import MAX_FILE_BYTES, RECIPE_KINDS, RecipeFiles, select_files

MAIN = b"def generate(model, left_padding=None, **kwargs):\n    return model\n"
FLAT = {
    "README.md": "# Mine, 日本語 👨\u200d👩\n".encode(),
    "data/words.txt": b"a\0b",
    "generate.py": MAIN,
    "generation_config.json": b'{"top_k": 5, "stop_strings": ["--", "a/b -- c"]}',
    "other.py": b"from .third import x\n",
    "requirements.txt": b"torch>=2\n",
    "short.json": b"{}",
    "tests/test_it.py": b"def test_it(): ...\n",
    "third.py": b"x = 1\n",
}
INNER = {
    "README.md": b"# Model and recipe",
    "custom_generate/README.md": b"# Recipe",
    "custom_generate/data.json": b"{}",
    "custom_generate/generate.py": MAIN,
    "custom_generate/other.py": b"x = 1\n",
    "custom_generate/requirements.txt": b"numpy\n",
    "generation_config.json": b"{}",
    "translation_generation_config.json": b"{}",
}
MODEL = {
    "config.json": b'{"auto_map": {"AutoModel": "modeling_x.Model"}}',
    "model.safetensors": b"\0" * (2 << 20),
    "pytorch_model.bin": b"PK\x03\x04",
    "tokenizer.json": b"[" * 100_000,
    "modeling_x.py": b"not python at all (",
    "weird\u202ename.txt": b"",
    "Config.json": b"",
}


def laid(place: Path, files: dict[str, bytes]) -> Path:
    for path, data in files.items():
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_bytes(data)
    return place


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "recipe").mkdir()
    return tmp_path / "recipe"


@pytest.mark.parametrize("files", [FLAT, INNER], ids=["flat", "inner"])
def test_a_folder_and_the_hub_give_the_same(files: dict[str, bytes], place: Path) -> None:
    on_disk = RecipeFiles.from_folder(laid(place, files), "mine")
    fetched = RecipeFiles.from_files(dict(reversed(files.items())), "owner/name")
    assert dict(on_disk.files) == dict(fetched.files) == files
    assert list(on_disk.files) == list(fetched.files) == sorted(files)
    assert on_disk.digest == fetched.digest
    assert (on_disk.name, fetched.name) == ("mine", "owner/name")


def test_the_files_of_a_flat_folder(place: Path) -> None:
    found = RecipeFiles.from_folder(laid(place, FLAT))
    assert found.name == str(place)
    assert found.code_prefix == ""
    assert found.modules == {"generate": MAIN, "other": FLAT["other.py"], "third": FLAT["third.py"]}
    assert found.requirements == ["torch>=2"]
    assert found.readme == FLAT["README.md"].decode()
    assert found.configs == ("generation_config.json", "short.json")
    assert found.defined_kinds() == ("generate",)
    assert found.hashes["third.py"] == f"sha256:{hashlib.sha256(b'x = 1' + bytes([10])).hexdigest()}"
    assert found.hashes.keys() == FLAT.keys()


def test_the_files_in_the_layout_of_transformers(place: Path) -> None:
    found = RecipeFiles.from_folder(laid(place, INNER))
    assert found.code_prefix == "custom_generate/"
    assert found.modules == {"generate": MAIN, "other": b"x = 1\n"}
    assert found.requirements == ["numpy"]
    assert found.readme == "# Model and recipe"
    assert found.configs == ("generation_config.json", "translation_generation_config.json")
    laid(place, {}).joinpath("README.md").unlink()
    assert RecipeFiles.from_folder(place).readme == "# Recipe"


def test_a_models_own_files_beside_the_code_folder_are_left_alone(place: Path) -> None:
    laid(place, {**INNER, **MODEL})
    (place / "blobs").symlink_to("/etc")
    os.mkfifo(place / "pipe")
    assert dict(RecipeFiles.from_folder(place).files) == INNER
    assert dict(RecipeFiles.from_files({**INNER, **MODEL}, "owner/name").files) == INNER
    sizes = {path: len(data) for path, data in {**INNER, **MODEL}.items()}
    assert select_files({**sizes, "model.safetensors": 1 << 40}, "owner/name") == tuple(sorted(INNER))


def test_a_listing_is_refused_before_anything_is_fetched() -> None:
    assert select_files({"generate.py": 10, "big.txt": MAX_FILE_BYTES}, "owner/name") == (
        "big.txt",
        "generate.py",
    )
    with pytest.raises(RecipeError, match=f"'big.txt' has {MAX_FILE_BYTES + 1} bytes"):
        select_files({"generate.py": 10, "big.txt": MAX_FILE_BYTES + 1}, "owner/name")
    with pytest.raises(RecipeError, match="compiled, pickled or packed"):
        select_files({"generate.py": 10, "model.bin": 1}, "owner/name")


@pytest.mark.parametrize(
    "hidden", [".git/config", ".env", "__pycache__/generate.pyc", "a/.hid/x.so", "a/__pycache__/b.pyc"]
)
def test_hidden_files_are_passed_over(hidden: str, place: Path) -> None:
    plain = {"generate.py": MAIN, "a/b.txt": b""}
    files = {**plain, hidden: b"\x80\x04." * (1 << 20)}
    assert dict(RecipeFiles.from_folder(laid(place, files)).files) == plain
    assert dict(RecipeFiles.from_files(files, "r").files) == plain


def test_the_digest_is_of_names_and_bytes_alone(place: Path, tmp_path: Path) -> None:
    first = RecipeFiles.from_folder(laid(place, FLAT)).digest
    again = laid(tmp_path / "again", dict(reversed(FLAT.items())))
    for path in FLAT:
        os.chmod(again / path, 0o755)
        os.utime(again / path, (1, 1))
    (again / "empty").mkdir()
    assert RecipeFiles.from_folder(again, "another name").digest == first
    assert first.startswith("sha256:")
    assert len(first) == 7 + 64


@pytest.mark.parametrize(
    "change",
    [
        {"third.py": b"x = 2\n"},
        {"third.py": b"x = 1\n\n"},
        {"tests/test_it.py": b""},
        {"new.txt": b""},
        {"data/words.txt": None, "data/word.txt": b"sa\0b"},
        {"data/words.txt": None},
        {"data/words.txt": None, "words.txt": b"a\0b"},
    ],
)
def test_any_change_changes_the_digest(change: dict[str, bytes | None]) -> None:
    changed = {path: data for path, data in {**FLAT, **change}.items() if data is not None}
    assert RecipeFiles.from_files(changed, "r").digest != RecipeFiles.from_files(FLAT, "r").digest


def test_the_digest_stays_what_it_was() -> None:
    """Lock files hold it: a way to hash that changes refuses everybody's recipes."""
    found = RecipeFiles.from_files({"generate.py": b"def generate(model): ...\n", "a.txt": b"a"}, "r").digest
    whole = b"descant recipe 1\0"
    for part in (b"a.txt", b"a", b"generate.py", b"def generate(model): ...\n"):
        whole += len(part).to_bytes(8, "big") + part
    assert found == f"sha256:{hashlib.sha256(whole).hexdigest()}"


def test_what_was_read_is_kept(place: Path) -> None:
    found = RecipeFiles.from_folder(laid(place, FLAT))
    digest = found.digest
    (place / "generate.py").write_bytes(b"raise SystemExit\n")
    assert found.files["generate.py"] == MAIN
    assert (found.digest, found.modules["generate"]) == (digest, MAIN)
    with pytest.raises(TypeError):
        found.files["generate.py"] = b""  # type: ignore[index]


# --- What it defines.


@pytest.mark.parametrize("kind", RECIPE_KINDS)
@pytest.mark.parametrize(
    "text",
    [
        "def {}(model): ...",
        "async def {}(model): ...",
        "class {}: ...",
        "{} = print",
        "a, (b, *{}) = 1, (2, 3)",
        "from .other import x as {}",
        "try:\n    from .fast import {}\nexcept ImportError as error:\n    pass",
        "with open('x') as {}: ...",
        "print({} := 1)",
        "match 1:\n    case 1:\n        {} = 1",
    ],
)
def test_every_way_to_define(kind: str, text: str) -> None:
    found = RecipeFiles.from_files({"generate.py": text.format(kind).encode()}, "r")
    assert found.defined_kinds() == (kind,)


@pytest.mark.parametrize(
    "text",
    [
        "class A:\n    def strategy(self): ...\n    drafter = 1",
        "def f():\n    strategy = 1\n    def drafter(): ...",
        "strategy: int",
        "x.strategy = y['drafter'] = 1",
        "a = lambda strategy: strategy",
        "try: ...\nexcept E as strategy: ...",
        "# def strategy(): ...\nx = 'wrapper = 1'",
    ],
)
def test_what_is_no_definition(text: str) -> None:
    found = RecipeFiles.from_files({"generate.py": f"{text}\n".encode() + MAIN}, "r")
    assert found.defined_kinds() == ("generate",)


def test_a_tree_that_is_deeper_than_the_compiler_minds(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(text: str) -> None:
        raise RecursionError

    monkeypatch.setattr(reading.ast, "parse", parse)
    with pytest.raises(RecipeError, match=r"'generate.py' is nested too deep"):
        RecipeFiles.from_files({"generate.py": MAIN}, "r")


# --- Who changes a folder while it is read.


def on_call(
    monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[..., None], when: Callable[..., bool]
) -> None:
    """Call `change` once, just before a function of `os` that is called with what `when` looks for."""
    original, done = getattr(os, name), []

    def called(*given: Any, **more: Any) -> Any:
        if not done and when(*given, **more):
            done.append(True)
            change()
        return original(*given, **more)

    monkeypatch.setattr(reading.os, name, called)


@pytest.mark.parametrize("size", [len(MAIN) + 1, 1 << 20, 9], ids=["more", "much-more", "less"])
def test_a_file_that_grows_or_shrinks_while_it_is_read(
    size: int, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = laid(place, FLAT) / "generate.py"
    on_call(
        monkeypatch, "open", lambda: os.truncate(main, size), lambda path, *_, **__: path == "generate.py"
    )
    with pytest.raises(RecipeError, match=r"'generate.py' changed while it was read"):
        RecipeFiles.from_folder(place, "mine")


def test_a_file_that_vanishes(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    laid(place, FLAT)
    on_call(monkeypatch, "open", (place / "other.py").unlink, lambda path, *_, **__: path == "other.py")
    with pytest.raises(RecipeError, match="cannot be read: No such file"):
        RecipeFiles.from_folder(place, "mine")


def test_a_folder_under_constant_change(place: Path) -> None:
    """Whatever comes out was in one file at one time, and nothing from outside."""
    laid(place, {"generate.py": MAIN})
    (place.parent / "secret").write_bytes(b"secret = 1\n")
    stop = threading.Event()

    def swap() -> None:
        at, other = place / "other.py", place / ".other"
        while not stop.is_set():
            other.write_bytes(b"x = 1\n")
            other.rename(at)
            other.symlink_to("../secret")
            other.rename(at)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for _ in range(300):
            try:
                found = RecipeFiles.from_folder(place, "mine").files.get("other.py")
            except RecipeError:
                continue
            assert found in (None, b"x = 1\n")
    finally:
        stop.set()
        thread.join()


def test_no_file_stays_open(place: Path) -> None:
    laid(place, FLAT)
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for name in ("data/link", None):
        if name:
            (place / name).symlink_to("x")
            with pytest.raises(RecipeError):
                RecipeFiles.from_folder(place)
            (place / name).unlink()
        else:
            RecipeFiles.from_folder(place)
    after = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    assert after == before


def test_a_giant_costs_no_memory(place: Path) -> None:
    laid(place, {"generate.py": MAIN})
    with open(place / "data.txt", "wb") as file:
        file.truncate(1 << 35)
    tracemalloc.start()
    try:
        with pytest.raises(RecipeError):
            RecipeFiles.from_folder(place)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("files", "size", "most"), [(40, 1 << 20, 9), (1000, 0, 202)], ids=["bytes", "files"]
)
def test_reading_ends_where_it_is_too_much(
    files: int, size: int, most: int, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not when all has been read."""
    for at in range(files):
        (place / f"{at}.txt").touch()
        os.truncate(place / f"{at}.txt", size)
    opened: list[object] = []
    on_call(monkeypatch, "open", lambda: None, lambda path, *_, **__: bool(opened.append(path)))
    with pytest.raises(RecipeError, match=r"has \d+ (files|bytes)"):
        RecipeFiles.from_folder(place)
    assert 1 < len(opened) <= most + 1  # the folder itself is opened first


def test_where_links_cannot_be_detected_nothing_is_read(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    laid(place, FLAT)
    monkeypatch.delattr(reading.os, "fwalk")
    with pytest.raises(RecipeError, match="this system cannot read a folder without following links"):
        RecipeFiles.from_folder(place)


# --- Anything at all.

NAMES = st.text(alphabet="abgenerate.pyGE/\\\0\u202e\u0301é _-:", max_size=14)
PATHS = NAMES | st.sampled_from(
    ["generate.py", "custom_generate/generate.py", "a.json", "README.md", "requirements.txt"]
)
BYTES = st.binary(max_size=40) | st.sampled_from(
    [MAIN, b"{}", b"torch", b"", b'{"auto_map": 1}', b"strategy = 1"]
)


@settings(deadline=None, max_examples=500)
@given(st.dictionaries(PATHS, BYTES, max_size=5), st.booleans())
def test_any_files_are_a_recipe_or_refused(files: dict[str, bytes], sound: bool) -> None:
    if sound:
        files = {**files, "generate.py": MAIN}
    try:
        found = RecipeFiles.from_files(files, "owner/name")
    except RecipeError as error:
        told = str(error)
    else:
        told = "recipe `owner/name`: "
        assert len(found.defined_kinds()) == 1
        for path, data in found.files.items():
            assert files[path] == data
            assert path.isprintable()
            assert not {"..", "", "."} & set(path.split("/"))
    assert told.startswith("recipe `owner/name`: ")
    assert told.isprintable()
