"""Mutation testing: change one expression of a package, run the tests that call it, list the survivors.

    python -m tools.mutants --rooms core engine --count 20 --seed 1 --out results.jsonl

The tests are the daily check and the contracts of the package. They are collected once; each mutant is a fork
of that process, in which the function's code is replaced, so no file changes. A failure ends the run.

`tools.call_map` records which functions a test calls. Of the tests in the file `--calls`, only those that
call the changed function run. The others follow, those whose names match the module first.

Two suites are compared on one list, drawn before either changes:

    python -m tools.mutants --rooms kv_cache --count 60 --freeze frozen.jsonl
    python -m tools.mutants --rooms kv_cache --frozen frozen.jsonl --heavy --out before.jsonl
"""

from __future__ import annotations

import argparse
import ast
import copy
import difflib
import gc
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple, NoReturn

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "descant"
TESTS = ROOT / "tests"
MARKERS = "not slow and not reference and not heavy and not hqq"

UNOBSERVED = ("strict", "non_blocking", "stacklevel")  # arguments that no test on a CPU can tell apart
HANG_SECONDS = 30  # CPU seconds of one test, many times what the longest takes

# The contracts of each package, quickest first. The unit tests of all packages run for any of them.
CONTRACTS: dict[str, tuple[str, ...]] = {
    "api": ("forks", "methods"),
    "cli": (),
    "config": ("configs", "refusals"),
    "jobs": (),
    "models": ("caches", "methods"),
    "recipes": ("recipes",),
    "serve": (),
    "testing": ("broken", "broken_caches"),
    "tokenization": (),
    "trace": (),
    "core": ("rows", "requests", "schedules", "forks"),
    "engine": ("requests", "schedules", "configs", "speculation_sessions", "methods", "cache_matrix"),
    "decoding": (
        "processors",
        "drafts",
        "drafters",
        "speculation",
        "speculation_law",
        "methods",
        "marks",
        "broken",
    ),
    "kv_cache": ("blocks", "caches", "forks", "cache_matrix", "schedules"),
}

# End-to-end tests of a package that run it in their own process.
END_TO_END = {"cli": "cli", "serve": "serve", "trace": "browser"}

COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}  # fmt: skip


class Mutant(NamedTuple):
    """One change: where it is, what it does, and the module's new source."""

    module: Path
    line: int
    function: str  # the innermost one
    change: str
    source: str

    @property
    def where(self) -> str:
        """The place of the change, as `core/rows.py:take:42`."""
        return f"{self.module.relative_to(SOURCE)}:{self.function}:{self.line}"

    @property
    def patch(self) -> str:
        """The change as `git apply` takes it."""
        name = str(self.module.relative_to(ROOT))
        texts = self.module.read_text().splitlines(True), self.source.splitlines(True)
        return "".join(difflib.unified_diff(*texts, f"a/{name}", f"b/{name}"))


def mutate(node: ast.AST) -> ast.AST | None:
    """A changed copy of an expression or statement; None: there is no mutation of this kind."""
    new = copy.deepcopy(node)
    match new:
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            new.ops = [COMPARISONS[type(op)]()]
        case ast.BinOp(op=op) if type(op) in OPERATORS:
            new.op = OPERATORS[type(op)]()
        case ast.BoolOp(op=op):
            new.op = ast.And() if isinstance(op, ast.Or) else ast.Or()
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return operand
        case ast.Constant(value=bool(value)):
            new.value = not value
        case ast.Constant(value=int(value)):
            new.value = value + 1
        case ast.IfExp(body=body, orelse=orelse):
            new.body, new.orelse = orelse, body
        case ast.Expr(value=ast.Call()):
            return ast.Pass()
        case ast.AugAssign(op=op) if type(op) in OPERATORS:
            new.op = OPERATORS[type(op)]()
        case _:
            return None
    return new


def sites(tree: ast.Module) -> Iterator[tuple[str, ast.AST, str, int | None]]:
    """Every place in a function body that can be mutated: the function, its parent, field and index."""
    skipped = (ast.Raise, ast.Assert, ast.FunctionDef, ast.JoinedStr)

    def visit(parent: ast.AST) -> Iterator[tuple[ast.AST, str, int | None]]:
        for field, value in ast.iter_fields(parent):
            if field in ("annotation", "returns", "decorator_list", "args") and not isinstance(
                parent, ast.Call
            ):
                continue
            for index, child in enumerate(value) if isinstance(value, list) else ((None, value),):
                if not isinstance(child, ast.AST) or isinstance(child, skipped):
                    continue
                if isinstance(child, ast.keyword) and child.arg in UNOBSERVED:
                    continue
                if mutate(child) is not None:
                    yield parent, field, index
                yield from visit(child)

    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("__repr"):
            for statement in node.body:
                if not isinstance(statement, skipped):
                    yield from ((node.name, *site) for site in visit(statement))


def mutants_of(module: Path) -> list[Mutant]:
    """All mutants of a module."""
    text = module.read_text()
    encoded = text.encode()
    starts = [0]  # of the lines, in bytes
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    found = []
    for function, parent, field, index in sites(ast.parse(text)):
        old: Any = getattr(parent, field) if index is None else getattr(parent, field)[index]
        new = mutate(old)
        assert new is not None
        start, stop = (
            starts[line - 1] + column
            for line, column in ((old.lineno, old.col_offset), (old.end_lineno, old.end_col_offset))
        )
        before, after = ast.unparse(old), ast.unparse(new)
        changed = after if isinstance(old, ast.stmt) else f"({after})"
        source = (encoded[:start] + changed.encode() + encoded[stop:]).decode()
        found.append(Mutant(module, old.lineno, function, f"{before}  ->  {after}", source))
    return found


def draw(room: str, generator: random.Random, count: int, under: str = "") -> Iterator[Mutant]:
    """Up to `count` random mutants of a package, no two the same."""
    found = [
        mutant
        for module in sorted((SOURCE / room / under).rglob("*.py"))
        if module.stem != "__init__"
        for mutant in mutants_of(module)
    ]
    yield from generator.sample(found, min(count, len(found)))


def drawn(given: argparse.Namespace) -> Iterator[Mutant]:
    """Random mutants of each room of the command."""
    for room in given.rooms:
        yield from draw(room, random.Random(f"{given.seed} {room}"), given.count, given.under)


def freeze(mutants: Iterator[Mutant], path: Path) -> None:
    """Write mutants to a file, each with its patch."""
    records = ({"where": one.where, "change": one.change, "patch": one.patch} for one in mutants)
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))


def read_mutants(path: Path) -> Iterator[Mutant]:
    """The mutants of a frozen list, or those of a file of results that no test has killed."""
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if record.get("verdict") != "killed":
            module = SOURCE / record["where"].split(":")[0]
            found = (mutant for mutant in mutants_of(module) if mutant.where == record["where"])
            yield next(mutant for mutant in found if mutant.change == record["change"])


def function_codes(code: CodeType) -> Iterator[CodeType]:
    """The functions and methods of a module's code, without those inside of functions."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_flags & 0x2:  # CO_NEWLOCALS: a function, where a class has none
                yield constant
            else:
                yield from function_codes(constant)


def install(mutant: Mutant) -> bool:
    """Replace the changed function's code in this process; False: it is not loaded or cannot be replaced."""
    path = str(mutant.module)
    old = set(function_codes(compile(mutant.module.read_text(), path, "exec", dont_inherit=True)))
    changed = {
        (code.co_qualname, code.co_firstlineno): code
        for code in function_codes(compile(mutant.source, path, "exec", dont_inherit=True))
        if code not in old
    }
    replaced = False
    gc.unfreeze()  # `tests/conftest.py` freezes what its imports have made
    for function in [found for found in gc.get_objects() if type(found) is FunctionType]:
        code = function.__code__
        new = changed.get((code.co_qualname, code.co_firstlineno)) if code.co_filename == path else None
        if new is not None:
            try:
                function.__code__ = new
            except ValueError:  # it has no longer the same free variables
                return False
            replaced = True
    return replaced


class TestMap:
    """Which tests run for a mutant, from the calls that `tools.call_map` recorded."""

    __test__ = False

    def __init__(self, items: list[pytest.Item], calls: Path | None, near: bool = False) -> None:
        self.items = items
        self.near = near  # of the others, only those whose path shares a word with the module's
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, frozenset[str]] = {}
        self.fixtures: dict[str, set[str]] = defaultdict(set)  # by file
        for line in calls.read_text().splitlines() if calls else ():
            record = json.loads(line)
            self.seconds[record["test"]] = record["seconds"]
            self.calls[record["test"]] = frozenset(map(sys.intern, record["calls"]))
            self.fixtures[record["test"].split("::")[0]].update(record.get("fixtures", ()))

    def tests(self, mutant: Mutant) -> list[pytest.Item]:
        """The tests of a mutant by file: recorded ones that call the function, then others."""
        module = mutant.module.relative_to(SOURCE)
        function = f"{module}:{mutant.function}"
        found: dict[Path, list[pytest.Item]] = defaultdict(list)
        for item in self.items:
            calls = self.calls.get(item.nodeid)
            if not belongs(item.path, module.parts[0]):
                continue
            if calls is None and self.near and likeness(module, item.path) < 4:
                continue
            if calls is None or function in calls or function in self.fixtures[item.nodeid.split("::")[0]]:
                found[item.path].append(item)

        def cost(path: Path) -> tuple[bool, float, str]:
            recorded = [self.seconds.get(item.nodeid) for item in found[path]]
            if None in recorded:
                return True, -likeness(module, path), str(path)
            return False, sum(seconds for seconds in recorded if seconds), str(path)

        return [item for path in sorted(found, key=cost) for item in found[path]]


def belongs(test: Path, room: str) -> bool:
    """Whether a file of tests is for a package: a unit test, one of its contracts or end-to-end tests."""
    parts = test.relative_to(TESTS).parts
    if parts[0] == "e2e":
        return END_TO_END.get(room) == parts[1]
    return parts[0] == "unit" or test.stem.removeprefix("test_") in CONTRACTS[room]


def likeness(module: Path, test: Path) -> int:
    """How many words of a module's path are in the path of a file of tests."""
    parts = test.relative_to(TESTS).parts
    words = set(re.split(r"_", module.stem)) | set(module.parts[:-1])
    of_test = set(re.split(r"_", test.stem.removeprefix("test_"))) | set(parts[1:-1])
    same_package = parts[:2] == ("unit", module.parts[0])
    return len(words & of_test) + 4 * (test.stem == f"test_{module.stem}") + 2 * same_package


class MutantTestLoop:
    """Pytest plugin: in place of the tests, one fork for each mutant."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.failed = ""
        self.sound: set[pytest.Item] = set()  # tests that are known to pass without a mutant

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Draw mutants, run their tests, and print one line for each."""
        tests = TestMap(session.items, self.given.calls, self.given.near)
        counts: dict[str, int] = defaultdict(int)
        for mutant in self.mutants():
            began = time.monotonic()
            items = tests.tests(mutant)
            result = self.run(session, mutant, items)
            self.check_killer(session, [item for item in items if item.nodeid == result.get("test")])
            counts[result["verdict"]] += 1
            record = {"where": mutant.where, "change": mutant.change, **result}
            seconds = time.monotonic() - began
            print(f"{seconds:5.0f} s ", *(str(value) for value in record.values()), sep="  ", flush=True)
            if self.given.out is not None:
                with self.given.out.open("a") as file:
                    file.write(json.dumps(record) + "\n")
        print(", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
        return True

    def mutants(self) -> Iterator[Mutant]:
        """The mutants to try: random ones of each room, a frozen list, or survivors of an earlier run."""
        path = self.given.again or self.given.frozen
        return drawn(self.given) if path is None else read_mutants(path)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the first failure."""
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def check_killer(self, session: pytest.Session, killer: list[pytest.Item]) -> None:
        """Exit if the test that has killed a mutant fails without it too."""
        if not self.sound.issuperset(killer):
            if self.run(session, None, killer)["verdict"] != "survived":
                pytest.exit(f"{killer[0].nodeid} fails without a mutant", returncode=1)
            self.sound.update(killer)

    def run(self, session: pytest.Session, mutant: Mutant | None, items: list[pytest.Item]) -> dict[str, Any]:
        """The verdict: killed, survived, undecided (a time limit) or invalid. None: no change."""
        reader, writer = os.pipe()
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            child = os.fork()
            if child == 0:
                os.close(reader)
                self.run_child(session, mutant, items, writer, Path(folder))
            os.close(writer)
            with os.fdopen(reader, "rb") as file:
                answer = file.read()
            os.waitpid(child, 0)
        # A process that dies says nothing: the mutant broke it.
        return json.loads(answer) if answer else {"verdict": "killed", "test": "(the process died)"}

    def run_child(
        self,
        session: pytest.Session,
        mutant: Mutant | None,
        items: list[pytest.Item],
        writer: int,
        folder: Path,
    ) -> NoReturn:
        """Install the mutant, run its tests until one fails, write the verdict and exit."""
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        os.set_inheritable(writer, False)
        result: dict[str, Any] = {"verdict": "invalid"}
        try:
            session.config._tmp_path_factory._given_basetemp = folder / "tmp"  # type: ignore[attr-defined]
            if mutant is None or install(mutant):
                result = self.run_items(items)
        finally:
            os.write(writer, json.dumps(result).encode())
            os._exit(0)

    def run_items(self, items: list[pytest.Item]) -> dict[str, Any]:
        """Run tests until one fails or the CPU seconds are used up."""
        limit, verdict, ran = self.given.seconds, "survived", 0
        signal.signal(signal.SIGPROF, _hang)
        began = time.process_time()
        for item, following in zip(items, [*items[1:], None], strict=True):
            signal.setitimer(signal.ITIMER_PROF, min(limit, HANG_SECONDS))
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            signal.setitimer(signal.ITIMER_PROF, 0)
            ran += 1
            if self.failed:
                verdict = "killed"
                break
            if time.process_time() - began > limit and following is not None:
                verdict = "undecided"
                break
        return {"verdict": verdict, "test": self.failed, "ran": ran, "of": len(items)}


def _hang(_signal: int, _frame: object) -> NoReturn:
    raise TimeoutError("the mutant hangs")


def main() -> None:
    """Collect the tests and run the mutants."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rooms", nargs="+", default=sorted(CONTRACTS), choices=sorted(CONTRACTS))
    parser.add_argument("--under", default="", help="a folder of the room, to take modules from it only")
    parser.add_argument("--count", type=int, default=15, help="mutants of each room")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=120, help="CPU seconds of one mutant")
    parser.add_argument("--tests", nargs="+", type=Path, help="in place of tests/unit and the contracts")
    parser.add_argument("--again", type=Path, help="try the survivors of this file of results again")
    parser.add_argument("--freeze", type=Path, help="write the list of mutants to this file, and end")
    parser.add_argument("--frozen", type=Path, help="try the mutants of this list")
    parser.add_argument("--heavy", action="store_true", help="also run the tests that the daily check omits")
    parser.add_argument("--select", default="", help="only the tests that match this -k expression")
    parser.add_argument("--calls", type=Path, help="a file of tools.call_map")
    parser.add_argument(
        "--near", action="store_true", help="of other tests, only those named like the module"
    )
    parser.add_argument("--out", type=Path, help="a JSONL file to append the results to")
    given = parser.parse_args()
    if given.freeze is not None:
        freeze(drawn(given), given.freeze)
        return
    contracts = sorted({name for room in given.rooms for name in CONTRACTS[room]})
    files = given.tests or [
        TESTS / "unit",
        *(TESTS / "contracts" / f"test_{name}.py" for name in contracts),
        *(TESTS / "e2e" / END_TO_END[room] for room in given.rooms if room in END_TO_END),
    ]
    markers = MARKERS.replace(" and not heavy", "") if given.heavy else MARKERS
    # The forks redirect their output themselves.
    options = ["-q", "-s", "--no-header", "-p", "no:cacheprovider", "-m", markers, "-k", given.select]
    sys.exit(pytest.main([*options, *map(str, files)], plugins=[MutantTestLoop(given)]))


if __name__ == "__main__":
    main()
