"""`descant recipe`: inspect and trust recipes; create, check and share them."""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, ClassVar, Final

import typer

from descant.cli import terminal
from descant.cli.command import Command, parse_arguments
from descant.cli.exit_codes import FAILURE
from descant.cli.recipe_overview import recipe_overview, short_hash
from descant.errors import InputError, MissingExtra
from descant.recipes.kinds import RECIPE_KINDS
from descant.recipes.loading import ENTRY_POINT_GROUP, inspect_recipe, load_recipe, lock_key, trust_recipe
from descant.recipes.lock import Lock
from descant.recipes.reference import Reference
from descant.recipes.scaffold import new_recipe, template_files

__all__ = [
    "CheckRecipeCommand",
    "ForgetRecipeCommand",
    "ListRecipesCommand",
    "NewRecipeCommand",
    "PushRecipeCommand",
    "ShowRecipeCommand",
    "TrustRecipeCommand",
]

PYTEST_NO_TESTS: Final = 5  # exit code of pytest

ReferenceArgument = Annotated[
    str,
    typer.Argument(
        metavar="REF",
        help="A folder, owner/name or owner/name@revision on the Hub, or the name of an installed one.",
    ),
]
FolderArgument = Annotated[str, typer.Argument(metavar="FOLDER", help="A recipe's folder.")]


@dataclass(frozen=True, kw_only=True)
class ShowRecipeCommand(Command):
    """Show a recipe: its files and their hash, its requirements and README, and whether it is trusted.

    Nothing is imported or run. Control and reordering characters are escaped.
    """

    reference: ReferenceArgument
    code: Annotated[bool, typer.Option("--code", metavar="", help="Show the code that would run, too.")] = (
        False
    )
    latest: Annotated[
        bool,
        typer.Option("--latest", metavar="", help="On the Hub: the newest version, not the trusted one."),
    ] = False

    def run(self) -> int:
        """Print the overview."""
        terminal.write(recipe_overview(inspect_recipe(self.reference, latest=self.latest), self.code))
        return 0


@dataclass(frozen=True, kw_only=True)
class TrustRecipeCommand(Command):
    """Trust the current version of a recipe, also if it has changed: pin its hash and commit.

    Nothing runs. Using it still needs --trust-remote-code, or trust_remote_code=True.
    """

    reference: ReferenceArgument
    digest: Annotated[
        str | None, typer.Option(metavar="HASH", help="Only if its hash is this one, as printed by `show`.")
    ] = None

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
        lines = [
            (one.name, "installed", f"{one.dist.name} {one.dist.version}" if one.dist else one.value)
            for one in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda one: one.name)
        ]
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

    reference: Annotated[
        str, typer.Argument(metavar="REF", help="As given before, or as listed by `descant recipe list`.")
    ]

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

    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the folder and of the recipe.")]
    kind: Annotated[str, typer.Option(metavar=f"[{'|'.join(RECIPE_KINDS)}]", help="The kind of recipe.")] = (
        "strategy"
    )

    def run(self) -> int:
        """Write the files."""
        folder = new_recipe(self.name, self.kind)
        paths = [f"{folder / file}\n" for file in template_files(self.name, self.kind)]
        terminal.write("".join(paths))
        terminal.print_info(f"descant recipe check ./{self.name} --trust-remote-code runs its tests")
        return 0


@dataclass(frozen=True, kw_only=True)
class CheckRecipeCommand(Command):
    """Run the contract tests of descant.testing for a recipe, then its own tests.

    This runs its current code and needs --trust-remote-code; nothing is pinned.
    """

    needs_torch: ClassVar[bool] = True

    folder: FolderArgument
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", metavar="", help="Run its code, with your permissions."),
    ] = False
    recipe_argument: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=JSON", help="An argument to check it with; may be repeated."),
    ] = None

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

    folder: FolderArgument
    repository: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="A repository on the Hub.")]
    private: Annotated[bool, typer.Option("--private", metavar="", help="Make a new repository private.")] = (
        False
    )
    message: Annotated[str | None, typer.Option("--message", metavar="TEXT", help="The commit message.")] = (
        None
    )

    prune: Annotated[
        bool,
        typer.Option("--prune", metavar="", help="Delete recipe files that the folder does not have."),
    ] = False

    def run(self) -> int:
        """Upload the recipe."""
        from descant.recipes.share import push_recipe

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
    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
    ]
    command += ["--rootdir", str(folder), str(tests)]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    code = subprocess.run(command, stdin=subprocess.DEVNULL, env=environment, check=False).returncode
    if code == PYTEST_NO_TESTS:
        terminal.print_info("it has no tests of its own")
        return 0
    if code:
        terminal.print_error(f"its own tests fail: {shlex.join(['pytest', str(tests)])} shows how")
    return FAILURE if code else 0
