"""The import of a recipe: from memory, once, privately, whole or not at all."""

from __future__ import annotations

import importlib
import inspect
import linecache
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from descant.errors import RecipeError
from descant.recipes.loading import PACKAGE_PREFIX, import_recipe
from descant.recipes.recipe_files import RecipeFiles


def contents(generate: str, **others: str) -> RecipeFiles:
    files = {"generate.py": generate, **{f"{name}.py": text for name, text in others.items()}}
    return RecipeFiles.from_files({name: text.encode() for name, text in files.items()}, "mine")


OTHERS: set[str] = set()  # what other tests have left in this process


def ours() -> set[str]:
    return {name for name in sys.modules if name.startswith(PACKAGE_PREFIX)} - OTHERS


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    OTHERS.update(ours())
    yield
    for name in ours():
        del sys.modules[name]
    OTHERS.clear()


class State:
    """What an import must leave as it was."""

    def __init__(self) -> None:
        self.path, self.hooks = list(sys.path), list(sys.path_hooks)
        self.finders, self.modules = list(sys.meta_path), set(sys.modules)
        self.cache = set(sys.path_importer_cache)

    def check(self) -> None:
        assert sys.path == self.path
        assert sys.path_hooks == self.hooks
        assert sys.meta_path == self.finders


def test_the_names_of_generate() -> None:
    names = import_recipe(contents("def generate(model): return 5\nother = 3"), "mine")
    assert names["generate"](None) == 5
    assert names["other"] == 3
    assert names["__name__"].startswith(PACKAGE_PREFIX)
    assert names["__name__"].endswith(".generate")
    assert names["__doc__"] is None


def test_modules_see_each_other_by_relative_imports_only() -> None:
    before = State()
    names = import_recipe(
        contents(
            "from .other import two\nfrom . import third\n"
            "def generate(model):\n    from .late import four\n    return two, third.three, four",
            other="from .third import three\ntwo = three - 1",
            third="three = 3",
            late="four = 4",
        ),
        "mine",
    )
    assert names["generate"](None) == (2, 3, 4)
    before.check()
    new = set(sys.modules) - before.modules
    assert all(name.startswith(PACKAGE_PREFIX) for name in new)
    for bare in ("generate", "other", "third", "late"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(bare)


def test_modules_that_import_each_other() -> None:
    names = import_recipe(
        contents(
            "from . import one\ndef generate(model): return one.get(), one.two.get()",
            one="from . import two\ndef get(): return two.value",
            two="from . import one\nvalue = 2\ndef get(): return one.get()",
        ),
        "mine",
    )
    assert names["generate"](None) == (2, 2)


def test_a_sibling_runs_only_when_it_is_imported(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    got = contents("def generate(model): ...", unused=f"open({str(canary)!r}, 'w').close()\nraise ValueError")
    names = import_recipe(got, "mine")
    for module in list(sys.modules.values()):  # what many a library does
        hasattr(module, "__file__")
    inspect.getmodule(names["generate"])
    assert not canary.exists()


def test_the_same_content_is_imported_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    text = f"with open({str(log)!r}, 'a') as log: log.write('x')\ndef generate(model): ..."
    first = import_recipe(contents(text), "mine")
    package = sys.modules[first["__package__"]]
    assert import_recipe(contents(text), "a copy") is first
    assert sys.modules[first["__package__"]] is package
    assert log.read_text() == "x"
    third = import_recipe(contents(text + "\n"), "mine")
    assert third["generate"] is not first["generate"]
    assert log.read_text() == "xx"


def test_threads_import_it_once_and_see_it_whole() -> None:
    text = "import threading, time\ntime.sleep(0.3)\ncount = object()\ndef generate(model): ..."
    got, start = contents(text), threading.Barrier(8)
    found: list[Mapping[str, Any]] = []

    def load() -> None:
        start.wait()
        names = import_recipe(got, "mine")
        found.append({"count": names["count"], "generate": names["generate"]})

    threads = [threading.Thread(target=load) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(found) == 8
    assert len({id(one["count"]) for one in found}) == 1


def test_one_recipe_may_load_another_from_a_thread_while_it_is_imported() -> None:
    inner = contents("def generate(model): return 'inner'")
    sys.modules["_test_inner"] = inner  # type: ignore[assignment]
    try:
        text = (
            "import sys, threading\nfrom descant.recipes.loading import import_recipe\ngot = []\n"
            "def load(): got.append(import_recipe(sys.modules['_test_inner'], 'inner'))\n"
            "thread = threading.Thread(target=load, daemon=True); thread.start(); thread.join(10)\n"
            "def generate(model): return got[0]['generate'](model)"
        )
        assert import_recipe(contents(text), "outer")["generate"](None) == "inner"
    finally:
        del sys.modules["_test_inner"]


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("1 / 0", ZeroDivisionError),
        ("raise SystemExit(3)", SystemExit),
        ("import sys; sys.exit()", SystemExit),
        ("raise GeneratorExit", GeneratorExit),
        ("class Odd(BaseException): ...\nraise Odd", BaseException),
        ("import no_such_module_anywhere", ModuleNotFoundError),
        ("from .absent import x", ModuleNotFoundError),
        ("from .other import absent", ImportError),
        ("from .bad import x", ValueError),
        ("class Odd(Exception):\n    def __repr__(self): raise KeyError\nraise Odd", Exception),
        ("raise ValueError('line\\nline ' + 'x' * 5000)", ValueError),
        ("import sys; del sys.modules[__name__]", KeyError),
        ("import sys; sys.modules[__name__] = 5", TypeError),
        ("raise RuntimeError('\\x1b[2J')", RuntimeError),
    ],
)
def test_a_failure_is_one_line_and_leaves_nothing(text: str, cause: type[BaseException]) -> None:
    before = State()
    got = contents(
        text + "\ndef generate(model): ...", other="from . import third", bad="raise ValueError", third=""
    )
    for _ in range(2):  # also the second time
        with pytest.raises(RecipeError) as error:
            import_recipe(got, "mine")
        assert isinstance(error.value.__cause__, cause)
        assert error.value.recipe == "mine"
        message = str(error.value)
        assert message.startswith("recipe `mine`: its import failed: ")
        assert message.isprintable()
        assert len(message) < 350
        assert PACKAGE_PREFIX not in message
    assert not ours()
    before.check()
    assert set(sys.path_importer_cache) == before.cache


def test_an_interrupt_stays_one_and_leaves_nothing() -> None:
    before = State()
    with pytest.raises(KeyboardInterrupt):
        import_recipe(contents("raise KeyboardInterrupt\ndef generate(model): ..."), "mine")
    assert not ours()
    assert set(sys.path_importer_cache) == before.cache


def test_tracebacks_show_lines() -> None:
    names = import_recipe(
        contents("def generate(model):\n    return model.no_such_thing  # here", helper=""), "ann/rec"
    )
    with pytest.raises(AttributeError) as error:
        names["generate"](None)
    told = "".join(traceback.format_exception(error.value))
    assert 'File "recipe:ann/rec/generate.py", line 2, in generate' in told
    assert "return model.no_such_thing  # here" in told
    linecache.checkcache()
    assert inspect.getsource(names["generate"]).startswith("def generate(model):")
    assert inspect.getmodule(names["generate"]) is sys.modules[names["__name__"]]


def test_a_name_with_control_characters_stays_off_the_terminal() -> None:
    names = import_recipe(contents("def generate(model): ..."), "od\x1b[2Jd\n")
    assert names["__spec__"].origin == "recipe:od?[2Jd?/generate.py"


def test_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "pyc"))
    monkeypatch.chdir(tmp_path)
    import_recipe(contents("from . import other\ndef generate(model): ...", other=""), "mine")
    assert list(tmp_path.iterdir()) == []


def test_late_imports_outlive_invalidated_caches() -> None:
    text = "def generate(model):\n    from .late import four\n    return four"
    names = import_recipe(contents(text, late="four = 4"), "mine")
    importlib.invalidate_caches()
    assert names["generate"](None) == 4


def test_an_empty_init_is_no_module() -> None:
    got = contents("from . import other\ndef generate(model): return other.x", other="x = 1", __init__="")
    names = import_recipe(got, "mine")
    assert names["generate"](None) == 1
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{names['__package__']}.__init__")


def test_a_coding_cookie_is_ignored() -> None:
    """What was looked over as UTF-8 runs as UTF-8."""
    text = "# coding: utf-7\nword = '+AGE-é'\ndef generate(model): ..."
    unchecked: Any = SimpleNamespace(digest="sha256:" + "d" * 64, modules={"generate": text.encode()})
    assert import_recipe(unchecked, "mine")["word"] == "+AGE-é"


def test_a_recipe_that_loads_itself_ends() -> None:
    """With an error of its own, not by waiting for itself."""
    text = (
        "import sys\nfrom descant.recipes.loading import import_recipe\n"
        "half = import_recipe(sys.modules['_test_self'], 'mine')\n"
        "done = 'generate' in half\ndef generate(model): return done"
    )
    got = contents(text)
    sys.modules["_test_self"] = got  # type: ignore[assignment]
    try:
        start = time.monotonic()
        assert import_recipe(got, "mine")["generate"](None) is False
        assert time.monotonic() - start < 5
    finally:
        del sys.modules["_test_self"]
