"""What a recipe looks like before it runs, as text that a terminal can show."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from descant.cli.terminal import plain
from descant.recipes import requirements
from descant.recipes.loading import Look
from descant.recipes.recipe_files import Contents

__all__ = ["overview", "short"]

WIDE = 14  # of the names of what is shown


def short(text: str | None, skip: int = 0) -> str:
    """The beginning of a hash or a commit, enough to tell it apart."""
    return "" if text is None else text[: skip + 12]


def overview(found: Look, code: bool = False) -> str:
    """All that is known of a recipe without running it; every line of its own is behind a bar."""
    parts = [
        ("recipe", [plain(found.name)]),
        ("from", [_whence(found)]),
        ("kind", [found.kind or "known when it is imported"]),
        ("state", list(_state(found))),
    ]
    if found.contents is not None:
        parts += [
            ("hash", [found.contents.digest]),
            ("requirements", list(_needs(found.contents, found.name)) or ["none"]),
            ("files", list(_files(found.contents))),
        ]
    text = "".join(_entry(name, lines) for name, lines in parts)
    if found.contents is not None:
        text += _quoted("README.md", found.contents.readme)
        for path, data in found.contents.files.items() if code else ():
            if path.endswith(".py"):
                text += _quoted(path, data.decode(errors="replace"))
    return text


def _entry(name: str, lines: Sequence[str]) -> str:
    return "".join(f"{name if not at else '':<{WIDE}}{line}\n" for at, line in enumerate(lines))


def _whence(found: Look) -> str:
    if found.entry is not None:
        owner = found.entry.dist
        package = f"{owner.name} {owner.version}" if owner else "an installed package"
        return f"{plain(package)}, which is installed: {plain(found.entry.value)}"
    if found.reference.kind == "hub":
        return f"the Hub, {plain(str(found.reference.repo))} at commit {plain(str(found.revision))}"
    return f"the folder {plain(str(found.reference.path))}"


def _state(found: Look) -> Iterator[str]:
    """Whether it would run, in a sentence, and what has changed."""
    name = shlex.quote(plain(found.name))
    if found.state == "installed":
        yield "installed, and runs without further trust, as all of that package does"
    elif found.pin is None:
        yield "never trusted: it runs only with trust_remote_code=True, and is then pinned by its hash"
    elif found.state == "trusted":
        yield f"trusted on {plain(found.pin.trusted)}, and pinned: it runs with trust_remote_code=True"
    else:
        yield f"CHANGED since it was trusted on {plain(found.pin.trusted)}: it is refused"
        yield f"`descant recipe trust {name}` would trust it as it is here"
        now = found.now
        assert now is not None
        if now.revision != found.pin.revision:
            yield f"commit {short(found.pin.revision)} was trusted"
        yield from map(plain, found.pin.differences(now))


def _needs(contents: Contents, name: str) -> Iterator[str]:
    """Each requirement with what is installed of it."""
    asked = requirements.parsed(contents.requirements, name)
    missing = {str(one) for one in requirements.unmet(asked, name)}
    for one in asked:
        verdict = ", which does not do" if str(one) in missing else ""
        yield plain(f"{one} (installed: {requirements.installed(one.name)}{verdict})")


def _files(contents: Contents) -> Iterator[str]:
    mine = {f"{contents.code}{module}.py" for module in contents.modules}
    for path, data in contents.files.items():
        yield f"{len(data):>9,}  {plain(path)}{'  (code that would run)' if path in mine else ''}"


def _quoted(title: str, text: str | None) -> str:
    """A file behind a bar, so that none of its lines can be taken for one of ours."""
    if text is None:
        return f"\nno {plain(title)}\n"
    lines = "".join(f"  | {plain(line.expandtabs(4))}\n" for line in text.removesuffix("\n").split("\n"))
    return f"\n{plain(title)}\n{lines}"
