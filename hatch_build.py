"""The long description of the package: README.md with absolute links, as PyPI resolves no others."""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

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
        return f"{urls['Documentation']}{page}{anchor}"

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
