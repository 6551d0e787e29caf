"""Mutation testing: change one expression of a package, run the package's tests, list the survivors.

    python -m tools.mutants --rooms core engine --count 20 --seed 1 --out survivors.jsonl

Each mutant is written over its module in the working tree and reverted afterwards, so run it in a clone of
its own. The tests run in a fork of a process that has torch and transformers imported. The files whose names
match the module come first, then the package's unit tests, then its contracts; a failure ends the run.

    python -m tools.mutants --rooms engine --under scheduling --tests tests/unit/engine/test_scheduler*.py
"""

from __future__ import annotations

import argparse
import ast
import compileall
import contextlib
import copy
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch  # noqa: F401 - before the forks, as is the next
import transformers.generation.utils
import transformers.models.llama.modeling_llama  # noqa: F401

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "descant"
TESTS = ROOT / "tests"
MARKERS = "not slow and not reference and not heavy and not hqq"

# The contracts of each package, quickest first.
CONTRACTS = {
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
    change: str
    source: str


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


def sites(tree: ast.Module) -> Iterator[tuple[ast.AST, str, int | None]]:
    """Every place in a function body that can be mutated: its parent, field and index."""
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
                if mutate(child) is not None:
                    yield parent, field, index
                yield from visit(child)

    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("__repr"):
            for statement in node.body:
                if not isinstance(statement, skipped):
                    yield from visit(statement)


def draw(module: Path, generator: random.Random) -> Mutant | None:
    """One random mutant of a module; None: it has nothing to mutate."""
    text = module.read_text()
    tree = ast.parse(text)
    found = list(sites(tree))
    if not found:
        return None
    parent, field, index = generator.choice(found)
    old = getattr(parent, field) if index is None else getattr(parent, field)[index]
    new = mutate(old)
    assert new is not None
    before, after = ast.unparse(old), ast.unparse(new)
    segment = ast.get_source_segment(text, old)
    lines = text.splitlines(keepends=True)
    start = sum(len(line.encode()) for line in lines[: old.lineno - 1]) + old.col_offset
    encoded = text.encode()
    assert segment is not None
    assert encoded[start : start + len(segment.encode())] == segment.encode()
    changed = encoded[:start] + f"({after})".encode() + encoded[start + len(segment.encode()) :]
    if isinstance(old, ast.stmt):
        changed = encoded[:start] + after.encode() + encoded[start + len(segment.encode()) :]
    return Mutant(module, old.lineno, f"{before}  ->  {after}", changed.decode())


def test_files(module: Path) -> list[Path]:
    """The test files of a module, the most related first."""
    room = module.relative_to(SOURCE).parts[0]
    words = set(re.split(r"_", module.stem)) | set(module.relative_to(SOURCE).parts[1:-1])

    def distance(path: Path) -> tuple[int, str]:
        mine = set(re.split(r"_", path.stem.removeprefix("test_"))) | set(path.relative_to(TESTS).parts[:-1])
        return -len(words & mine) - 4 * (path.stem == f"test_{module.stem}"), str(path)

    unit = sorted((TESTS / "unit" / room).rglob("test_*.py"), key=distance)
    if room != "engine":
        unit += sorted((TESTS / "unit" / "engine").rglob("test_*.py"))
    contracts = [TESTS / "contracts" / f"test_{name}.py" for name in CONTRACTS[room]]
    return [*unit, *contracts]


def run_tests(files: list[Path], seconds: float) -> tuple[str, str]:
    """("killed" | "survived" | "timeout", the failed test) of a run in a fork of this process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        sys.dont_write_bytecode = True  # the byte code of a mutant must not outlive it
        code: int = pytest.ExitCode.INTERNAL_ERROR
        try:
            # Plain assertions: rewriting them warns about modules that are imported already.
            options = ["-x", "-q", "--no-header", "--assert=plain", "-p", "no:cacheprovider", "-m", MARKERS]
            code = pytest.main([*options, *map(str, files)])
        finally:
            sys.stdout.flush()
            os._exit(int(code))
    os.close(writer)
    end, output = time.monotonic() + seconds, b""
    os.set_blocking(reader, False)
    while time.monotonic() < end:
        try:
            output += os.read(reader, 1 << 16)
        except BlockingIOError:
            time.sleep(0.2)
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            with contextlib.suppress(BlockingIOError):
                output += os.read(reader, 1 << 20)
            os.close(reader)
            failed = re.findall(rb"^(?:FAILED|ERROR) (\S+)", output, re.M)
            name = failed[-1].decode() if failed else ""
            code = os.waitstatus_to_exitcode(status)
            if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED):
                raise RuntimeError(f"pytest ended with {code}:\n{output.decode()[-2000:]}")
            return ("survived" if code == pytest.ExitCode.OK else "killed"), name
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timeout", ""


def main() -> None:
    """Draw mutants, run their tests, and print one line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rooms", nargs="+", default=sorted(CONTRACTS), choices=sorted(CONTRACTS))
    parser.add_argument("--under", default="", help="a folder of the room, to take modules from it only")
    parser.add_argument("--tests", type=Path, nargs="+", help="the test files to run, in place of the room's")
    parser.add_argument("--count", type=int, default=15, help="mutants of each room")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=600, help="time limit of one mutant")
    parser.add_argument("--out", type=Path, help="a JSONL file to append the results to")
    given = parser.parse_args()
    if subprocess.run(["git", "diff", "--quiet", "--", "src"], cwd=ROOT, check=False).returncode:
        sys.exit("src has uncommitted changes: mutants overwrite modules, so commit first or use a clone")
    for folder in (SOURCE, TESTS):
        compileall.compile_dir(folder, quiet=2)
    counts: dict[str, int] = {}
    for room in given.rooms:
        generator = random.Random(f"{given.seed} {room}")
        modules = sorted(
            path for path in (SOURCE / room / given.under).rglob("*.py") if path.stem != "__init__"
        )
        drawn = 0
        while drawn < given.count:
            module = generator.choices(modules, [path.stat().st_size for path in modules])[0]
            mutant = draw(module, generator)
            if mutant is None:
                continue
            drawn += 1
            original = module.read_text()
            began = time.monotonic()
            try:
                module.write_text(mutant.source)
                verdict, test = run_tests(given.tests or test_files(module), given.seconds)
            finally:
                module.write_text(original)
            counts[verdict] = counts.get(verdict, 0) + 1
            where = f"{module.relative_to(SOURCE)}:{mutant.line}"
            print(
                f"{verdict:9} {time.monotonic() - began:5.0f} s  {where}  {mutant.change}  {test}", flush=True
            )
            if given.out is not None:
                record = {"verdict": verdict, "where": where, "change": mutant.change, "test": test}
                with given.out.open("a") as file:
                    file.write(json.dumps(record) + "\n")
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))


if __name__ == "__main__":
    main()
