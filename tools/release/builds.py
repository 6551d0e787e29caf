"""Build the package twice from the commit, in two folders, and check what was built.

    python -m tools.release.builds

`dist` gets the files if both builds have equal bytes. Then twine checks them, and the SBOM in the wheel
is compared with the metadata and with CycloneDX's schema. The time in the files is that of the commit,
and the tools of the build have the versions of constraints.txt.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]


def git(*arguments: str) -> bytes:
    """What git prints."""
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, check=True).stdout


def build(folder: Path) -> dict[str, bytes]:
    """The files that a build of the commit makes below a folder, by name."""
    with tarfile.open(fileobj=io.BytesIO(git("archive", "--format=tar", "HEAD"))) as archive:
        archive.extractall(folder / "tree", filter="data")
    epoch = git("log", "-1", "--format=%ct").decode().strip()
    environment = os.environ | {
        "SOURCE_DATE_EPOCH": epoch,
        "PIP_CONSTRAINT": str(folder / "tree" / "constraints.txt"),
    }
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(folder / "dist"), str(folder / "tree")],
        env=environment,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return {path.name: path.read_bytes() for path in sorted((folder / "dist").iterdir())}


def read_wheel(wheel: Path) -> tuple[Message, dict[str, Any]]:
    """The metadata and the SBOM of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        [metadata] = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        [sbom] = (name for name in archive.namelist() if ".dist-info/sboms/" in name)
        return HeaderParser().parsestr(archive.read(metadata).decode()), json.loads(archive.read(sbom))


def sbom_differences(metadata: Message, sbom: dict[str, Any]) -> list[str]:
    """Where an SBOM says something else than the metadata of its wheel."""
    package = sbom["metadata"]["component"]
    named = [package["name"], package["version"], package["licenses"][0]["license"]["id"]]
    required = [part["value"] for component in sbom["components"] for part in component["properties"]]
    facts = [
        ("package", named, [metadata[key] for key in ("Name", "Version", "License-Expression")]),
        ("requirements", sorted(required), sorted(metadata.get_all("Requires-Dist", []))),
    ]
    return [
        f"{what}: the SBOM has {ours}, the metadata {theirs}"
        for what, ours, theirs in facts
        if ours != theirs
    ]


def schema_error(sbom: dict[str, Any]) -> str | None:
    """What CycloneDX's schema has against an SBOM."""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(sbom))
    return None if error is None else str(error)


def main() -> int:
    """Command line."""
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        files, again = build(Path(first)), build(Path(second, "another", "folder"))
    if files != again:
        different = sorted(name for name in {*files, *again} if files.get(name) != again.get(name))
        print(f"two builds must have equal bytes, these differ: {', '.join(different)}", file=sys.stderr)
        return 1
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir()
    for name, content in files.items():
        (dist / name).write_bytes(content)
        print(f"{hashlib.sha256(content).hexdigest()}  {len(content):>9,}  {name}")
    subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *(str(dist / name) for name in files)],
        check=True,
    )
    [wheel] = dist.glob("*.whl")
    metadata, sbom = read_wheel(wheel)
    problems = [*sbom_differences(metadata, sbom), *filter(None, [schema_error(sbom)])]
    print(
        *problems
        or [f"the SBOM has the {len(sbom['components'])} packages of the metadata and fits its schema"],
        sep="\n",
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
