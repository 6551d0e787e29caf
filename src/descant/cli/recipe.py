"""`descant recipe`: look at other people's methods, trust them, and make, check and share one's own."""

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
from typing import Annotated, Final

import typer

from descant.cli import terminal
from descant.cli.command import FAILURE, Command, parse_recipe_arguments
from descant.cli.recipe_overview import recipe_overview, short_hash
from descant.errors import InputError, MissingExtra
from descant.recipes.loading import ENTRY_POINT_GROUP, inspect_recipe, load_recipe, lock_key, trust_recipe
from descant.recipes.lock import Lock
from descant.recipes.recipe import RECIPE_KINDS
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

PYTEST_NO_TESTS: Final = 5  # what pytest exits with where it found none

ReferenceArgument = Annotated[
    str,
    typer.Argument(
        metavar="REF",
        help="A folder, owner/name or owner/name@revision on the Hub, or an installed one's name.",
    ),
]
FolderArgument = Annotated[str, typer.Argument(metavar="FOLDER", help="A recipe's folder.")]


@dataclass(frozen=True, kw_only=True)
class ShowRecipeCommand(Command):
    """Say what would run: a recipe's files and their hash, its requirements and README, and its trust.

    None of it is imported or run. What a terminal would obey, or would show out of order, is spelt out.
    """

    reference: ReferenceArgument
    code: Annotated[
        bool, typer.Option("--code", metavar="", help="ShowRecipeCommand the code that would run, too.")
    ] = False
    latest: Annotated[
        bool,
        typer.Option(
            "--latest", metavar="", help="Of one on the Hub: what is there now, not what was trusted."
        ),
    ] = False

    def run(self) -> int:
        """Print it."""
        terminal.write(recipe_overview(inspect_recipe(self.reference, latest=self.latest), self.code))
        return 0


@dataclass(frozen=True, kw_only=True)
class TrustRecipeCommand(Command):
    """Trust a recipe as it is now, also where it has changed since: pin its hash and its commit.

    Nothing runs. It still needs --trust-remote-code, or trust_remote_code=True, wherever it is used.
    """

    reference: ReferenceArgument
    digest: Annotated[
        str | None, typer.Option(metavar="HASH", help="Only if this is its hash, as `show` printed it.")
    ] = None

    def run(self) -> int:
        """Pin it."""
        key = lock_key(Reference.parse(self.reference))
        before = None if key is None else Lock().pin(key)
        found = trust_recipe(self.reference, digest=self.digest)
        assert found.pin is not None
        commit = f" at commit {found.revision}" if found.revision else ""
        said = f"trusted {found.name}{commit}, {len(found.pin.files)} files, {found.pin.digest}\n"
        if before is not None:
            said += "".join(f"  {terminal.escape_control(one)}\n" for one in before.differences(found.pin))
        terminal.write(said)
        return 0


@dataclass(frozen=True, kw_only=True)
class ListRecipesCommand(Command):
    """List the recipes that are installed or have been trusted."""

    def run(self) -> int:
        """Print a line for each."""
        lines = [
            (one.name, "installed", f"{one.dist.name} {one.dist.version}" if one.dist else one.value)
            for one in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda one: one.name)
        ]
        for key, pin in sorted(Lock().pins().items()):
            what = f"commit {short_hash(pin.revision)}, " if pin.revision else ""
            lines.append((key, f"trusted {pin.trusted[:10]}", f"{what}{short_hash(pin.digest, 7)}"))
        if not lines:
            terminal.print_info("no recipe is installed, and none has been trusted")
        shown = [[terminal.escape_control(part) for part in line] for line in lines]
        wide = [max(len(line[at]) for line in shown) for at in (0, 1)] if shown else []
        for name, state, what in shown:
            terminal.write(f"{name:<{wide[0]}}  {state:<{wide[1]}}  {what}\n")
        return 0


@dataclass(frozen=True, kw_only=True)
class ForgetRecipeCommand(Command):
    """Trust a recipe no longer: the next use with --trust-remote-code pins what is there then."""

    reference: Annotated[
        str, typer.Argument(metavar="REF", help="As it was given, or as `descant recipe list` has it.")
    ]

    def run(self) -> int:
        """Drop its pin."""
        lock = Lock()
        key = self.reference if self.reference in lock.pins() else lock_key(Reference.parse(self.reference))
        if key is None or not lock.untrust(key):
            do = "see `descant recipe list`"
            raise InputError("REF", "must be a recipe that has been trusted", self.reference, do)
        terminal.write(f"forgot {terminal.escape_control(key)}\n")
        return 0


@dataclass(frozen=True, kw_only=True)
class NewRecipeCommand(Command):
    """Make a folder with a recipe that works: code, README and tests, as a first step to your own."""

    name: Annotated[str, typer.Argument(metavar="NAME", help="The folder's name, and the recipe's.")]
    kind: Annotated[
        str, typer.Option(metavar=f"[{'|'.join(RECIPE_KINDS)}]", help="What it is a recipe for.")
    ] = "strategy"

    def run(self) -> int:
        """Write it."""
        folder = new_recipe(self.name, self.kind)
        said = [f"{folder / file}\n" for file in template_files(self.name, self.kind)]
        terminal.write("".join(said))
        terminal.print_info(f"descant recipe check ./{self.name} --trust-remote-code runs its laws and tests")
        return 0


@dataclass(frozen=True, kw_only=True)
class CheckRecipeCommand(Command):
    """Run the laws of descant.testing that fit a recipe, then its own tests.

    That runs its code, as it is now, and needs --trust-remote-code; nothing is pinned.
    """

    folder: FolderArgument
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code", metavar="", help="Let its code run, which may do anything that you may."
        ),
    ] = False
    recipe_argument: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=JSON", help="An argument to check it with; may be repeated."),
    ] = None

    def run(self) -> int:
        """Check it."""
        reference = Reference.parse(self.folder)
        if reference.path is None:
            raise InputError("FOLDER", "must be a folder here", self.folder, "download it first")
        arguments = parse_recipe_arguments(self.recipe_argument or ())
        # With a lock of its own: what is checked is what is here now, which somebody is working on.
        with tempfile.TemporaryDirectory() as place:
            lock = Lock(Path(place) / "recipes.lock")
            recipe = load_recipe(self.folder, trust_remote_code=self.trust_remote_code, lock=lock)(
                **arguments
            )
            if inspect_recipe(self.folder).trust_state == "changed":
                terminal.print_warning(f"{self.folder} is not what was trusted; checking what is there now")
            from descant.testing import check_recipe

            try:
                with terminal.console().status("checking"):
                    check_recipe(recipe)
            except AssertionError as error:
                terminal.print_error(f"{self.folder} breaks a law of its kind, {recipe.kind}: {error}")
                return FAILURE
            terminal.write(f"the laws of its kind, {recipe.kind}, hold\n")
            return _run_tests(reference.path)


@dataclass(frozen=True, kw_only=True)
class PushRecipeCommand(Command):
    """Share a recipe: put its folder into a repository on the Hub, which is made if there is none.

    Whoever you are logged in as with `hf auth login`, or by HF_TOKEN, must be allowed to write there. What
    could not be loaded is not shared either. Nothing of it runs.
    """

    folder: FolderArgument
    repository: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="A repository on the Hub.")]
    private: Annotated[
        bool, typer.Option("--private", metavar="", help="Make a new repository for yourself alone.")
    ] = False
    message: Annotated[
        str | None, typer.Option("--message", metavar="TEXT", help="What the commit says.")
    ] = None

    prune: Annotated[
        bool,
        typer.Option("--prune", metavar="", help="Delete those of its files that the folder has no more."),
    ] = False

    def run(self) -> int:
        """Upload it."""
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
    """Run the tests of a folder in a process of their own."""
    tests = folder / "tests"
    if not tests.is_dir():
        terminal.print_info("it has no tests of its own")
        return 0
    if importlib.util.find_spec("pytest") is None:
        raise MissingExtra("testing", "running a recipe's own tests")
    # Without the current folder on the path, in which anything could stand for a module.
    line = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib"]
    line += ["--rootdir", str(folder), str(tests)]
    alone = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    code = subprocess.run(line, stdin=subprocess.DEVNULL, env=alone, check=False).returncode
    if code == PYTEST_NO_TESTS:
        terminal.print_info("it has no tests of its own")
        return 0
    if code:
        terminal.print_error(f"its own tests fail: {shlex.join(['pytest', str(tests)])} shows how")
    return FAILURE if code else 0
