"""A reader of Python source that finds every road to unpickling that a file names."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

# Modules that unpickle, or run code, when they read.
MODULES = (
    "_compat_pickle", "_marshal", "_pickle", "cPickle", "cloudpickle", "compress_pickle", "dill", "hickle",
    "joblib", "jsonpickle", "klepto", "marshal", "multiprocessing", "pickle", "pickle5", "pickletools",
    "shelve", "skops", "torch._weights_only_unpickler", "torch.distributed.checkpoint",
    "torch.multiprocessing", "torch.package", "torch.serialization", "zodbpickle",
)  # fmt: skip
# Functions that do so, by the dotted names under which they are known.
FUNCTIONS = (
    "builtins.__import__", "imp.load_compiled", "numpy.lib.NpyFile", "numpy.lib.format.read_array",
    "numpy.lib.npyio", "numpy.load", "pandas.read_pickle", "runpy.run_path", "scipy.io.loadmat",
    "torch.distributed.all_gather_object", "torch.distributed.broadcast_object_list",
    "torch.distributed.gather_object", "torch.distributed.recv_object_list",
    "torch.distributed.scatter_object_list", "torch.export.load", "torch.hub.load",
    "torch.hub.load_state_dict_from_file", "torch.hub.load_state_dict_from_url", "torch.jit.load",
    "torch.load", "transformers.modeling_utils.load_state_dict", "yaml.load", "yaml.unsafe_load",
)  # fmt: skip
# Names that only an unpickler has, wherever they come from.
WORDS = ("Unpickler", "find_class", "persistent_load", "allow_pickle", "read_pickle", "unsafe_load")
_WEIGHTS_ONLY = "torch.load"
_ALL = frozenset((*MODULES, *FUNCTIONS))


def files(*folders: Path) -> list[Path]:
    """The Python files of some folders."""
    return sorted(file for folder in folders for file in folder.rglob("*.py"))


def findings(source: str, weights_only: bool = False) -> list[str]:
    """What a source names that unpickles, with its line; `weights_only` lets that form of torch.load pass."""
    tree = ast.parse(source)
    aliases = dict(_aliases(tree))
    excused = set(_excused(tree, aliases)) if weights_only else set()
    return [
        f"line {getattr(node, 'lineno', 0)}: {what}"
        for node in ast.walk(tree)
        if id(node) not in excused
        for what in _named(node, aliases)
    ]


def _aliases(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """The names that a file gives to modules and to what it takes from them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                yield (
                    (one.asname, one.name) if one.asname else (one.name.split(".")[0], one.name.split(".")[0])
                )
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for one in node.names:
                yield one.asname or one.name, f"{node.module}.{one.name}"
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name | ast.Attribute):
            for target in node.targets:
                if isinstance(target, ast.Name) and (whole := _dotted(node.value, {})):
                    yield target.id, whole


def _dotted(node: ast.AST, aliases: dict[str, str]) -> str | None:
    """The whole name of an expression of names and dots."""
    if isinstance(node, ast.Name):
        name = node.id
        for _ in range(8):  # a name may be given to what has itself been named
            first, dot, rest = name.partition(".")
            if first not in aliases or aliases[first] == first:
                break
            name = aliases[first] + dot + rest
        return name
    if isinstance(node, ast.Attribute):
        inner = _dotted(node.value, aliases)
        return None if inner is None else f"{inner}.{node.attr}"
    return None


def _named(node: ast.AST, aliases: dict[str, str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (one.name for one in node.names if _forbidden(one.name))
    elif isinstance(node, ast.ImportFrom):
        wholes = [f"{node.module}.{one.name}" for one in node.names]
        yield from (one for one in (str(node.module), *wholes) if _forbidden(one))
        yield from (one.name for one in node.names if one.name in WORDS)
    elif isinstance(node, ast.Attribute | ast.Name):
        whole = _dotted(node, aliases)
        if whole is not None and _forbidden(whole):
            yield whole
        elif (node.attr if isinstance(node, ast.Attribute) else node.id) in WORDS:
            yield ast.unparse(node)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        # import_module("pickle"), __import__("dill"), sys.modules["marshal"], getattr(torch, "load") ...
        if _forbidden(node.value) or node.value in WORDS:
            yield repr(node.value)
    elif isinstance(node, ast.keyword) and node.arg in WORDS:
        yield f"{node.arg}="
    elif isinstance(node, ast.FunctionDef) and node.name in WORDS:
        yield f"def {node.name}"
    if isinstance(node, ast.Call) and _dotted(node.func, aliases) in ("getattr", "operator.attrgetter"):
        yield from _looked_up(node, aliases)


def _looked_up(call: ast.Call, aliases: dict[str, str]) -> Iterator[str]:
    """What getattr() and attrgetter() take by name."""
    names = [one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    owner = _dotted(call.args[0], aliases) if call.args else None
    for name in names:
        if _forbidden(f"{owner}.{name}") or any(_forbidden(f"{root}.{name}") for root in ("torch", "numpy")):
            yield f"{owner}.{name}"


@functools.cache
def _forbidden(whole: str) -> bool:
    parts = whole.split(".", 8)
    return any(".".join(parts[: end + 1]) in _ALL for end in range(min(len(parts), 8)))


def _excused(tree: ast.AST, aliases: dict[str, str]) -> Iterator[int]:
    """The `torch.load` of calls with a plain `weights_only=True`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _dotted(node.func, aliases) == _WEIGHTS_ONLY:
            for one in node.keywords:
                if (
                    one.arg == "weights_only"
                    and isinstance(one.value, ast.Constant)
                    and one.value.value is True
                ):
                    yield id(node.func)
