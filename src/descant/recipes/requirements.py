"""The packages that a recipe says it needs, and whether they are here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from importlib import metadata
from typing import Final

from packaging.markers import UndefinedComparison, UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier
from packaging.version import InvalidVersion, Version

from descant.errors import MissingRequirements, RecipeError, format_value

__all__ = ["check", "installed_version", "parse_requirements", "requirement_lines", "unmet_requirements"]

_COMMENT: Final = re.compile(r"(^|\s)#.*")
_MAX_LINES: Final = 100
_MAX_LINE_CHARS: Final = 300
_ARCHIVE_SUFFIXES: Final = (".whl", ".zip", ".egg", ".gz", ".tgz", ".bz2", ".xz", ".tar")


def requirement_lines(text: str) -> list[str]:
    """The lines of a requirements.txt that say something, without their comments."""
    return [line for line in (_COMMENT.sub("", one).strip() for one in text.splitlines()) if line]


def parse_requirements(given: Iterable[str], recipe: str) -> list[Requirement]:
    """The requirements of these lines; RecipeError for a line that is more than a package and its versions.

    Options, addresses and paths would say where to get a package from, which is not a recipe's to say.
    """
    found = []
    for at, line in enumerate(given):
        what = f"its requirement {format_value(line)}"
        if at == _MAX_LINES or len(line) > _MAX_LINE_CHARS:
            raise RecipeError(
                recipe, f"must have at most {_MAX_LINES} requirements of {_MAX_LINE_CHARS} characters"
            )
        try:
            one = Requirement(line)
        except (InvalidRequirement, InvalidVersion, RecursionError):
            one = None
        plain = one is not None and one.url is None and not one.name.casefold().endswith(_ARCHIVE_SUFFIXES)
        if one is None or not plain or not line.isprintable():
            do = "keep to names with versions, as in `torch>=2.4`"
            raise RecipeError(recipe, f"{what} is an option, an address, a path or none at all: {do}")
        found.append(one)
    return found


def check(given: Iterable[str], recipe: str) -> None:
    """Refuse a recipe whose requirements are not all met, with a list of those that are not."""
    missing = [
        f"{one} (installed: {installed_version(one.name)})"
        for one in unmet_requirements(parse_requirements(given, recipe), recipe)
    ]
    if missing:
        raise MissingRequirements(recipe, missing)


def unmet_requirements(given: Iterable[Requirement], recipe: str) -> Iterator[Requirement]:
    """Those of these requirements that apply here and are not met, and those that their extras bring."""
    left = list(given)[::-1]
    seen: set[str] = set()
    while left:
        one = left.pop()
        if str(one) in seen or not _is_applicable(one, recipe):
            continue
        seen.add(str(one))
        if not _is_met(one):
            yield one
        else:
            left += reversed(_extra_requirements(one))


def installed_version(name: str) -> str | None:
    """The version of an installed package."""
    try:
        return metadata.version(name)
    except (metadata.PackageNotFoundError, KeyError, ValueError):
        return None


def _is_met(one: Requirement) -> bool:
    here = installed_version(one.name)
    if here is None:
        return False
    try:
        # What is installed was somebody's choice, a pre-release of theirs too.
        return one.specifier.contains(Version(here), prereleases=True)
    except InvalidVersion:
        return not one.specifier


def _is_applicable(one: Requirement, recipe: str) -> bool:
    try:
        return one.marker is None or one.marker.evaluate({"extra": ""})
    except (UndefinedComparison, UndefinedEnvironmentName, InvalidSpecifier, InvalidVersion, RecursionError):
        raise RecipeError(
            recipe, f"the marker of its requirement {format_value(str(one))} means nothing"
        ) from None


def _extra_requirements(one: Requirement) -> list[Requirement]:
    """What the extras of a requirement need in turn."""
    found = []
    for line in (metadata.requires(one.name) or []) if one.extras else []:
        try:
            inner = Requirement(line)
            marker, inner.marker = inner.marker, None
            if marker is None or marker.evaluate({"extra": ""}):
                continue  # needed without the extra
            if any(marker.evaluate({"extra": extra}) for extra in one.extras):
                found.append(inner)
        except (InvalidRequirement, UndefinedComparison, UndefinedEnvironmentName):
            continue  # of a package that is installed already; not the recipe's to answer for
    return found
