"""The overview of a recipe, as text that is safe for a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from descant.cli.terminal import escape_control
from descant.recipes import requirements
from descant.recipes.loading import RecipeInfo
from descant.recipes.recipe_files import RecipeFiles

__all__ = ["recipe_overview", "short_hash"]

LABEL_WIDTH = 14


def short_hash(text: str | None, skip: int = 0) -> str:
    """The first characters of a hash or commit."""
    return "" if text is None else text[: skip + 12]


def recipe_overview(info: RecipeInfo, code: bool = False) -> str:
    """All that is known of a recipe without running it; lines of its own files are behind a bar."""
    parts = [
        ("recipe", [escape_control(info.name)]),
        ("from", [_origin(info)]),
        ("kind", [info.kind or "known when it is imported"]),
        ("state", list(_trust_lines(info))),
    ]
    if info.contents is not None:
        parts += [
            ("hash", [info.contents.digest]),
            ("requirements", list(_requirement_lines(info.contents, info.name)) or ["none"]),
            ("files", list(_file_lines(info.contents))),
        ]
    text = "".join(_format_entry(name, lines) for name, lines in parts)
    if info.contents is not None:
        text += _quote_file("README.md", info.contents.readme)
        for path, data in info.contents.files.items() if code else ():
            if path.endswith(".py"):
                text += _quote_file(path, data.decode(errors="replace"))
    return text


def _format_entry(name: str, lines: Sequence[str]) -> str:
    return "".join(f"{name if not index else '':<{LABEL_WIDTH}}{line}\n" for index, line in enumerate(lines))


def _origin(info: RecipeInfo) -> str:
    if info.entry_point is not None:
        owner = info.entry_point.dist
        package = f"{owner.name} {owner.version}" if owner else "an installed package"
        return f"{escape_control(package)}, which is installed: {escape_control(info.entry_point.value)}"
    if info.reference.kind == "hub":
        repo, commit = escape_control(str(info.reference.repo)), escape_control(str(info.revision))
        return f"the Hub, {repo} at commit {commit}"
    return f"the folder {escape_control(str(info.reference.path))}"


def _trust_lines(info: RecipeInfo) -> Iterator[str]:
    """Whether it would run, and what has changed."""
    name = shlex.quote(escape_control(info.name))
    if info.trust_state == "installed":
        yield "installed, and runs without further trust, as all of that package does"
    elif info.pin is None:
        yield "never trusted: it runs only with trust_remote_code=True, and is then pinned by its hash"
    elif info.trust_state == "trusted":
        date = escape_control(info.pin.trusted)
        yield f"trusted on {date}, and pinned: it runs with trust_remote_code=True"
    else:
        yield f"CHANGED since it was trusted on {escape_control(info.pin.trusted)}: it is refused"
        yield f"`descant recipe trust {name}` would trust it as it is here"
        current = info.current_pin
        assert current is not None
        if current.revision != info.pin.revision:
            yield f"commit {short_hash(info.pin.revision)} was trusted"
        yield from map(escape_control, info.pin.differences(current))


def _requirement_lines(contents: RecipeFiles, name: str) -> Iterator[str]:
    """Each requirement with the installed version."""
    parsed = requirements.parse_requirements(contents.requirements, name)
    missing = {str(requirement) for requirement in requirements.unmet_requirements(parsed, name)}
    for requirement in parsed:
        verdict = ", which does not do" if str(requirement) in missing else ""
        yield escape_control(
            f"{requirement} (installed: {requirements.installed_version(requirement.name)}{verdict})"
        )


def _file_lines(contents: RecipeFiles) -> Iterator[str]:
    code_paths = {f"{contents.code_prefix}{module}.py" for module in contents.modules}
    for path, data in contents.files.items():
        note = "  (code that would run)" if path in code_paths else ""
        yield f"{len(data):>9,}  {escape_control(path)}{note}"


def _quote_file(title: str, text: str | None) -> str:
    """A file behind a bar, so that its lines cannot be mistaken for those of the overview."""
    if text is None:
        return f"\nno {escape_control(title)}\n"
    lines = "".join(
        f"  | {escape_control(line.expandtabs(4))}\n" for line in text.removesuffix("\n").split("\n")
    )
    return f"\n{escape_control(title)}\n{lines}"
