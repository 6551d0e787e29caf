"""Untrusted recipes whose code leaves a file if it runs, and a fake interactive terminal."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from descant.recipes.loading import load_recipe
from tests.unit.config.hub import server
from tests.unit.config.hub.server import Hub

HARMLESS = "def generate(model, **kwargs):\n    return 'harmless'\n"


class Terminal(io.TextIOBase):
    """A standard input that claims to be a terminal, and records reads."""

    def __init__(self) -> None:
        self.readers: list[str] = []
        self.buffer: Any = self

    def isatty(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def _refuse(self, *_: Any) -> Any:
        self.readers.append("stdin")
        raise AssertionError("standard input was read")

    def ask(self, *_: Any) -> Any:
        """In the place of `input`."""
        self.readers.append("input")
        raise AssertionError("input() was called")

    read = readline = readlines = readinto = read1 = fileno = __next__ = _refuse


@dataclass
class World:
    """Where baits are laid: a folder, a Hub, and the mark that must never appear."""

    place: Path
    hub: Hub
    monkeypatch: pytest.MonkeyPatch
    canary: Path = field(init=False)
    others: list[Hub] = field(default_factory=list)  # further ones, to be closed

    def __post_init__(self) -> None:
        self.canary = self.place / "canary"

    @property
    def code(self) -> str:
        """A recipe that leaves its mark at import and when it is called."""
        mark = f"open({str(self.canary)!r}, 'w').close()"
        return f"{mark}\ndef generate(model, **kwargs):\n    {mark}\n    return 'caught'\n"

    def folder(self, name: str = "recipe", **files: str) -> Path:
        """A folder with these files, by their names without .py; `generate` is the bait if not given."""
        made = self.place / name
        made.mkdir(parents=True)
        for stem, text in {"generate": self.code, **files}.items():
            (made / f"{stem}.py").write_text(text)
        return made

    def repo(self, name: str, code: str | None = None, **more: str) -> server.Repo:
        """A repository with a recipe."""
        return self.hub.repo(name, {"generate.py": self.code if code is None else code, **more})


# Each lays a bait and gives its reference; those of REFUSED below are refused with trust, too.


def folder(world: World) -> Any:
    return str(world.folder())


def path(world: World) -> Any:
    return world.folder()


def relative(world: World) -> Any:
    world.folder()
    world.monkeypatch.chdir(world.place)
    return "recipe"


def transformers_layout(world: World) -> Any:
    world.folder("model/custom_generate")
    return str(world.place / "model")


def hub(world: World) -> Any:
    world.repo("eve/rec")
    return "eve/rec"


def hub_branch(world: World) -> Any:
    world.repo("eve/rec")
    return "eve/rec@main"


def hub_commit(world: World) -> Any:
    return f"eve/rec@{world.repo('eve/rec').head}"


def linked_folder(world: World) -> Any:
    (world.place / "link").symlink_to(world.folder())
    return str(world.place / "link")


def linked_file(world: World) -> Any:
    target = world.folder("elsewhere") / "generate.py"
    made = world.place / "recipe"
    made.mkdir()
    (made / "generate.py").symlink_to(target)
    return str(made)


def linked_code(world: World) -> Any:
    """The code folder of transformers' layout is a link."""
    made = world.place / "model"
    made.mkdir()
    (made / "custom_generate").symlink_to(world.folder("elsewhere"))
    return str(made)


def renamed(world: World) -> Any:
    world.repo("eve/new")
    world.hub.rename("ann/rec", "eve/new")
    return "ann/rec"


def impostor(world: World) -> Any:
    """The response is about another repository than the requested one."""
    world.repo("ann/rec").shown = "eve/new"
    return "ann/rec"


def other_host(world: World) -> Any:
    """The listing is the Hub's, and the files are sent for elsewhere."""
    world.repo("ann/rec", HARMLESS)
    other = Hub()
    world.others.append(other)
    other.repo("ann/rec", {"generate.py": world.code})
    true = server._Handler.file

    def away(self: Any, name: str, revision: str, path: str, fault: str) -> None:
        if self.hub is not world.hub:
            return true(self, name, "main", path, fault)
        self.send(302, b"", {"Location": f"{other.url}/{name}/resolve/{revision}/{path}"}, "")
        return None

    world.monkeypatch.setattr(server._Handler, "file", away)
    return "ann/rec"


def changed_folder(world: World) -> Any:
    made = world.folder(generate=HARMLESS)
    load_recipe(made, trust_remote_code=True)
    (made / "generate.py").write_text(world.code)
    return str(made)


def changed_module(world: World) -> Any:
    """Not `generate.py` itself, but what it imports."""
    made = world.folder(generate="from . import other\n" + HARMLESS, other="x = 1\n")
    load_recipe(made, trust_remote_code=True)
    (made / "other.py").write_text(world.code)
    return str(made)


def swapped_for_a_link(world: World) -> Any:
    made = world.folder(generate=HARMLESS)
    load_recipe(made, trust_remote_code=True)
    (made / "generate.py").unlink()
    (made / "generate.py").symlink_to(world.folder("elsewhere") / "generate.py")
    return str(made)


def changed_branch(world: World) -> Any:
    repo = world.repo("ann/rec", HARMLESS)
    load_recipe("ann/rec@main", trust_remote_code=True)
    repo.commit({"generate.py": world.code})
    return "ann/rec@main"


def changed_tag(world: World) -> Any:
    repo = world.repo("ann/rec", HARMLESS)
    repo.tag("v1")
    load_recipe("ann/rec@v1", trust_remote_code=True)
    repo.commit({"generate.py": world.code})
    repo.tag("v1")
    return "ann/rec@v1"


def changed_cache(world: World) -> Any:
    """The Hub's cache on this machine has been modified."""
    world.repo("ann/rec", HARMLESS)
    load_recipe("ann/rec", trust_remote_code=True)
    for one in world.hub.cache.rglob("generate.py"):
        target = one.resolve()
        target.chmod(0o644)
        target.write_text(world.code)
    return "ann/rec"


def changed_commit(world: World) -> Any:
    """The Hub gives other bytes for a commit that was pinned, and nothing is cached."""
    repo = world.repo("ann/rec", HARMLESS)
    load_recipe("ann/rec", trust_remote_code=True)
    repo.commits[repo.head].files["generate.py"] = world.code.encode()
    shutil.rmtree(world.hub.cache)
    return "ann/rec"


Source = Callable[[World], Any]
# Refused only for lack of trust.
PLAIN: tuple[Source, ...] = (folder, path, relative, transformers_layout, hub, hub_branch, hub_commit)
LINKS: tuple[Source, ...] = (linked_folder, linked_file, linked_code)
REDIRECTS: tuple[Source, ...] = (renamed, impostor, other_host)
CHANGES: tuple[Source, ...] = (
    changed_folder, changed_module, swapped_for_a_link, changed_branch, changed_tag, changed_cache,
    changed_commit,
)  # fmt: skip
# Refused also where trust is given.
REFUSED: tuple[Source, ...] = (*LINKS, *REDIRECTS, *CHANGES)
