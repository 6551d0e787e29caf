"""Hostile recipes: each is refused by name before any of it is imported, trusted or not."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from descant.errors import MissingRequirements, RecipeError
from descant.recipes.loading import inspect_recipe, load_recipe
from descant.recipes.recipe_files import RecipeFiles
from tests.security.clock import spent
from tests.unit.config.hub.server import Hub

Files = dict[str, bytes]
CODE = b"\ndef generate(model, **kwargs):\n    return 'caught'\n"
SECONDS = 2.0  # of CPU time, for a recipe made to be as slow to refuse as possible


@dataclass(frozen=True)
class Bait:
    """A place for a hostile recipe, and the mark that its code would leave."""

    place: Path

    @property
    def canary(self) -> Path:
        return self.place / "canary"

    @property
    def folder(self) -> Path:
        return self.place / "recipe"

    @property
    def mark(self) -> bytes:
        return f"open({str(self.canary)!r}, 'w').close()\n".encode()

    @property
    def main(self) -> bytes:
        return self.mark + CODE

    def laid(self, files: Files) -> Path:
        """The folder with these files."""
        self.folder.mkdir(exist_ok=True)
        for path, data in files.items():
            at = os.path.join(os.fsencode(self.folder), path.encode("utf-8", "surrogateescape"))
            os.makedirs(os.path.dirname(at), exist_ok=True)
            with open(at, "wb") as file:
                file.write(data)
        return self.folder


@pytest.fixture
def bait(tmp_path: Path) -> Bait:
    return Bait(tmp_path)


def refused(bait: Bait, name: str, match: str, attempt: Callable[[], object]) -> None:
    modules = set(sys.modules)
    with spent() as seconds, pytest.raises(RecipeError, match=match) as caught:
        attempt()
    assert seconds[0] < SECONDS
    assert not isinstance(caught.value, MissingRequirements)
    assert caught.value.recipe == name
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).isprintable()
    assert not bait.canary.exists()
    assert not {one for one in set(sys.modules) - modules if "recipe_" in one}


def refused_folder(bait: Bait, folder: Path, match: str) -> None:
    name = str(folder)
    refused(bait, name, match, lambda: load_recipe(name, trust_remote_code=True))
    refused(bait, name, match, lambda: inspect_recipe(name))


def test_the_bait_works(bait: Bait) -> None:
    """Without anything hostile the canary is there, so that its absence below is significant."""
    recipe = load_recipe(str(bait.laid({"generate.py": bait.main})), trust_remote_code=True)
    assert bait.canary.exists()
    assert recipe.make(None) == "caught"


# --- What files hold, and what they are called: the same on disk and from the Hub.

Change = Callable[[Bait], Files]


def also(path: str, data: bytes | str = b"x") -> Change:
    """The bait with one file more."""
    return lambda bait: {"generate.py": bait.main, path: data.encode() if isinstance(data, str) else data}


def code(text: str | bytes) -> Change:
    """The bait with more code behind it."""
    return lambda bait: {"generate.py": bait.main + (text.encode() if isinstance(text, str) else text)}


def instead(text: str | bytes) -> Change:
    """The canary, and other code instead of the method."""
    return lambda bait: {"generate.py": bait.mark + (text.encode() if isinstance(text, str) else text)}


def before(text: str | bytes) -> Change:
    """The bait with something before its first line."""
    return lambda bait: {"generate.py": (text.encode() if isinstance(text, str) else text) + bait.main}


def config(value: object) -> str:
    return json.dumps(value)


BOTH: dict[str, tuple[Change, str]] = {
    # Where the code is.
    "nothing": (lambda _: {"README.md": b"# A recipe"}, "has no `generate.py`"),
    "main-under-another-case": (lambda bait: {"Generate.py": bait.main}, "has no `generate.py`"),
    "main-hidden": (lambda bait: {".generate.py": bait.main, "a.py": bait.main}, "has no `generate.py`"),
    "main-is-a-folder": (lambda bait: {"generate.py/a.py": bait.main}, "has no `generate.py`"),
    "two-mains": (
        lambda bait: {"generate.py": bait.main, "custom_generate/generate.py": bait.main},
        "has both `generate.py` and `custom_generate/`",
    ),
    "two-mains-one-a-file": (also("custom_generate"), "has both"),
    "code-folder-is-a-file": (
        lambda bait: {"custom_generate": bait.main},
        "has no `custom_generate/generate.py`",
    ),
    "code-folder-without-main": (
        lambda bait: {"custom_generate/other.py": bait.main},
        "has no `custom_generate/generate.py`",
    ),
    # What it defines.
    "no-method": (instead("def decode(model):\n    return 1\n"), "must define one of .*, got none"),
    "no-method-but-inside": (instead("class A:\n    def generate(model): ...\n"), "got none"),
    "two-methods": (code("class strategy: ...\n"), "got generate and strategy"),
    "two-methods-by-import": (code("from os import path as drafter\n"), "got generate and drafter"),
    "two-methods-in-a-branch": (code("if model := 0:\n    wrapper, b = 1, 2\n"), "got generate and wrapper"),
    # How much it is.
    "large": (also("data.txt", b"a" * ((1 << 20) + 1)), "1048577 bytes"),
    "large-python": (code("#" * (1 << 19)), r"'generate.py' has \d+ bytes"),
    "much": (
        lambda bait: {"generate.py": bait.main, **{f"{at}.txt": b"a" * (1 << 20) for at in range(8)}},
        r"(has|more than) \d+ bytes",
    ),
    "much-python": (
        lambda bait: {"generate.py": bait.main, **{f"m{at}.py": b"#" * (1 << 18) for at in range(4)}},
        "bytes of Python",
    ),
    "many": (
        lambda bait: {"generate.py": bait.main, **{f"{at}.txt": b"" for at in range(200)}},
        r"(has|more than) \d+ files",
    ),
    "deep": (also("a/" * 9 + "b.txt"), "more than 8"),
    "long-name": (also("a" * 201), "201 characters"),
    # Names that mislead.
    "name-backslash": (also("a\\b.py"), "leads elsewhere"),
    "name-drive": (also("c:evil.txt"), "misread"),
    "name-newline": (also("a\nb.txt"), "misread"),
    "name-escape": (also("a\x1b[2Jb.txt"), "misread"),
    "name-bidi": (also("gp\u202eyp.txt"), "misread"),
    "name-unseen": (also("generate\u200b.py"), "misread"),
    "name-of-no-unicode": (also("caf\udce9.txt"), "misread"),
    "name-trailing-space": (also("generate.py "), "misread"),
    "name-trailing-dot": (also("generate.py."), "misread"),
    "name-not-nfc": (also("cafe\u0301.txt"), "misread"),
    "name-case": (also("GENERATE.PY", CODE), "cannot tell"),
    "name-compatible": (
        lambda bait: {"generate.py": bait.main, "\uff46it.txt": b"", "fit.txt": b""},
        "cannot tell",
    ),
    "module-init": (lambda bait: {"generate.py": CODE, "__init__.py": bait.mark}, "must be empty"),
    "module-init-of-code-folder": (
        lambda bait: {"custom_generate/generate.py": CODE, "custom_generate/__init__.py": bait.mark},
        "must be empty",
    ),
    # Unreadable files, by name or by type.
    **{
        f"opaque{suffix}": (also(f"deep/in/data{suffix}"), "compiled, pickled or packed")
        for suffix in (
            *(".so", ".so.1.2", ".pyd", ".pyc", ".pth", ".pkl", ".PICKLE", ".pt", ".bin", ".ckpt", ".npy"),
            *(".npz", ".egg", ".whl", ".zip", ".tar.gz", ".joblib", ".dll", ".jar", ".h5"),
        )
    },
    "opaque-in-code-folder": (
        lambda bait: {"custom_generate/generate.py": bait.main, "custom_generate/x.bin": b"x"},
        "'custom_generate/x.bin' is compiled, pickled or packed",
    ),
    # Python that is not what it looks like.
    "python-not-utf8": (code(b"# caf\xe9\n"), "must be UTF-8"),
    "python-utf16": (lambda bait: {"generate.py": bait.main.decode().encode("utf-16")}, "must be UTF-8"),
    "python-marked": (before(b"\xef\xbb\xbf"), r"invisible character U\+FEFF in line 1"),
    "python-utf7": (before("# -*- coding: utf-7 -*-\n"), "says that it is 'utf-7'"),
    "python-rot13": (before("#!/usr/bin/env python\n# vim: set fileencoding=rot13 :\n"), "'rot13'"),
    "python-cookie-behind-return": (before("\r# coding: utf-7\r\n"), r"U\+000D"),
    "python-nul": (code("x = 1\0\n"), r"U\+0000"),
    "python-bidi": (code("x = 'user\u202e \u2066# admin\u2069 \u2066'\n"), "invisible character"),
    "python-bidi-in-comment": (code("# \u2067 only a comment\n"), r"U\+2067"),
    "python-unseen-space": (code("x = 'a\u200bb'\n"), r"U\+200B"),
    "python-unseen-letter": (code("def f(a, \u3164=1): ...\n"), r"U\+3164"),
    "python-unseen-tags": (code("x = 'a\U000e0061\U000e0062'\n"), r"U\+E0061"),
    "python-unseen-selectors": (code("x = 'a\U000e0101\U000e0102'\n"), r"U\+E0101"),
    "python-line-separator": (code("# comment\u2028x = 1\n"), r"U\+2028"),
    "python-escape": (code("# \x1b]0;title\x07\n"), "invisible character"),
    "python-homoglyph": (code("\u0430dmin = 1\n"), "not ASCII in line 5"),
    "python-compatible-name": (code("\U0001d41e\U0001d431\U0001d41e\U0001d41c('x')\n"), "not ASCII"),
    "python-homoglyph-in-format": (code("x = f'{\u0430dmin}'\n"), "not ASCII"),
    "python-does-not-parse": (code("def f(:\n"), "must be valid Python in line 5"),
    "python-does-not-compile": (code("return 1\n"), "'return' outside function"),
    "python-number": (code("x = " + "9" * 5000 + "\n"), "must be valid Python"),
    "python-deep-operators": (code("x = " + "-" * 100_000 + "1\n"), "nested too deep"),
    "python-deep-attributes": (code("x = a" + ".b" * 100_000 + "\n"), "nested too deep"),
    "python-deep-brackets": (
        code("x = " + "(" * 5000 + ")" * 5000 + "\n"),
        "must be valid Python|nested too deep",
    ),
    "python-deep-blocks": (code("".join(" " * at + "if x:\n" for at in range(150))), "must be valid Python"),
    "sibling-does-not-parse": (also("other.py", "def f(:\n"), "'other.py' must be valid Python"),
    "test-does-not-parse": (also("tests/test_it.py", "def f(:\n"), "'tests/test_it.py' must be valid Python"),
    "sibling-bidi": (also("other.py", "x = 'a\u202eb'\n"), "'other.py' has the invisible character"),
    # Settings that cannot be read.
    "json-broken": (also("a.json", "{"), "must be JSON"),
    "json-nan": (also("a.json", '{"top_p": NaN}'), "must be JSON"),
    "json-deep": (also("a.json", "[" * 200_000), "must be JSON"),
    "json-number": (also("a.json", "9" * 5000), "must be JSON"),
    "json-utf16": (also("a.json", config({"a": 1}).encode("utf-16")), "must be UTF-8"),
    "json-no-object": (also("generation_config.json", "[1]"), "must hold an object"),
    "readme-not-utf8": (also("README.md", b"caf\xe9"), "must be UTF-8"),
    # Requirements that are more than names and versions.
    **{
        f"requirement-{name}": (
            also("requirements.txt", f"torch\n{line}\n"),
            "must be a package name with versions",
        )
        for name, line in {
            "index": "--index-url https://evil.example/simple",
            "extra-index": "--extra-index-url=https://evil.example/simple",
            "file": "-r other.txt",
            "editable": "-e .",
            "address": "https://evil.example/torch-9-py3-none-any.whl",
            "direct": "torch @ https://evil.example/torch.whl",
            "git": "git+https://evil.example/torch",
            "path": "./torch",
            "wheel": "torch-9-py3-none-any.whl",
            "hash": "torch==2.4 --hash=sha256:00",
            "environment": "torch==${VERSION}",
            "continued": "torch\\",
            "escape": "torch \x1b[2J",
            "none": "!!!",
        }.items()
    },
    "requirements-not-utf8": (also("requirements.txt", b"torch # caf\xe9"), "must be UTF-8"),
    "requirements-many": (also("requirements.txt", "torch\n" * 101), "at most 100 requirements"),
    "requirement-long": (also("requirements.txt", "torch" + " " * 300 + ">=2"), "of 300 characters"),
}


def test_there_are_enough() -> None:
    assert len(BOTH) + len(LISTED) + len(DISK) >= 30


@pytest.mark.parametrize("case", BOTH)
def test_on_disk(case: str, bait: Bait) -> None:
    if "name-" in case and sys.platform != "linux":
        pytest.skip("this system's files cannot all be called so")
    change, match = BOTH[case]
    refused_folder(bait, bait.laid(change(bait)), match)


@pytest.mark.parametrize("case", BOTH)
def test_from_the_hub(case: str, bait: Bait) -> None:
    change, match = BOTH[case]
    refused(bait, "eve/bad", match, lambda: RecipeFiles.from_files(change(bait), "eve/bad"))


SERVED = (
    *(
        "nothing",
        "two-mains",
        "two-methods",
        "large",
        "many",
        "deep",
        "name-case",
        "module-init",
        "opaque.pkl",
    ),
    *("opaque-in-code-folder", "python-bidi", "python-homoglyph", "python-does-not-parse", "json-deep"),
    *("requirement-index", "requirement-direct"),
)


@pytest.mark.parametrize("case", SERVED)
def test_served_by_the_hub(case: str, bait: Bait, hub: Hub) -> None:
    change, match = BOTH[case]
    hub.repo("eve/bad", dict(change(bait)))
    refused(bait, "eve/bad", match, lambda: load_recipe("eve/bad", trust_remote_code=True))


def test_a_served_bait_works(bait: Bait, hub: Hub) -> None:
    """And one that is sound does run, so that the test above is significant."""
    hub.repo("eve/bad", {"generate.py": bait.main})
    assert load_recipe("eve/bad", trust_remote_code=True).make(None) == "caught"
    assert bait.canary.exists()
    assert [one for one in hub.since() if "resolve" in one]  # how a file is asked for


def test_what_a_listing_refuses_is_not_fetched(bait: Bait, hub: Hub) -> None:
    for case in ("large", "many", "deep", "name-case", "opaque.pkl", "two-mains"):
        change, match = BOTH[case]
        hub.repo(f"eve/{case}", dict(change(bait)))
        with pytest.raises(RecipeError, match=match):
            inspect_recipe(f"eve/{case}")
    assert not [one for one in hub.since() if "resolve" in one]


# --- What only a listing can hold.

LISTED: dict[str, str] = {
    "parent": "../evil.py",
    "parent-within": "data/../../evil.py",
    "parent-hidden": ".cache/../../evil.py",
    "absolute": "/tmp/evil.py",
    "this": "./generate.py",
    "empty": "",
    "empty-part": "data//a.txt",
    "folder": "data/",
    "nul": "generate.py\0.txt",
    "windows-parent": "..\\evil.py",
    "windows-share": "\\\\evil\\share.py",
}


@pytest.mark.parametrize("main", ["generate.py", "custom_generate/generate.py"])
@pytest.mark.parametrize("case", LISTED)
def test_listed(case: str, main: str, bait: Bait) -> None:
    files = {main: bait.main, LISTED[case]: bait.main}
    refused(bait, "eve/bad", "leads elsewhere", lambda: RecipeFiles.from_files(files, "eve/bad"))


def test_a_listing_without_end(bait: Bait) -> None:
    files = {"custom_generate/generate.py": bait.main, **{f"{at}.txt": b"" for at in range(10_001)}}
    refused(bait, "eve/bad", "10002 files", lambda: RecipeFiles.from_files(files, "eve/bad"))


# --- What only a disk can hold.


def linked(bait: Bait) -> Path:
    real = bait.place / "real"
    real.mkdir()
    (real / "generate.py").write_bytes(bait.main)
    bait.folder.symlink_to(real)
    return bait.folder


def linked_loop(bait: Bait) -> Path:
    bait.folder.symlink_to(bait.folder)
    return bait.folder


def linked_main(bait: Bait) -> Path:
    (bait.place / "main.py").write_bytes(bait.main)
    bait.folder.mkdir()
    (bait.folder / "generate.py").symlink_to("../main.py")
    return bait.folder


def linked_main_within(bait: Bait) -> Path:
    folder = bait.laid({"other.py": bait.main})
    (folder / "generate.py").symlink_to("other.py")
    return folder


def linked_code(bait: Bait) -> Path:
    folder = bait.laid({"code/generate.py": bait.main})
    (folder / "custom_generate").symlink_to("code")
    return folder


def linked_code_elsewhere(bait: Bait) -> Path:
    (bait.place / "code").mkdir()
    (bait.place / "code" / "generate.py").write_bytes(bait.main)
    bait.folder.mkdir()
    (bait.folder / "custom_generate").symlink_to(bait.place / "code", target_is_directory=True)
    return bait.folder


def linked_beside(name: str, target: str, layout: str = "") -> Callable[[Bait], Path]:
    def lay(bait: Bait) -> Path:
        folder = bait.laid({f"{layout}generate.py": bait.main})
        at = folder / name
        at.parent.mkdir(exist_ok=True)
        at.symlink_to(target)
        return folder

    return lay


def pipe(name: str) -> Callable[[Bait], Path]:
    def lay(bait: Bait) -> Path:
        folder = bait.laid({} if name == "generate.py" else {"generate.py": bait.main})
        os.mkfifo(folder / name)
        return folder

    return lay


def listening(bait: Bait) -> Path:
    folder = bait.laid({"generate.py": bait.main})
    here = os.getcwd()
    os.chdir(folder)  # the name of a socket may not be long
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind("socket")
    finally:
        os.chdir(here)
    return folder


def device(bait: Bait) -> Path:
    folder = bait.laid({"generate.py": bait.main})
    try:
        os.mknod(folder / "zero", 0o020666, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("only root makes devices")
    return folder


def sparse(bait: Bait) -> Path:
    folder = bait.laid({"generate.py": bait.main})
    with open(folder / "data.txt", "wb") as file:
        file.truncate(1 << 40)
    return folder


def sparse_main(bait: Bait) -> Path:
    folder = bait.laid({"generate.py": bait.main})
    os.truncate(folder / "generate.py", 1 << 40)
    return folder


def deep(bait: Bait) -> Path:
    folder = bait.laid({"generate.py": bait.main})
    (folder / ("a/" * 60)).mkdir(parents=True)
    return folder


def crowded(bait: Bait) -> Path:
    folder = bait.laid({"generate.py": bait.main})
    for at in range(10_001):
        os.close(os.open(folder / f".{at}", os.O_CREAT))
    return folder


def alone(bait: Bait) -> Path:
    bait.folder.write_bytes(bait.main)
    return bait.folder


DISK: dict[str, tuple[Callable[[Bait], Path], str]] = {
    "linked": (linked, "its folder is a link"),
    "linked-loop": (linked_loop, "its folder is a link"),
    "linked-main": (linked_main, "'generate.py' is a link"),
    "linked-main-within": (linked_main_within, "'generate.py' is a link"),
    "linked-code": (linked_code, "'custom_generate' is a link"),
    "linked-code-elsewhere": (linked_code_elsewhere, "'custom_generate' is a link"),
    "linked-readme": (linked_beside("README.md", "/etc/passwd"), "'README.md' is a link"),
    "linked-config": (
        linked_beside("generation_config.json", "/etc/passwd", "custom_generate/"),
        "is a link",
    ),
    "linked-requirements": (linked_beside("requirements.txt", "/dev/stdin", "custom_generate/"), "is a link"),
    "linked-folder": (linked_beside("data", "/etc"), "'data' is a link"),
    "linked-parent": (linked_beside("data", ".."), "'data' is a link"),
    "linked-below": (
        linked_beside("custom_generate/data", "..", "custom_generate/"),
        "generate/data' is a link",
    ),
    "linked-dangling": (linked_beside("other.py", "nowhere.py"), "'other.py' is a link"),
    "linked-to-itself": (linked_beside("other.py", "other.py"), "'other.py' is a link"),
    "pipe": (pipe("data.txt"), "neither a file nor a folder"),
    "pipe-as-main": (pipe("generate.py"), "neither a file nor a folder"),
    "socket": (listening, "neither a file nor a folder"),
    "device": (device, "neither a file nor a folder"),
    "sparse": (sparse, f"{1 << 40} bytes"),
    "sparse-main": (sparse_main, f"{1 << 40} bytes"),
    "folders-without-end": (deep, "more than 8 deep"),
    "entries-without-end": (crowded, "more than 10000 entries"),
    "no-folder": (alone, "got a file"),
    "nowhere": (lambda bait: bait.folder, "there is no such folder"),
}


@pytest.mark.parametrize("case", DISK)
def test_only_on_disk(case: str, bait: Bait) -> None:
    lay, match = DISK[case]
    refused_folder(bait, lay(bait), match)
