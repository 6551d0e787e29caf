"""Hostile recipes: each is refused by name before any of it is imported, trusted or not."""

from __future__ import annotations

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


BOTH: dict[str, tuple[Change, str]] = {
    # Where the code is.
    "nothing": (lambda _: {"README.md": b"# A recipe"}, "has no `generate.py`"),
    "main-under-another-case": (lambda bait: {"Generate.py": bait.main}, "has no `generate.py`"),
    "main-is-a-folder": (lambda bait: {"generate.py/a.py": bait.main}, "has no `generate.py`"),
    "two-mains": (
        lambda bait: {"generate.py": bait.main, "custom_generate/generate.py": bait.main},
        "has both `generate.py` and `custom_generate/`",
    ),
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
    "two-methods": (code("class strategy: ...\n"), "got generate and strategy"),
    "two-methods-by-import": (code("from os import path as drafter\n"), "got generate and drafter"),
    # How much it is.
    "large": (also("data.txt", b"a" * ((1 << 20) + 1)), "1048577 bytes"),
    "large-python": (code("#" * (1 << 19)), r"'generate.py' has \d+ bytes"),
    "much-python": (
        lambda bait: {"generate.py": bait.main, **{f"m{at}.py": b"#" * (1 << 18) for at in range(4)}},
        "bytes of Python",
    ),
    "much": (
        lambda bait: {"generate.py": bait.main, **{f"{at}.txt": b"a" * (1 << 20) for at in range(8)}},
        r"(has|more than) \d+ bytes",
    ),
    "many": (
        lambda bait: {"generate.py": bait.main, **{f"{at}.txt": b"" for at in range(200)}},
        r"(has|more than) \d+ files",
    ),
    "deep": (also("a/" * 9 + "b.txt"), "more than 8"),
    # Names that mislead.
    "name-backslash": (also("a\\b.py"), "leads elsewhere"),
    "name-newline": (also("a\nb.txt"), "misread"),
    "name-escape": (also("a\x1b[2Jb.txt"), "misread"),
    "name-bidi": (also("gp\u202eyp.txt"), "misread"),
    "name-unseen": (also("generate\u200b.py"), "misread"),
    "name-of-no-unicode": (also("caf\udce9.txt"), "misread"),
    "module-init": (lambda bait: {"generate.py": CODE, "__init__.py": bait.mark}, "must be empty"),
    # Unreadable files, by name or by type.
    **{
        f"opaque{suffix}": (also(f"deep/in/data{suffix}"), "compiled, pickled or packed")
        for suffix in (
            ".so",
            ".so.1.2",
            ".pyc",
            ".pth",
            ".PICKLE",
            ".pt",
            ".bin",
            ".npy",
            ".whl",
            ".tar.gz",
            ".joblib",
        )
    },
    # Python that is not what it looks like.
    "python-not-utf8": (code(b"# caf\xe9\n"), "must be UTF-8"),
    "python-utf16": (lambda bait: {"generate.py": bait.main.decode().encode("utf-16")}, "must be UTF-8"),
    "python-marked": (
        lambda bait: {"generate.py": b"\xef\xbb\xbf" + bait.main},
        r"invisible character U\+FEFF in line 1",
    ),
    "python-nul": (code("x = 1\0\n"), r"U\+0000"),
    "python-bidi": (code("x = 'user\u202e \u2066# admin\u2069 \u2066'\n"), "invisible character"),
    "python-unseen-space": (code("x = 'a\u200bb'\n"), r"U\+200B"),
    "python-unseen-tags": (code("x = 'a\U000e0061\U000e0062'\n"), r"U\+E0061"),
    "python-line-separator": (code("# comment\u2028x = 1\n"), r"U\+2028"),
    "python-escape": (code("# \x1b]0;title\x07\n"), "invisible character"),
    "python-does-not-parse": (code("def f(:\n"), "must be valid Python in line 5"),
    "python-deep-operators": (code("x = " + "-" * 100_000 + "1\n"), "nested too deep"),
    "python-deep-attributes": (code("x = a" + ".b" * 100_000 + "\n"), "nested too deep"),
    "sibling-bidi": (also("other.py", "x = 'a\u202eb'\n"), "'other.py' has the invisible character"),
    # Settings that cannot be read.
    "json-broken": (also("a.json", "{"), "must be JSON"),
    "json-nan": (also("a.json", '{"top_p": NaN}'), "must be JSON"),
    "json-deep": (also("a.json", "[" * 200_000), "must be JSON"),
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
            "direct": "torch @ https://evil.example/torch.whl",
            "path": "./torch",
            "escape": "torch \x1b[2J",
        }.items()
    },
    "requirements-not-utf8": (also("requirements.txt", b"torch # caf\xe9"), "must be UTF-8"),
    "requirements-many": (also("requirements.txt", "torch\n" * 101), "at most 100 requirements"),
    "requirement-long": (also("requirements.txt", "torch" + " " * 300 + ">=2"), "of 300 characters"),
}


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
    "nothing", "two-mains", "two-methods", "large", "many", "deep", "module-init", "opaque.bin",
    "python-bidi", "python-does-not-parse", "json-deep", "requirement-direct",
)  # fmt: skip


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
    for case in ("large", "many", "deep", "opaque.bin", "two-mains"):
        change, match = BOTH[case]
        hub.repo(f"eve/{case}", dict(change(bait)))
        with pytest.raises(RecipeError, match=match):
            inspect_recipe(f"eve/{case}")
    assert not [one for one in hub.since() if "resolve" in one]


# --- What only a listing can hold.

LISTED = (
    "../evil.py", "data/../../evil.py", ".cache/../../evil.py", "/tmp/evil.py", "./generate.py", "",
    "data//a.txt", "data/", "generate.py\0.txt", "..\\evil.py", "\\\\evil\\share.py",
)  # fmt: skip


@pytest.mark.parametrize("main", ["generate.py", "custom_generate/generate.py"])
@pytest.mark.parametrize("path", LISTED)
def test_listed(path: str, main: str, bait: Bait) -> None:
    files = {main: bait.main, path: bait.main}
    refused(bait, "eve/bad", "leads elsewhere", lambda: RecipeFiles.from_files(files, "eve/bad"))


def test_a_listing_without_end(bait: Bait) -> None:
    files = {"custom_generate/generate.py": bait.main, **{f"{at}.txt": b"" for at in range(10_001)}}
    refused(bait, "eve/bad", "10002 files", lambda: RecipeFiles.from_files(files, "eve/bad"))


# --- What only a disk can hold.


def linked_folder(bait: Bait) -> Path:
    real = bait.place / "real"
    real.mkdir()
    (real / "generate.py").write_bytes(bait.main)
    bait.folder.symlink_to(real)
    return bait.folder


def link(name: str, target: str, main: str = "generate.py") -> Callable[[Bait], Path]:
    """A link in a folder whose code is in `main`."""

    def lay(bait: Bait) -> Path:
        folder = bait.laid({main: bait.main})
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(target)
        return folder

    return lay


def with_main(change: Callable[[Path], object]) -> Callable[[Bait], Path]:
    """The bait, whose folder is changed."""

    def lay(bait: Bait) -> Path:
        folder = bait.laid({"generate.py": bait.main})
        change(folder)
        return folder

    return lay


def listen(folder: Path) -> None:
    here = os.getcwd()
    os.chdir(folder)  # the name of a socket may not be long
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind("socket")
    finally:
        os.chdir(here)


def make_device(folder: Path) -> None:
    try:
        os.mknod(folder / "zero", 0o020666, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("only root makes devices")


def swap_main_for_pipe(folder: Path) -> None:
    (folder / "generate.py").unlink()
    os.mkfifo(folder / "generate.py")


def crowd(folder: Path) -> None:
    for at in range(10_001):
        os.close(os.open(folder / f".{at}", os.O_CREAT))


def alone(bait: Bait) -> Path:
    bait.folder.write_bytes(bait.main)
    return bait.folder


INNER = "custom_generate/generate.py"
DISK: dict[str, tuple[Callable[[Bait], Path], str]] = {
    "linked": (linked_folder, "its folder is a link"),
    "linked-main": (link("generate.py", "../main.py", "other.py"), "'generate.py' is a link"),
    "linked-main-within": (link("generate.py", "other.py", "other.py"), "'generate.py' is a link"),
    "linked-code": (link("custom_generate", "code", "code/generate.py"), "'custom_generate' is a link"),
    "linked-readme": (link("README.md", "/etc/passwd"), "'README.md' is a link"),
    "linked-config": (link("generation_config.json", "/etc/passwd", INNER), "is a link"),
    "linked-requirements": (link("requirements.txt", "/dev/stdin", INNER), "is a link"),
    "linked-parent": (link("data", ".."), "'data' is a link"),
    "linked-below": (link("custom_generate/data", "..", INNER), "generate/data' is a link"),
    "linked-to-itself": (link("other.py", "other.py"), "'other.py' is a link"),
    "pipe": (with_main(lambda folder: os.mkfifo(folder / "data.txt")), "neither a file nor a folder"),
    "pipe-as-main": (with_main(swap_main_for_pipe), "neither a file nor a folder"),
    "socket": (with_main(listen), "neither a file nor a folder"),
    "device": (with_main(make_device), "neither a file nor a folder"),
    "sparse": (with_main(lambda folder: os.truncate(folder / "generate.py", 1 << 40)), f"{1 << 40} bytes"),
    "folders-without-end": (
        with_main(lambda folder: (folder / ("a/" * 60)).mkdir(parents=True)),
        "more than 8 deep",
    ),
    "entries-without-end": (with_main(crowd), "more than 10000 entries"),
    "no-folder": (alone, "got a file"),
    "nowhere": (lambda bait: bait.folder, "there is no such folder"),
}


@pytest.mark.parametrize("case", DISK)
def test_only_on_disk(case: str, bait: Bait) -> None:
    lay, match = DISK[case]
    refused_folder(bait, lay(bait), match)
