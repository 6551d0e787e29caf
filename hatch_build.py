"""Hooks of the build: the long description (README.md with absolute links), and the SBOM of the wheel."""

import json
import re
from email.parser import HeaderParser
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# The target of a Markdown link or image: no scheme and no anchor of the page itself.
RELATIVE = re.compile(r"(?<=\]\()(?![a-z]+:|#)(?P<path>[^)\s#]+)(?P<anchor>#[^)\s]*)?(?=[)\s])")


def absolute_links(text: str, urls: dict[str, str]) -> str:
    """Markdown whose links to files of the repository lead to the documentation, or to the source."""

    def absolute(found: re.Match[str]) -> str:
        path, anchor = found["path"], found["anchor"] or ""
        if not path.startswith("docs/"):
            return f"{urls['Source']}/blob/main/{path}{anchor}"
        page = path.removeprefix("docs/")
        if page.endswith(".md"):
            page = re.sub(r"(?:^|(?<=/))index$", "", page.removesuffix(".md"))
            page += "/" if page and not page.endswith("/") else ""
        return f"{urls['Documentation']}latest/{page}{anchor}"

    return RELATIVE.sub(absolute, text)


class CustomMetadataHook(MetadataHookInterface):  # type: ignore[misc]
    """Sets the long description while hatchling reads pyproject.toml."""

    def update(self, metadata: dict[str, object]) -> None:
        """Called by hatchling with the table `project`."""
        urls = metadata["urls"]
        if not isinstance(urls, dict):
            raise TypeError("`project.urls` of pyproject.toml must be a table")
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute_links(text, urls)}


def bill_of_materials(core_metadata: str) -> dict[str, Any]:
    """A package and what it requires in CycloneDX 1.6, from the text of its METADATA.

    A library allows ranges, so that components have their requirements in place of a version. There is no
    time and no random serial number: the same metadata has the same bytes.
    """
    package = HeaderParser().parsestr(core_metadata)
    name, version = package["Name"], package["Version"]
    root = {
        "type": "library",
        "bom-ref": name,
        "name": name,
        "version": version,
        "purl": f"pkg:pypi/{name}@{version}",
    }
    root["licenses"] = [{"license": {"id": package["License-Expression"]}}]
    required: dict[str, list[str]] = {}
    for line in package.get_all("Requires-Dist", []):
        required.setdefault(canonicalize_name(Requirement(line).name), []).append(line)
    components = [
        {
            "type": "library",
            "bom-ref": needed,
            "name": needed,
            "purl": f"pkg:pypi/{needed}",
            "scope": "optional" if all("extra ==" in line for line in lines) else "required",
            "properties": [{"name": "descant:requires-dist", "value": line} for line in lines],
        }
        for needed, lines in sorted(required.items())
    ]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": root},
        "components": components,
        "dependencies": [
            {"ref": name, "dependsOn": sorted(required)},
            *({"ref": needed} for needed in sorted(required)),
        ],
    }


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg,misc]
    """Puts the bill of materials into the wheel, in `.dist-info/sboms` (PEP 770)."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it writes a wheel."""
        if version == "editable":
            return
        self.folder = TemporaryDirectory()  # removed with the hook, after the wheel is written
        file = Path(self.folder.name, "descant.cdx.json")
        core_metadata = self.build_config.core_metadata_constructor(self.metadata)
        file.write_text(json.dumps(bill_of_materials(core_metadata), indent=2) + "\n", encoding="utf-8")
        build_data["sbom_files"].append(str(file))
