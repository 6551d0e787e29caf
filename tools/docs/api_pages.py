"""The API reference: pages of public names, examples that use each, and command-line options.

    python tools/docs/api_pages.py       print names without an entry, an example or a test

As a mkdocs hook it writes the entries of `docs/reference/api`. A comment `<!-- api: generate, stream -->`
becomes mkdocstrings directives for these names, with links to the pages whose code blocks use them.
`<!-- api of descant.testing: toy -->` takes the names from that package. `<!-- commands -->` becomes the
reference of the command line.
"""

import ast
import functools
import importlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a hook of mkdocs is not run from the checkout's root

from tools.docs import doc_blocks  # noqa: E402

PAGES = ROOT / "docs" / "reference" / "api"
PACKAGES = ("descant", "descant.jobs", "descant.parts", "descant.testing")
MARK = re.compile(r"^<!-- api(?: of (?P<package>[\w.]+))?: (?P<names>[\w\s,]+?) -->$", re.MULTILINE)
COMMANDS = "<!-- commands -->"


def public_objects() -> dict[str, set[str]]:
    """Every public object by its path, with its public names."""
    found: dict[str, set[str]] = {}
    for package in PACKAGES:
        for name in importlib.import_module(package).__all__:
            found.setdefault(path_of(package, name), set()).add(f"{package}.{name}")
    return found


@functools.cache
def path_of(package: str, name: str) -> str:
    """Where a public name is defined: `module.name`."""
    thing = getattr(importlib.import_module(package), name)
    module = getattr(thing, "__module__", "")
    if str(module).partition(".")[0] == "descant":
        return f"{module}.{name}"
    # An alias has no `__module__`; the import in the package, or in its stub, gives its module.
    source = Path(str(importlib.import_module(package).__file__))
    stub = source.with_suffix(".pyi")
    tree = ast.parse((stub if stub.exists() else source).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(one.name == name for one in node.names):
            return f"{node.module}.{name}"
    raise LookupError(f"{package} does not say where it takes `{name}` from")


def entries(text: str) -> Iterator[tuple[str, str]]:
    """The package and name of each entry of a page."""
    for mark in MARK.finditer(text):
        for name in re.split(r"[\s,]+", mark["names"].strip()):
            yield mark["package"] or "descant", name


@functools.cache
def listed() -> dict[str, list[Path]]:
    """The pages with an entry for each object, by its path."""
    found: dict[str, list[Path]] = {}
    for page in sorted(PAGES.glob("*.md")):
        for package, name in entries(page.read_text(encoding="utf-8")):
            found.setdefault(path_of(package, name), []).append(page)
    return found


def used_names(source: str) -> set[str]:
    """The names that code uses; imports and strings do not count."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
    return found


@functools.cache
def shown() -> dict[str, list[Path]]:
    """The Markdown files and example programs that run in CI and use a name, by name."""
    found: dict[str, list[Path]] = {}
    for page in doc_blocks.sources():
        code = [
            block.text for block in doc_blocks.read(page) if block.language == "python" and not block.before
        ]
        for name in set().union(*map(used_names, code)):
            found.setdefault(name, []).append(page)
    for program in sorted((ROOT / "examples").glob("*.py")):
        for name in used_names(program.read_text(encoding="utf-8")):
            found.setdefault(name, []).append(program)
    return found


@functools.cache
def tested() -> frozenset[str]:
    """The names that tests use, as code or as a string (in parametrised tests)."""
    found: set[str] = set()
    for path in (ROOT / "tests").rglob("*.py"):
        if path == ROOT / "tests" / "e2e" / "docs" / "test_api.py":
            continue
        source = path.read_text(encoding="utf-8")
        strings = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
        found |= used_names(source) | {one for one in strings if isinstance(one, str)}
    return frozenset(found)


def title(page: Path) -> str:
    """The first heading of a page."""
    found = re.search(r"^# (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else page.stem


def links(name: str, of: Path) -> str:
    """Links from a page to the other pages that show a name."""
    docs = [page for page in shown().get(name, []) if page.suffix == ".md" and ROOT / "docs" in page.parents]
    made = [f"[{title(page)}]({os.path.relpath(page, of.parent)})" for page in docs if page != of]
    return f"\n*Shown in* {', '.join(made[:6])}.\n" if made else ""


def expand(text: str, of: Path) -> str:
    """A page with its entries as directives to mkdocstrings, and the commands."""

    def directives(mark: re.Match[str]) -> str:
        return "\n".join(
            f"::: {path_of(package, name)}\n{links(name, of)}" for package, name in entries(mark[0])
        )

    text = MARK.sub(directives, text)
    return text.replace(COMMANDS, commands()) if COMMANDS in text else text


def commands() -> str:
    """Every command with its arguments and options; generation parameters have their own page."""
    import typer.main

    from descant.cli.application import build_app
    from descant.config.generation_config import FIELDS

    def sections(command: Any, path: Sequence[str]) -> Iterator[str]:
        if getattr(command, "commands", None):
            for name, below in command.commands.items():
                yield from sections(below, (*path, name))
            return
        command = command.load()
        yield f"## {' '.join(path)}\n\n{' '.join((command.help or '').split())}\n"
        known = [one for one in command.params if one.name not in FIELDS and one.name != "help"]
        if known:
            yield "| argument | meaning |\n|---|---|"
            yield from (f"| {_syntax(one)} | {_cell(getattr(one, 'help', None) or '')} |" for one in known)
        if len(known) < len([one for one in command.params if one.name != "help"]):
            yield "| every field of [GenerationConfig](../config.md) | as `--its-name` |"
        yield ""

    return "\n".join(sections(typer.main.get_command(build_app()), ("descant",)))


def _syntax(parameter: Any) -> str:
    """A parameter as typed on the command line."""
    if parameter.param_type_name == "argument":
        return f"`{(parameter.metavar or parameter.name).upper()}`"
    return ", ".join(f"`{one}`" for one in (*parameter.opts, *parameter.secondary_opts))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs for every page."""
    source = ROOT / "docs" / page.file.src_uri
    return expand(markdown, source) if source.parent == PAGES else markdown


def missing() -> list[str]:
    """Public names without an entry, an example or a test, as messages."""
    problems = []
    for path, names in sorted(public_objects().items()):
        short = path.rpartition(".")[2]
        if len(listed().get(path, [])) != 1:
            count = len(listed().get(path, []))
            problems.append(f"{', '.join(sorted(names))}: {count} entries in the reference")
        if short not in shown():
            problems.append(f"{', '.join(sorted(names))}: no example that runs")
        if short not in tested():
            problems.append(f"{', '.join(sorted(names))}: no test")
    problems += [f"{path}: an entry, but not public" for path in listed() if path not in public_objects()]
    return problems


if __name__ == "__main__":
    print("\n".join(missing()))
    sys.exit(bool(missing()))
