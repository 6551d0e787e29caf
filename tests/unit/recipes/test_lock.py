"""The lock file: pins come back as they were, a broken file is an error and stays, no writer loses a pin."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import filelock
import pytest

from descant.errors import RecipeError
from descant.recipes import lock as module
from descant.recipes.lock import Lock, Pin

DIGEST = "sha256:" + "a" * 64
OTHER = "sha256:" + "b" * 64
COMMIT = "c" * 40
TIME = "2026-01-01T00:00:00+00:00"


@pytest.fixture
def lock(tmp_path: Path) -> Lock:
    return Lock(tmp_path / "made" / "on" / "the" / "way" / "recipes.lock")


def pin(**changed: Any) -> Pin:
    return Pin(
        **{"revision": COMMIT, "digest": DIGEST, "files": {"generate.py": OTHER}, "trusted": TIME, **changed}
    )


def test_what_was_trusted_is_there_again(lock: Lock) -> None:
    assert lock.pins() == {}
    assert lock.pin("hub:a/b") is None
    assert not lock.path.parent.exists()  # reading makes nothing
    lock.trust("hub:a/b", pin())
    lock.trust("folder:/x", pin(revision=None))
    again = Lock(lock.path)
    assert again.pins() == {"hub:a/b": pin(), "folder:/x": pin(revision=None)}
    lock.trust("hub:a/b", pin(digest=OTHER))
    assert again.pin("hub:a/b") == pin(digest=OTHER)


def test_a_pin_has_a_date(lock: Lock) -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    lock.trust("hub:a/b", Pin(None, DIGEST))
    found = lock.pin("hub:a/b")
    assert found is not None
    assert before <= datetime.fromisoformat(found.trusted) <= datetime.now(UTC)


def test_forget(lock: Lock) -> None:
    lock.trust("hub:a/b", pin())
    assert lock.untrust("hub:a/b") is True
    assert lock.untrust("hub:a/b") is False
    assert lock.pins() == {}


def test_settle_keeps_the_first(lock: Lock) -> None:
    assert lock.get_or_add("hub:a/b", pin()) == pin()
    assert lock.get_or_add("hub:a/b", pin(digest=OTHER)) == pin()
    assert lock.pin("hub:a/b") == pin()


def test_settle_sees_who_was_first_meanwhile(lock: Lock, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Lock(lock.path)
    seen = lock.pin

    def late(key: str) -> Pin | None:
        found = seen(key)
        other.trust(key, pin(digest=OTHER))
        return found

    monkeypatch.setattr(lock, "pin", late)
    assert lock.get_or_add("hub:a/b", pin()) == pin(digest=OTHER)


def test_differences() -> None:
    before = pin(files={"a": DIGEST, "b": DIGEST, "c": DIGEST})
    after = pin(files={"b": DIGEST, "c": OTHER, "d": DIGEST})
    assert before.differences(after) == ["c has changed", "d is new", "a is gone"]
    assert before.differences(before) == []


def test_a_pin_cannot_be_changed() -> None:
    files = {"generate.py": DIGEST}
    made = pin(files=files)
    files["generate.py"] = OTHER
    assert made.files == {"generate.py": DIGEST}
    with pytest.raises(TypeError):
        made.files["x"] = DIGEST  # type: ignore[index]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"DESCANT_RECIPES_LOCK": "/somewhere/else.lock", "XDG_CONFIG_HOME": "/xdg"}, "/somewhere/else.lock"),
        ({"XDG_CONFIG_HOME": "/xdg"}, "/xdg/descant/recipes.lock"),
        ({"XDG_CONFIG_HOME": "not/absolute"}, "/home/somebody/.config/descant/recipes.lock"),
        ({}, "/home/somebody/.config/descant/recipes.lock"),
        ({"DESCANT_RECIPES_LOCK": "", "XDG_CONFIG_HOME": ""}, "/home/somebody/.config/descant/recipes.lock"),
        ({"DESCANT_RECIPES_LOCK": "~/my.lock"}, "/home/somebody/my.lock"),
    ],
)
def test_where_it_is(variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DESCANT_RECIPES_LOCK", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(Lock().path) == expected


def _changed(change: Callable[[dict[str, Any]], object]) -> str:
    data: dict[str, Any] = {
        "version": 1,
        "recipes": {
            "hub:a/b": {
                "revision": COMMIT,
                "digest": DIGEST,
                "files": {"generate.py": OTHER},
                "trusted": TIME,
            }
        },
    }
    change(data)
    return json.dumps(data)


def _pin(name: str, value: Any) -> str:
    return _changed(lambda data: data["recipes"]["hub:a/b"].update({name: value}))


BROKEN = {
    "empty": "",
    "no JSON": "{",
    "not UTF-8": b"\xff\xfe\x00",
    "a list": "[]",
    "no version": _changed(lambda data: data.pop("version")),
    "another version": _changed(lambda data: data.update(version=2)),
    "version true": _changed(lambda data: data.update(version=True)),
    "more": _changed(lambda data: data.update(more=1)),
    "recipes a list": _changed(lambda data: data.update(recipes=[])),
    "pin a string": _changed(lambda data: data["recipes"].update(x="y")),
    "pin with more": _pin("more", 1),
    "no digest": _changed(lambda data: data["recipes"]["hub:a/b"].pop("digest")),
    "short digest": _pin("digest", "sha256:ab"),
    "digest null": _pin("digest", None),
    "digest with a newline": _pin("digest", DIGEST + "\n"),
    "revision a branch": _pin("revision", "main"),
    "revision a number": _pin("revision", 1),
    "files a list": _pin("files", ["generate.py"]),
    "file without digest": _pin("files", {"generate.py": 1}),
    "trusted a number": _pin("trusted", 5),
    "trusted no time": _pin("trusted", "yesterday"),
    "twice the same key": _changed(
        lambda data: data["recipes"].update(twin=data["recipes"]["hub:a/b"])
    ).replace("twin", "hub:a/b"),
    "deep": "[" * 100_000,
    "deep in a pin": '{"version": 1, "recipes": {"a": ' + "[" * 100_000,
    "digits": '{"version": ' + "9" * 5000 + ', "recipes": {}}',
    "too large": _changed(lambda _: None) + " " * module.MAX_BYTES,
}


def test_the_cases_break_a_good_file(lock: Lock) -> None:
    lock.path.parent.mkdir(parents=True)
    lock.path.write_text(_changed(lambda _: None))
    assert lock.pin("hub:a/b") == pin()


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_an_error_and_stays(case: str, lock: Lock) -> None:
    given = BROKEN[case]
    data = given.encode() if isinstance(given, str) else given
    lock.path.parent.mkdir(parents=True)
    lock.path.write_bytes(data)
    tried: list[Callable[[], object]] = [
        lock.pins,
        lambda: lock.pin("hub:a/b"),
        lambda: lock.get_or_add("hub:a/b", pin()),
        lambda: lock.trust("hub:a/b", pin()),
        lambda: lock.untrust("hub:a/b"),
    ]
    for one in tried:
        with pytest.raises(RecipeError, match="cannot be read") as error:
            one()
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 600
    assert lock.path.read_bytes() == data


def test_a_folder_or_a_pipe_in_its_place_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot be read"):
        Lock(tmp_path).pins()
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(RecipeError, match="no regular file"):
            Lock(tmp_path / "pipe").pins()


def test_too_many_pins_leave_the_file_as_it_was(lock: Lock, monkeypatch: pytest.MonkeyPatch) -> None:
    lock.trust("hub:a/b", pin())
    before = lock.path.read_bytes()
    monkeypatch.setattr(module, "MAX_BYTES", len(before) + 10)
    with pytest.raises(RecipeError, match="larger"):
        lock.trust("hub:a/c", pin())
    assert lock.path.read_bytes() == before


def test_a_write_that_fails_leaves_the_file_and_nothing_beside(
    lock: Lock, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock.trust("hub:a/b", pin())
    before = lock.path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(RecipeError, match=r"No space left.*DESCANT_RECIPES_LOCK"):
        lock.trust("hub:a/c", pin())
    assert lock.path.read_bytes() == before
    assert {one.name for one in lock.path.parent.iterdir()} <= {"recipes.lock", "recipes.lock.lock"}


def test_only_its_owner_may_read_and_write_it(lock: Lock) -> None:
    lock.trust("hub:a/b", pin())
    assert stat.S_IMODE(lock.path.stat().st_mode) == 0o600


def test_a_link_to_it_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "recipes.lock").symlink_to(tmp_path / "kept" / "recipes.lock")
    Lock(tmp_path / "recipes.lock").trust("hub:a/b", pin())
    assert (tmp_path / "recipes.lock").is_symlink()
    assert Lock(tmp_path / "kept" / "recipes.lock").pin("hub:a/b") == pin()


def test_where_it_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match="cannot be written"):
        Lock(tmp_path / "file" / "recipes.lock").trust("hub:a/b", pin())


def test_another_holds_it(lock: Lock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TIMEOUT", 0.05)
    lock.trust("hub:a/b", pin())
    with (
        filelock.FileLock(f"{lock.path}.lock"),
        pytest.raises(RecipeError, match="another process holds it"),
    ):
        lock.trust("hub:a/c", pin())


def test_threads_lose_no_pin(lock: Lock) -> None:
    def write(number: int) -> None:
        for at in range(5):
            Lock(lock.path).trust(f"hub:a/{number}-{at}", pin())

    threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(lock.pins()) == 30


def test_processes_lose_no_pin(lock: Lock) -> None:
    # A package that is its folder alone: the whole library would take seconds to import.
    code = (
        "import sys, types; sys.modules['descant'] = whole = types.ModuleType('descant')\n"
        "whole.__path__ = [sys.argv[1]]\n"
        "from descant.recipes.lock import Lock, Pin\n"
        "for at in range(20):\n"
        "    Lock(sys.argv[2]).trust(f'hub:{sys.argv[3]}/{at}', Pin(None, 'sha256:' + '0' * 64))"
    )
    source = str(Path(module.__file__).parents[1])
    running = [
        subprocess.Popen([sys.executable, "-c", code, source, str(lock.path), who]) for who in ("a", "b")
    ]
    assert [one.wait() for one in running] == [0, 0]
    assert len(lock.pins()) == 40
