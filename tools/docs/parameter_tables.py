"""A table of parameters below the docstring of every function, method and class of the API reference.

mkdocstrings loads it as an extension of griffe. Name, type and default come from the signature, so that they
are those of the code; what a parameter means is in the docstring.
"""

from collections.abc import Iterator
from typing import Any

from griffe import Class, Docstring, Extension, Function, Module, Parameter, ParameterKind, Parameters

MARKS = {ParameterKind.var_positional: "*", ParameterKind.var_keyword: "**"}


def code(text: object) -> str:
    """Inline code in a cell of a table, for every dialect of Markdown."""
    escaped = str(text).replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;")
    return f"<code>{escaped}</code>"


def row(parameter: Parameter) -> str:
    """One line of the table."""
    name = MARKS.get(parameter.kind, "") if parameter.kind else ""
    required = parameter.required and not name
    default = "required" if required else ("" if name else code(parameter.default))
    annotation = code(parameter.annotation) if parameter.annotation is not None else ""
    return f"| {code(name + parameter.name)} | {annotation} | {default} |"


def table(parameters: Parameters) -> str:
    """The parameters of a signature as Markdown; empty if there are none."""
    listed = [one for one in parameters if one.name not in {"self", "cls"}]
    if not listed:
        return ""
    head = "| parameter | type | default |\n|---|---|---|"
    return f'<div class="parameters" markdown>\n\n{head}\n' + "\n".join(map(row, listed)) + "\n\n</div>"


def documented(scope: Module | Class) -> Iterator[Function | Class]:
    """The functions and classes of a scope and below, without what it imports."""
    for member in scope.members.values():
        if member.is_alias:
            continue
        if isinstance(member, Function):
            yield member
        elif isinstance(member, Class):
            yield member
            yield from documented(member)
        elif isinstance(member, Module):
            yield from documented(member)


class ParameterTables(Extension):
    """Appends the tables when a package has been loaded."""

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        """Called by griffe for each package."""
        for thing in documented(pkg):
            # A constructor is shown with its class, and a property has no parameters.
            if thing.name == "__init__" or (isinstance(thing, Function) and "property" in thing.labels):
                continue
            added = table(thing.parameters)
            if not added:
                continue
            if thing.docstring is None:
                thing.docstring = Docstring("", parent=thing)
            thing.docstring.value = f"{thing.docstring.value.rstrip()}\n\n{added}".lstrip()
