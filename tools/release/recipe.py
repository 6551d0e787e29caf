"""Write `dist/recipe.yaml`, the conda recipe of the source distribution in `dist`, and check it.

    python -m tools.release.recipe

deploy/conda/recipe.yaml has what is the same for every version. rattler-build reads the result and
renders it.
"""

from __future__ import annotations

import hashlib
import sys
import tarfile
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path
from typing import Any, Final

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT: Final = Path(__file__).resolve().parents[2]
RECIPE: Final = ROOT / "deploy" / "conda" / "recipe.yaml"
# The command of the package works in an environment of conda, which has no extras.
EXTRA: Final = "cli"
# Names on conda-forge, where these differ from those on PyPI.
CONDA_NAMES: Final = {"torch": "pytorch", "huggingface-hub": "huggingface_hub"}


def read_metadata(source: Path) -> Message:
    """The metadata of a source distribution."""
    with tarfile.open(source) as archive:
        file = archive.extractfile(f"{source.name.removesuffix('.tar.gz')}/PKG-INFO")
        if file is None:
            raise ValueError(f"{source} has no PKG-INFO: build it again")
        return HeaderParser().parsestr(file.read().decode())


def conda_requirements(metadata: Message) -> list[str]:
    """What the package and its extra require, as conda writes it."""
    found = []
    for line in metadata.get_all("Requires-Dist", []):
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": EXTRA}):
            name = CONDA_NAMES.get(requirement.name, requirement.name)
            bounds = sorted(map(str, requirement.specifier), reverse=True)  # the lower bound first
            found.append(f"{name} {','.join(bounds)}".strip())
    return found


def complete(recipe: dict[str, Any], metadata: Message, sha256: str) -> dict[str, Any]:
    """A recipe with the version, the hash and the requirements of a source distribution."""
    python = recipe["requirements"]["run"]
    return {
        **recipe,
        "context": {
            **recipe["context"],
            "version": metadata["Version"],
            "python_min": metadata["Requires-Python"].removeprefix(">="),
        },
        "source": {**recipe["source"], "sha256": sha256},
        "requirements": {**recipe["requirements"], "run": [*python, *conda_requirements(metadata)]},
    }


def render(path: Path) -> dict[str, Any]:
    """A recipe as rattler-build reads it; an error says what is wrong with it."""
    from rattler_build import Stage0Recipe

    [variant] = Stage0Recipe.from_file(path).render()
    rendered: dict[str, Any] = variant.recipe.to_dict()
    return rendered


def main() -> int:
    """Command line."""
    [source] = (ROOT / "dist").glob("*.tar.gz")
    metadata = read_metadata(source)
    recipe = complete(
        yaml.safe_load(RECIPE.read_text("utf-8")), metadata, hashlib.sha256(source.read_bytes()).hexdigest()
    )
    written = source.with_name("recipe.yaml")
    written.write_text(yaml.safe_dump(recipe, sort_keys=False, width=120), encoding="utf-8")
    rendered = render(written)
    package = rendered["package"]
    if canonicalize_name(package["name"]) != metadata["Name"] or package["version"] != metadata["Version"]:
        print(f"the recipe must be of {source.name}, got {package}", file=sys.stderr)
        return 1
    print(
        f"{written.name} renders as {package['name']} {package['version']}, "
        f"with {len(rendered['requirements']['run'])} requirements"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
