"""`descant recipe`: inspect and trust recipes; create, check and share them."""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import ClassVar, Final

from descant.cli import terminal
from descant.cli.command import Command, parse_arguments
from descant.cli.options import argument, option
from descant.cli.terminal import FAILURE, escape_control
from descant.errors import InputError, MissingExtra
from descant.recipes.loading import (
    ENTRY_POINT_GROUP,
    RecipeInfo,
    Reference,
    inspect_recipe,
    load_recipe,
    lock_key,
    trust_recipe,
)
from descant.recipes.lock import Lock
from descant.recipes.recipe_files import (
    RECIPE_KINDS,
    RecipeFiles,
    installed_version,
    parse_requirements,
    unmet_requirements,
)
from descant.recipes.scaffold import new_recipe, template_files

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


def _package(entry: EntryPoint) -> str:
    """The package of an installed recipe and its version; empty: it is not known."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else ""


def _origin(info: RecipeInfo) -> str:
    if (entry := info.reference.entry_point) is not None:
        package = _package(entry) or "an installed package"
        return f"{escape_control(package)}, which is installed: {escape_control(entry.value)}"
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
    parsed = parse_requirements(contents.requirements, name)
    missing = {str(requirement) for requirement in unmet_requirements(parsed, name)}
    for requirement in parsed:
        verdict = ", which does not do" if str(requirement) in missing else ""
        yield escape_control(f"{requirement} (installed: {installed_version(requirement.name)}{verdict})")


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


PYTEST_NO_TESTS: Final = 5  # exit code of pytest


@dataclass(frozen=True, kw_only=True)
class ShowRecipeCommand(Command):
    """Show a recipe: its files and their hash, its requirements and README, and whether it is trusted.

    Nothing is imported or run. Control and reordering characters are escaped.
    """

    reference: str = argument(
        "REF", "A folder, owner/name or owner/name@revision on the Hub, or the name of an installed one."
    )
    code: bool = option("Show the code that would run, too.", False)
    latest: bool = option("On the Hub: the newest version, not the trusted one.", False)

    def run(self) -> int:
        """Print the overview."""
        terminal.write(recipe_overview(inspect_recipe(self.reference, latest=self.latest), self.code))
        return 0


@dataclass(frozen=True, kw_only=True)
class TrustRecipeCommand(Command):
    """Trust the current version of a recipe, also if it has changed: pin its hash and commit.

    Nothing runs. Using it still needs --trust-remote-code, or trust_remote_code=True.
    """

    reference: str = argument(
        "REF", "A folder, owner/name or owner/name@revision on the Hub, or the name of an installed one."
    )
    digest: str | None = option("Only if its hash is this one, as printed by `show`.", metavar="HASH")

    def run(self) -> int:
        """Pin the recipe."""
        key = lock_key(Reference.parse(self.reference))
        before = None if key is None else Lock().pin(key)
        info = trust_recipe(self.reference, digest=self.digest)
        assert info.pin is not None
        commit = f" at commit {info.revision}" if info.revision else ""
        report = f"trusted {info.name}{commit}, {len(info.pin.files)} files, {info.pin.digest}\n"
        if before is not None:
            report += "".join(
                f"  {terminal.escape_control(difference)}\n" for difference in before.differences(info.pin)
            )
        terminal.write(report)
        return 0


@dataclass(frozen=True, kw_only=True)
class ListRecipesCommand(Command):
    """List installed and trusted recipes."""

    def run(self) -> int:
        """Print one line per recipe."""
        installed = sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda entry: entry.name)
        lines = [(entry.name, "installed", _package(entry) or entry.value) for entry in installed]
        for key, pin in sorted(Lock().pins().items()):
            detail = f"commit {short_hash(pin.revision)}, " if pin.revision else ""
            lines.append((key, f"trusted {pin.trusted[:10]}", f"{detail}{short_hash(pin.digest, 7)}"))
        if not lines:
            terminal.print_info("no recipe is installed or trusted")
        shown = [[terminal.escape_control(part) for part in line] for line in lines]
        widths = [max(len(line[column]) for line in shown) for column in (0, 1)] if shown else []
        for name, state, detail in shown:
            terminal.write(f"{name:<{widths[0]}}  {state:<{widths[1]}}  {detail}\n")
        return 0


@dataclass(frozen=True, kw_only=True)
class ForgetRecipeCommand(Command):
    """Remove the trust in a recipe: the next use with --trust-remote-code pins its version then."""

    reference: str = argument("REF", "As given before, or as listed by `descant recipe list`.")

    def run(self) -> int:
        """Remove the pin."""
        lock = Lock()
        key = self.reference if self.reference in lock.pins() else lock_key(Reference.parse(self.reference))
        if key is None or not lock.untrust(key):
            advice = "see `descant recipe list`"
            raise InputError("REF", "must be a recipe that has been trusted", self.reference, advice)
        terminal.write(f"forgot {terminal.escape_control(key)}\n")
        return 0


@dataclass(frozen=True, kw_only=True)
class NewRecipeCommand(Command):
    """Create a folder with a working recipe: code, README and tests."""

    name: str = argument("NAME", "The name of the folder and of the recipe.")
    kind: str = option("The kind of recipe.", "strategy", metavar=f"[{'|'.join(RECIPE_KINDS)}]")

    def run(self) -> int:
        """Write the files."""
        folder = new_recipe(self.name, self.kind)
        for file in template_files(self.name, self.kind):
            terminal.write(f"{folder / file}\n")
        terminal.print_info(f"descant recipe check ./{self.name} --trust-remote-code runs its tests")
        return 0


@dataclass(frozen=True, kw_only=True)
class CheckRecipeCommand(Command):
    """Run the contract tests of descant.testing for a recipe, then its own tests.

    This runs its current code and needs --trust-remote-code; nothing is pinned.
    """

    needs_torch: ClassVar[bool] = True

    folder: str = argument("FOLDER", "A recipe's folder.")
    trust_remote_code: bool = option("Run its code, with your permissions.", False)
    recipe_argument: list[str] | None = option(
        "An argument to check it with; may be repeated.", metavar="NAME=JSON"
    )

    def run(self) -> int:
        """Check the recipe."""
        reference = Reference.parse(self.folder)
        if reference.path is None:
            raise InputError("FOLDER", "must be a folder here", self.folder, "download it first")
        arguments = parse_arguments("recipe_argument", self.recipe_argument or ())
        # A separate lock file: checks the current files, not the trusted version.
        with tempfile.TemporaryDirectory() as lock_folder:
            lock = Lock(Path(lock_folder) / "recipes.lock")
            recipe = load_recipe(self.folder, trust_remote_code=self.trust_remote_code, lock=lock)(
                **arguments
            )
            if inspect_recipe(self.folder).trust_state == "changed":
                terminal.print_warning(f"{self.folder} has changed since it was trusted; checking it anyway")
            from descant.testing import check_recipe

            try:
                with terminal.console().status("checking"):
                    check_recipe(recipe)
            except AssertionError as error:
                terminal.print_error(f"{self.folder} violates a contract of its kind, {recipe.kind}: {error}")
                return FAILURE
            terminal.write(f"the contracts of its kind, {recipe.kind}, are fulfilled\n")
            return _run_tests(reference.path)


@dataclass(frozen=True, kw_only=True)
class PushRecipeCommand(Command):
    """Share a recipe: push its folder to a repository on the Hub, which is created if needed.

    You must be logged in with `hf auth login` or HF_TOKEN, and be allowed to write there. Only valid recipes
    are pushed. Nothing runs.
    """

    folder: str = argument("FOLDER", "A recipe's folder.")
    repository: str = argument("OWNER/NAME", "A repository on the Hub.")
    private: bool = option("Make a new repository private.", False)
    message: str | None = option("The commit message.", metavar="TEXT")

    prune: bool = option("Delete recipe files that the folder does not have.", False)

    def run(self) -> int:
        """Upload the recipe."""
        from descant.recipes.loading import push_recipe

        commit = push_recipe(
            self.folder,
            self.repository,
            private=self.private or None,
            message=self.message,
            prune=self.prune,
        )
        terminal.write(f"{self.repository}@{commit}\n")
        return 0


def _run_tests(folder: Path) -> int:
    """Run the tests of a folder in a separate process."""
    tests = folder / "tests"
    if not tests.is_dir():
        terminal.print_info("it has no tests of its own")
        return 0
    if importlib.util.find_spec("pytest") is None:
        raise MissingExtra("testing", "running a recipe's own tests")
    # -P: without the current folder on the path, where files could shadow modules.
    options = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "--rootdir", str(folder)]
    command = [sys.executable, "-P", "-m", "pytest", *options, str(tests)]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    code = subprocess.run(command, stdin=subprocess.DEVNULL, env=environment, check=False).returncode
    if code == PYTEST_NO_TESTS:
        terminal.print_info("it has no tests of its own")
        return 0
    if code:
        terminal.print_error(f"its own tests fail: {shlex.join(['pytest', str(tests)])} shows how")
    return FAILURE if code else 0
