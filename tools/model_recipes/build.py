"""Build model folders: skip finished ones, build in a temporary folder, rename into place."""

import contextlib
import importlib
import importlib.util
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .download import Fetch, cached
from .errors import ModelError
from .progress import Progress, megabytes
from .recipe import Job, Recipe
from .stamp import check_sha256, staleness, write_stamp

try:
    import fcntl
except ImportError:  # Windows: no lock, so builds must not run concurrently
    fcntl = None  # type: ignore[assignment]

REPOSITORY = Path(__file__).resolve().parents[2]
CORE = ("torch", "transformers", "tokenizers", "safetensors", "numpy")


@dataclass
class Builder:
    """Builds recipes into one folder."""

    recipes: Mapping[str, Recipe]
    out: Path
    keep: bool = False  # keep the downloaded archives
    verify: bool = False  # hash the files of finished models again
    fetch: Fetch | None = None  # in place of pip and npm

    def ordered(self, names: Iterable[str]) -> list[Recipe]:
        """The recipes named and those they need, needed ones first."""
        found: dict[str, Recipe] = {}

        def visit(name: str) -> None:
            if name not in self.recipes:
                raise ModelError(f"no model {name!r}; choose from {', '.join(self.recipes)}, or all")
            for needed in self.recipes[name].needs:
                visit(needed)
            found[name] = self.recipes[name]

        for name in names:
            visit(name)
        return list(found.values())

    def build(self, names: Iterable[str]) -> None:
        """Build what is not finished; concurrent builds into the same folder wait for the lock."""
        recipes = self.ordered(names)
        self.out.mkdir(parents=True, exist_ok=True)
        with _locked(self.out / ".lock"):
            for leftover in self.out.glob(".building-*"):  # of a build that was killed
                shutil.rmtree(leftover)
            for recipe in recipes:
                self._build(recipe)

    def fingerprint(self, recipe: Recipe) -> str:
        """The fingerprint that a finished folder of this recipe carries."""
        return recipe.fingerprint({name: self.fingerprint(self.recipes[name]) for name in recipe.needs})

    def _build(self, recipe: Recipe) -> None:
        progress = Progress(recipe.name)
        target, fingerprint = self.out / recipe.name, self.fingerprint(recipe)
        reason = staleness(target, fingerprint, self.verify)
        if reason is None:
            progress.line("up to date")
            return
        start = time.monotonic()
        progress.line(f"building ({reason})")
        _require(recipe)
        assets = tuple(REPOSITORY / asset.path for asset in recipe.assets)
        for path, asset in zip(assets, recipe.assets, strict=True):
            if not path.is_file():
                raise ModelError(f"{recipe.name} needs {asset.path}, got no such file; restore it from git")
            check_sha256(path, asset.sha256, f"{asset.path} is not as committed; restore it from git")
        cache = self.out / ".downloads"
        archives = tuple(cached(package, cache, progress, self.fetch) for package in recipe.packages)
        with tempfile.TemporaryDirectory(dir=self.out, prefix=f".building-{recipe.name}-") as temporary:
            folder, scratch = Path(temporary, "folder"), Path(temporary, "scratch")
            folder.mkdir()
            scratch.mkdir()
            progress.phase("converting")
            job = Job(recipe, archives, assets, self.out, scratch, folder, progress.update)
            converter = _module(recipe.converter)
            converter.convert(job)
            progress.phase("checking")
            check = getattr(converter, "check", None) or _module("check").check
            check(recipe, folder)
            stamp = write_stamp(folder, recipe, fingerprint)
            folder.chmod(0o755)
            _put(folder, target, Path(temporary, "replaced"))
        if not self.keep:
            for path in archives:
                path.unlink()
            with contextlib.suppress(OSError):  # other archives are kept there
                cache.rmdir()
        size = sum(entry["size"] for entry in stamp["files"].values())
        progress.line(f"built in {time.monotonic() - start:.1f} s ({megabytes(size)})")


def _module(name: str) -> Any:
    """A module of this package, imported only now: torch and transformers take seconds to load."""
    return importlib.import_module(f"{__package__}.{name}")


def _require(recipe: Recipe) -> None:
    """Raise, before anything is downloaded, if a Python package that the build needs is not installed."""
    for extra, modules in (("descant", CORE), ("descant[models]", recipe.modules)):
        missing = [name for name in modules if importlib.util.find_spec(name) is None]
        if missing:
            raise ModelError(
                f"{recipe.name} needs the Python package {missing[0]!r}, got none in {sys.prefix}; "
                f"run: pip install '{extra}'"
            )


def _put(folder: Path, target: Path, aside: Path) -> None:
    """Move a finished folder into place; an older one is replaced only when the new one is ready."""
    if target.exists():
        target.rename(aside)
    try:
        folder.rename(target)
    except OSError:
        if aside.exists():
            aside.rename(target)
        raise


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
