"""The requirements of a recipe, and whether they are installed."""

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
    """The non-empty lines of a requirements.txt, without comments."""
    return [line for line in (_COMMENT.sub("", one).strip() for one in text.splitlines()) if line]


def parse_requirements(lines: Iterable[str], recipe: str) -> list[Requirement]:
    """Parse requirement lines; raises RecipeError for anything but package names with versions.

    Options, URLs and paths are refused: a recipe must not decide where a package comes from.
    """
    requirements = []
    for index, line in enumerate(lines):
        subject = f"its requirement {format_value(line)}"
        if index == _MAX_LINES or len(line) > _MAX_LINE_CHARS:
            raise RecipeError(
                recipe, f"must have at most {_MAX_LINES} requirements of {_MAX_LINE_CHARS} characters"
            )
        try:
            requirement = Requirement(line)
        except (InvalidRequirement, InvalidVersion, RecursionError):
            requirement = None
        is_plain = (
            requirement is not None
            and requirement.url is None
            and not requirement.name.casefold().endswith(_ARCHIVE_SUFFIXES)
        )
        if requirement is None or not is_plain or not line.isprintable():
            advice = "keep to names with versions, as in `torch>=2.4`"
            raise RecipeError(recipe, f"{subject} must be a package name with versions: {advice}")
        requirements.append(requirement)
    return requirements


def check(lines: Iterable[str], recipe: str) -> None:
    """Raise MissingRequirements with the unmet requirements, if there are any."""
    missing = [
        f"{one} (installed: {installed_version(one.name)})"
        for one in unmet_requirements(parse_requirements(lines, recipe), recipe)
    ]
    if missing:
        raise MissingRequirements(recipe, missing)


def unmet_requirements(requirements: Iterable[Requirement], recipe: str) -> Iterator[Requirement]:
    """Applicable requirements that are not met, including those of their extras."""
    pending = list(requirements)[::-1]
    visited: set[str] = set()
    while pending:
        requirement = pending.pop()
        if str(requirement) in visited or not _is_applicable(requirement, recipe):
            continue
        visited.add(str(requirement))
        if not _is_met(requirement):
            yield requirement
        else:
            pending += reversed(_extra_requirements(requirement))


def installed_version(name: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return metadata.version(name)
    except (metadata.PackageNotFoundError, KeyError, ValueError):
        return None


def _is_met(requirement: Requirement) -> bool:
    version = installed_version(requirement.name)
    if version is None:
        return False
    try:
        # An installed pre-release was chosen by the user.
        return requirement.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return not requirement.specifier


def _is_applicable(requirement: Requirement, recipe: str) -> bool:
    try:
        return requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    except (UndefinedComparison, UndefinedEnvironmentName, InvalidSpecifier, InvalidVersion, RecursionError):
        raise RecipeError(
            recipe, f"the marker of its requirement {format_value(str(requirement))} must be valid"
        ) from None


def _extra_requirements(requirement: Requirement) -> list[Requirement]:
    """The requirements of a requirement's extras."""
    requirements = []
    for line in (metadata.requires(requirement.name) or []) if requirement.extras else []:
        try:
            inner = Requirement(line)
            marker, inner.marker = inner.marker, None
            if marker is None or marker.evaluate({"extra": ""}):
                continue  # needed without the extra
            if any(marker.evaluate({"extra": extra}) for extra in requirement.extras):
                requirements.append(inner)
        except (InvalidRequirement, UndefinedComparison, UndefinedEnvironmentName):
            continue  # metadata of an installed package, not of the recipe
    return requirements
