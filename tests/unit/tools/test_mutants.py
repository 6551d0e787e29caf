"""`python -m tools.mutants`: what is changed, and which tests run."""

from __future__ import annotations

import ast
import json
import random
import subprocess
from types import SimpleNamespace

import pytest

from tools import mutants


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("a < b", "a <= b"),
        ("a + b", "a - b"),
        ("a and b", "a or b"),
        ("not a", "a"),
        ("True", "False"),
        ("3", "4"),
        ("a if b else c", "c if b else a"),
    ],
)
def test_an_expression_is_changed(old, new):
    assert ast.unparse(mutants.mutate(ast.parse(old, mode="eval").body)) == new


def test_a_mutant_differs_in_one_place_and_parses(tmp_path):
    module = tmp_path / "module.py"
    lines = [
        "def f(a: int = 1) -> int:",
        '    """é"""',
        "    assert a > 0",
        "    a = [a for a, _ in zip([a], [a], strict=True)].pop()",
        "    return a + 2 if a < 5 else a",
    ]
    module.write_text("\n".join(lines))
    found = mutants.mutants_of(module)
    assert sorted(mutant.change for mutant in found) == [
        "2  ->  3",
        "5  ->  6",
        "a + 2  ->  a - 2",
        "a + 2 if a < 5 else a  ->  a if a < 5 else a + 2",
        "a < 5  ->  a <= 5",
    ]  # neither the assertion, the default nor `strict`
    assert {(mutant.function, mutant.line) for mutant in found} == {("f", 5)}
    sources = {ast.unparse(ast.parse(mutant.source)) for mutant in found}
    assert len(sources - {ast.unparse(ast.parse(module.read_text()))}) == 5


def test_random_mutants_differ_and_survivors_are_found_again(tmp_path):
    first = list(mutants.draw("trace", random.Random(2), 5))
    assert first == list(mutants.draw("trace", random.Random(2), 5))
    assert len({mutant.source for mutant in first}) == 5
    verdicts = ["killed", "survived", "undecided", "killed", "invalid"]
    results = tmp_path / "results.jsonl"
    records = [
        {"where": mutant.where, "change": mutant.change, "verdict": verdict}
        for mutant, verdict in zip(first, verdicts, strict=True)
    ]
    results.write_text("\n".join(map(json.dumps, records)))
    assert list(mutants.read_mutants(results)) == [first[1], first[2], first[4]]


def test_a_frozen_list_holds_patches_that_apply(tmp_path):
    first, frozen = list(mutants.draw("core", random.Random(2), 4)), tmp_path / "frozen.jsonl"
    mutants.freeze(iter(first), frozen)
    assert list(mutants.read_mutants(frozen)) == first
    for line, mutant in zip(frozen.read_text().splitlines(), first, strict=True):
        copied = tmp_path / mutant.module.relative_to(mutants.ROOT)
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_text(mutant.module.read_text())
        patch = json.loads(line)["patch"]
        subprocess.run(["git", "apply", "-"], input=patch, text=True, cwd=tmp_path, check=True)
        assert copied.read_text() == mutant.source


def test_a_mutant_is_installed_in_a_loaded_module(tmp_path, monkeypatch):
    module = tmp_path / "mutated_module.py"
    module.write_text(
        "class Pair:\n    def add(self, a, b):\n        return a + b\n    def two(self):\n        return 0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import mutated_module

    pair, add = mutated_module.Pair(), mutated_module.Pair.add
    mutant = mutants.Mutant(module, 3, "add", "", module.read_text().replace("a + b", "a - b"))
    assert mutants.install(mutant)
    assert (pair.add(3, 2), add(pair, 3, 2), pair.two()) == (1, 1, 0)
    other = tmp_path / "not_loaded.py"
    other.write_text("def f(): return 0")
    assert not mutants.install(mutant._replace(module=other, source="def f(): return 1"))


def fake_test(name):
    return SimpleNamespace(nodeid=f"{name}::test", path=mutants.ROOT / name)


def test_recorded_tests_of_the_function_run_first_then_those_of_the_module(tmp_path):
    names = {
        "slow": "tests/unit/api/test_stream.py",
        "quick": "tests/unit/kv_cache/test_paged.py",
        "elsewhere": "tests/unit/kv_cache/test_dense.py",
        "shared": "tests/contracts/test_caches.py",
        "unrecorded": "tests/unit/models/test_rope.py",
        "like": "tests/unit/kv_cache/test_block_pool.py",
        "another room's": "tests/contracts/test_marks.py",
    }
    written = "kv_cache/blocks/block_pool.py:allocate"
    records = [
        {"test": f"{names['slow']}::test", "seconds": 3, "calls": [written]},
        {"test": f"{names['quick']}::test", "seconds": 1, "calls": [written]},
        {"test": f"{names['elsewhere']}::test", "seconds": 0, "calls": ["kv_cache/stores/dense.py:allocate"]},
        {"test": f"{names['shared']}::test", "seconds": 2, "calls": [], "fixtures": [written]},
    ]
    calls = tmp_path / "calls.jsonl"
    calls.write_text("\n".join(map(json.dumps, records)))
    tests = mutants.TestMap([fake_test(name) for name in names.values()], calls)
    mutant = mutants.Mutant(mutants.SOURCE / "kv_cache" / "blocks" / "block_pool.py", 9, "allocate", "", "")
    found = [item.nodeid.removesuffix("::test") for item in tests.tests(mutant)]
    assert found == [names[one] for one in ("quick", "shared", "slow", "like", "unrecorded")]


def test_every_contract_is_a_file():
    names = {name for contracts in mutants.CONTRACTS.values() for name in contracts}
    assert all((mutants.TESTS / "contracts" / f"test_{name}.py").exists() for name in names)
