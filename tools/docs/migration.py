"""Write or check the tables of docs/guide/migrate-4.md and migrate-5.md, by comparing two transformers.

    python tools/docs/migration.py             write
    python tools/docs/migration.py --check     fail if a page differs

Reads the public names of the generation modules of transformers 4.52.4, in the venv that
tools/reference_env.py builds, and of the installed transformers. tools/docs/migration_table.py has the
replacement of each removed name. A removed name without a row, or a row without a removed name, is an error.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import descant  # noqa: E402
from descant.config.generation_config import FIELDS  # noqa: E402
from tools.docs import migration_table, public_names  # noqa: E402
from tools.docs.migration_table import Row  # noqa: E402
from tools.docs.transformers4 import Transformers4  # noqa: E402

PAGE = ROOT / "docs" / "guide" / "migrate-4.md"
FIVE = PAGE.with_name("migrate-5.md")
PREFIX = re.compile(r"^(?:TF|Flax)(?=[A-Z])")
TABLE = re.compile(r"<!-- table: (?P<name>[\w ]+) -->\n.*?<!-- end -->", re.DOTALL)


class Comparison:
    """The public names of the two packages."""

    def __init__(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        self.old, self.new = old, new

    @classmethod
    def live(cls, transformers4: Transformers4) -> Comparison:
        """Read the names of both packages."""
        source = Path(public_names.__file__).read_text(encoding="utf-8")
        exported = transformers4.run(
            f"{source}\nimport json\nprint(json.dumps(exported()))", public_names.__file__
        )
        return cls(json.loads(exported), public_names.exported())

    def gone(self) -> set[str]:
        """Names of the generation package, its modules and the caches that cannot be imported any more."""
        names = set(self._all(self.old)) - set(self._all(self.new))
        # A class that only a module has now is gone from the top-level package.
        ours = set(self._all(self.old))
        return names | (ours & (set(self.old["top"]) - set(self.new["top"])))

    def lost(self, kind: str) -> set[str]:
        """Methods, arguments or fields that are gone."""
        return set(self.old[kind]) - set(self.new[kind])

    def not_exported(self) -> set[str]:
        """Names that both packages export, and Descant does not."""
        return (set(self.old["package"]) & set(self.new["package"])) - set(descant.__all__)

    def newer(self) -> set[str]:
        """Names that only the newer package exports, and Descant does not."""
        return set(self.new["package"]) - set(self.old["package"]) - set(descant.__all__)

    def newer_fields(self) -> set[str]:
        """Config fields that only the newer package has, and Descant does not."""
        return set(self.new["fields"]) - set(self.old["fields"]) - set(FIELDS)

    @staticmethod
    def _all(side: Mapping[str, Any]) -> Iterator[str]:
        yield from side["package"]
        yield from side["caches"]
        for names in side["modules"].values():
            yield from names


def tensors(names: Iterable[str]) -> dict[str, Row]:
    """Rows of the names that need TensorFlow or Flax."""
    torch = {**migration_table.BEAMS, **migration_table.OUTPUTS}
    found = {}
    for name in sorted(names):
        bare = PREFIX.sub("", name)
        after = migration_table.TENSORS.get(bare)
        if after is None and bare in torch:
            after = torch[bare].after
        if after is not None and (bare != name or name in migration_table.TENSORS):
            found[name] = Row("", after, "" if after else "an internal function")
    return found


def rows(compared: Comparison) -> dict[str, dict[str, Row]]:
    """The rows of every table."""
    named = {
        "constraints": migration_table.CONSTRAINTS,
        "beams": migration_table.BEAMS,
        "outputs": migration_table.OUTPUTS,
        "caches": migration_table.CACHES,
        "inner": migration_table.INNER,
    }
    known = {name for table in named.values() for name in table}
    return {
        **named,
        "tensors": tensors(compared.gone() - known),
        "methods": migration_table.METHODS,
        "cache methods": migration_table.CACHE_METHODS,
        "fields": migration_table.FIELDS,
        "kept": migration_table.KEPT,
        "newer": migration_table.NEWER,
        "newer fields": migration_table.NEWER_FIELDS,
    }


def mismatches(compared: Comparison) -> list[str]:
    """Differences between the table and the packages, as messages."""
    tables = rows(compared)
    names = {name for table in ("constraints", "beams", "outputs", "caches", "inner", "tensors")
             for name in tables[table]}  # fmt: skip
    pairs = {
        "names": (compared.gone(), names),
        "methods": (compared.lost("methods"), set(tables["methods"])),
        "methods of caches": (compared.lost("cache_methods"), set(tables["cache methods"])),
        "fields and arguments": (compared.lost("fields") | compared.lost("arguments"), set(tables["fields"])),
        "names kept": (compared.not_exported(), set(tables["kept"])),
        "newer names": (compared.newer(), set(tables["newer"])),
        "newer fields": (compared.newer_fields(), set(tables["newer fields"])),
    }
    problems = []
    for kind, (found, listed) in pairs.items():
        problems += [f"{kind}: `{name}` is gone and has no row" for name in sorted(found - listed)]
        problems += [f"{kind}: `{name}` has a row and is not gone" for name in sorted(listed - found)]
    return problems


def defaults(compared: Comparison) -> list[tuple[str, str, str, str]]:
    """Config fields whose default changed: name, value in 4.52, value in 5.x, value in Descant."""
    old, new = compared.old["fields"], compared.new["fields"]
    return [
        (name, old[name], new[name], repr(FIELDS[name].default))
        for name in old
        if name in new and old[name] != new[name]
    ]


def table(name: str, compared: Comparison) -> str:
    """One table in Markdown."""
    if name == "defaults":
        lines = [f"| `{one}` | `{old}` | `{new}` | `{ours}` |" for one, old, new, ours in defaults(compared)]
        return "\n".join(("| field | 4.52 | 5.x | here |", "|---|---|---|---|", *lines))
    found = rows(compared)[name]
    if name == "tensors":
        lines = [f"| `{one}` | {_now(row)} |" for one, row in found.items()]
        return "\n".join(("| gone | here |", "|---|---|", *lines))
    lines = [f"| `{one}` | {_code(row.before)} | {_now(row)} |" for one, row in found.items()]
    head = "gone" if name not in ("kept", "newer", "newer fields") else "not here"
    return "\n".join((f"| {head} | before | here |", "|---|---|---|", *lines))


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|") if text else ""


def _now(row: Row) -> str:
    return "; ".join(filter(None, (_code(row.after) or "nothing", row.note)))


def render(page: str, compared: Comparison) -> str:
    """The page with current tables."""
    return TABLE.sub(
        lambda mark: f"<!-- table: {mark['name']} -->\n\n{table(mark['name'], compared)}\n\n<!-- end -->",
        page,
    )


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    transformers4 = Transformers4()
    try:
        compared = Comparison.live(transformers4)
    finally:
        transformers4.close()
    if mistakes := mismatches(compared):
        print("\n".join(mistakes))
        return 1
    stale = 0
    for path in (PAGE, FIVE):
        old = path.read_text(encoding="utf-8")
        new = render(old, compared)
        stale += old != new
        if check:
            difference = difflib.unified_diff(
                old.splitlines(), new.splitlines(), path.name, "new", lineterm=""
            )
            print("\n".join(difference), end="")
        else:
            path.write_text(new, encoding="utf-8")
    return int(check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
