"""The recipe of a model: pinned packages, repository assets, a converter and a probe."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class Package:
    """One archive of a public registry, pinned by version, hash and size."""

    registry: Literal["pypi", "sdist", "npm"]  # "sdist": a source archive on PyPI
    name: str
    version: str
    sha256: str
    size: int

    @property
    def spec(self) -> str:
        """The requirement in the syntax of pip or npm."""
        return f"{self.name}@{self.version}" if self.registry == "npm" else f"{self.name}=={self.version}"

    @property
    def file(self) -> str:
        """The file name of the archive."""
        if self.registry == "pypi":
            return f"{self.name.replace('-', '_')}-{self.version}-py3-none-any.whl"
        if self.registry == "sdist":
            return f"{self.name}-{self.version}.tar.gz"
        return f"{self.name.removeprefix('@').replace('/', '-')}-{self.version}.tgz"


@dataclass(frozen=True)
class Asset:
    """A file of this repository that a model is built from."""

    path: str  # relative to the repository's root
    sha256: str


@dataclass(frozen=True)
class Probe:
    """A prompt and the greedy continuation that a sound build of the model gives."""

    prompt: str
    continuation: str


@dataclass(frozen=True)
class Recipe:
    """How one folder is made; `converter` is a module of this package with `convert(job)`.

    A converter that builds no model has its own `check(recipe, folder)`.
    """

    name: str
    about: str
    licence: str
    converter: str
    packages: tuple[Package, ...] = ()
    assets: tuple[Asset, ...] = ()
    needs: tuple[str, ...] = ()  # models that must be built before this one
    modules: tuple[str, ...] = ()  # imports beyond descant's own dependencies
    options: Mapping[str, Any] = field(default_factory=dict)
    probe: Probe | None = None
    version: int = 1  # increment when the output of the converter changes

    def fingerprint(self, needed: Mapping[str, str]) -> str:
        """A hash of everything that determines the built files; `needed` has those of the required models."""
        facts = asdict(self) | {"options": dict(self.options), "needs": {n: needed[n] for n in self.needs}}
        del facts["about"], facts["modules"], facts["probe"]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Job:
    """The inputs of a converter and the folder to write."""

    recipe: Recipe
    archives: tuple[Path, ...]  # in the order of `recipe.packages`
    assets: tuple[Path, ...]  # in the order of `recipe.assets`
    models: Path  # finished models, by name
    scratch: Path  # removed after the build
    folder: Path  # to be filled
    report: Callable[[int, int], None]  # done, total
