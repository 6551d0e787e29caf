"""`python -m tools.mutants`: what is changed, and which tests run."""

from __future__ import annotations

import ast
import random

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


def test_a_call_is_left_out_and_a_name_is_not_changed():
    call, name = ast.parse("f(x)\ny").body
    assert isinstance(mutants.mutate(call), ast.Pass)
    assert mutants.mutate(name.value) is None


def test_a_mutant_differs_in_one_place_and_parses(tmp_path):
    module = tmp_path / "module.py"
    lines = [
        "def f(a: int = 1) -> int:",
        '    """é"""',
        "    assert a > 0",
        "    return a + 2 if a < 5 else a",
    ]
    module.write_text("\n".join(lines))
    original = ast.unparse(ast.parse(module.read_text()))
    found = {mutants.draw(module, random.Random(seed)).source for seed in range(40)}
    assert len(found) == 5  # 2, 5, +, <, and the conditional; neither the assertion nor the default
    assert original not in {ast.unparse(ast.parse(source)) for source in found}


def test_a_module_without_code_has_no_mutant(tmp_path):
    module = tmp_path / "module.py"
    module.write_text("LIMIT = 3\n")
    assert mutants.draw(module, random.Random(0)) is None


def test_the_tests_of_a_module_come_first():
    files = mutants.test_files(mutants.SOURCE / "kv_cache" / "paged.py")
    assert files[0] == mutants.TESTS / "unit" / "kv_cache" / "test_paged.py"
    assert mutants.TESTS / "contracts" / "test_caches.py" in files
    assert all(path.exists() for path in files)
