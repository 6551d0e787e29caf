"""What a recipe looks like before it runs, as text that a terminal can show."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from descant.cli.terminal import escape_control
from descant.recipes import requirements
from descant.recipes.loading import RecipeInfo
from descant.recipes.recipe_files import RecipeFiles

__all__ = ["recipe_overview", "short_hash"]

LABEL_WIDTH = 14  # of the names of what is shown


def short_hash(text: str | None, skip: int = 0) -> str:
    """The beginning of a hash or a commit, enough to tell it apart."""
    return "" if text is None else text[: skip + 12]


def recipe_overview(found: RecipeInfo, code: bool = False) -> str:
    """All that is known of a recipe without running it; every line of its own is behind a bar."""
    parts = [
        ("recipe", [escape_control(found.name)]),
        ("from", [_origin(found)]),
        ("kind", [found.kind or "known when it is imported"]),
        ("state", list(_trust_lines(found))),
    ]
    if found.contents is not None:
        parts += [
            ("hash", [found.contents.digest]),
            ("requirements", list(_requirement_lines(found.contents, found.name)) or ["none"]),
            ("files", list(_file_lines(found.contents))),
        ]
    text = "".join(_format_entry(name, lines) for name, lines in parts)
    if found.contents is not None:
        text += _quote_file("README.md", found.contents.readme)
        for path, data in found.contents.files.items() if code else ():
            if path.endswith(".py"):
                text += _quote_file(path, data.decode(errors="replace"))
    return text


def _format_entry(name: str, lines: Sequence[str]) -> str:
    return "".join(f"{name if not at else '':<{LABEL_WIDTH}}{line}\n" for at, line in enumerate(lines))


def _origin(found: RecipeInfo) -> str:
    if found.entry_point is not None:
        owner = found.entry_point.dist
        package = f"{owner.name} {owner.version}" if owner else "an installed package"
        return f"{escape_control(package)}, which is installed: {escape_control(found.entry_point.value)}"
    if found.reference.kind == "hub":
        return f"the Hub, {escape_control(str(found.reference.repo))} at commit {escape_control(str(found.revision))}"
    return f"the folder {escape_control(str(found.reference.path))}"


def _trust_lines(found: RecipeInfo) -> Iterator[str]:
    """Whether it would run, in a sentence, and what has changed."""
    name = shlex.quote(escape_control(found.name))
    if found.trust_state == "installed":
        yield "installed, and runs without further trust, as all of that package does"
    elif found.pin is None:
        yield "never trusted: it runs only with trust_remote_code=True, and is then pinned by its hash"
    elif found.trust_state == "trusted":
        yield f"trusted on {escape_control(found.pin.trusted)}, and pinned: it runs with trust_remote_code=True"
    else:
        yield f"CHANGED since it was trusted on {escape_control(found.pin.trusted)}: it is refused"
        yield f"`descant recipe trust {name}` would trust it as it is here"
        now = found.current_pin
        assert now is not None
        if now.revision != found.pin.revision:
            yield f"commit {short_hash(found.pin.revision)} was trusted"
        yield from map(escape_control, found.pin.differences(now))


def _requirement_lines(contents: RecipeFiles, name: str) -> Iterator[str]:
    """Each requirement with what is installed of it."""
    asked = requirements.parse_requirements(contents.requirements, name)
    missing = {str(one) for one in requirements.unmet_requirements(asked, name)}
    for one in asked:
        verdict = ", which does not do" if str(one) in missing else ""
        yield escape_control(f"{one} (installed: {requirements.installed_version(one.name)}{verdict})")


def _file_lines(contents: RecipeFiles) -> Iterator[str]:
    mine = {f"{contents.code_prefix}{module}.py" for module in contents.modules}
    for path, data in contents.files.items():
        yield f"{len(data):>9,}  {escape_control(path)}{'  (code that would run)' if path in mine else ''}"


def _quote_file(title: str, text: str | None) -> str:
    """A file behind a bar, so that none of its lines can be taken for one of ours."""
    if text is None:
        return f"\nno {escape_control(title)}\n"
    lines = "".join(
        f"  | {escape_control(line.expandtabs(4))}\n" for line in text.removesuffix("\n").split("\n")
    )
    return f"\n{escape_control(title)}\n{lines}"
