"""No pickle anywhere: the source names no road to unpickling, and the suite is watched for one."""

from __future__ import annotations

import importlib.util
import io
import multiprocessing
import pickle
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from descant.api.generate import generate
from descant.decoding.processors.base import LogitsProcessor
from tests import conftest
from tests.security import scan, watch

ROOT = Path(__file__).parents[2]


def _pickle_calls(files: list[Path], weights_only: bool = False) -> list[str]:
    assert len(files) > 10  # the folders are where they are thought to be
    return [
        f"{file.relative_to(ROOT)} {what}"
        for file in files
        for what in scan.findings(file.read_text(encoding="utf-8"), weights_only)
    ]


def test_the_library_names_no_road_to_unpickling() -> None:
    assert _pickle_calls(scan.files(ROOT / "src")) == []


def test_scripts_and_measurements_read_weights_only() -> None:
    assert _pickle_calls(scan.files(ROOT / "tools", ROOT / "bench"), weights_only=True) == []


ROADS = [
    "import pickle",
    "import pickle as p",
    "import os, dill",
    "import cloudpickle.cloudpickle",
    "from pickle import loads",
    "from pickle import Unpickler as Reader",
    "from joblib import load",
    "import shelve",
    "import marshal",
    "import _pickle",
    "from multiprocessing import connection",
    "import torch\ntorch.load(f)",
    "import torch\ntorch.load(f, weights_only=False)",
    "import torch\ntorch.load(f, weights_only=yes)",
    "import torch\nread = torch.load\nread(f)",
    "import torch as t\nt.load(f)",
    "import torch as t\nu = t\nu.load(f)",
    "from torch import load",
    "from torch import load as read\nread(f)",
    "from torch import serialization",
    "import torch.serialization as s\ns.load(f)",
    "import torch\ntorch.serialization.load(f)",
    "import torch\ntorch.jit.load(f)",
    "from torch.hub import load_state_dict_from_url",
    "import torch.distributed as dist\ndist.broadcast_object_list(x)",
    "import numpy\nnumpy.load(f)",
    "import numpy as np\nnp.load(f, allow_pickle=True)",
    "from numpy import load",
    "f(allow_pickle=True)",
    "f(**{'allow_pickle': True})",
    "__import__('pickle')",
    "from importlib import import_module\nimport_module('pickle').loads(x)",
    "import sys\nsys.modules['pickle'].loads(x)",
    "import torch\ngetattr(torch, 'load')(f)",
    "import torch as t\ngetattr(t, 'load')(f)",
    "import operator\noperator.attrgetter('load')(module)(f)",
    "import pandas as pd\npd.read_pickle(f)",
    "import yaml\nyaml.load(f)",
    "class Mine(Unpickler): ...",
    "class Mine:\n    def find_class(self, module, name): ...",
    "def lazy():\n    if True:\n        from dill import loads",
    "from transformers.modeling_utils import load_state_dict",
]


@pytest.mark.parametrize("source", ROADS)
def test_the_scan_finds_every_road(source: str) -> None:
    assert scan.findings(source)
    assert scan.findings(source, weights_only=True)


def test_the_scan_lets_pass_what_does_not_unpickle() -> None:
    harmless = "import json, torch\njson.loads(x)\nmodel.load(f)\ntorch.save(x, f)\nstate.load_state_dict(x)"
    assert scan.findings(harmless) == []
    assert scan.findings("import torch\ntorch.load(f, weights_only=True)", weights_only=True) == []
    assert scan.findings("import torch\ntorch.load(f, weights_only=True)")


# ------------------------------------------------------------------------ the watch
@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """A module that the watch takes for one of Descant's, and that calls what it is given."""
    source = tmp_path / "descant" / "caller.py"
    source.parent.mkdir()
    source.write_text(
        "def call(function, *given, **named):\n    return function(*given, **named)\n", encoding="utf-8"
    )
    spec = importlib.util.spec_from_file_location("caller", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(watch, "SOURCE", f"{source.parent}/")
    watch.settle()
    yield module
    watch.found.clear()


def _object_array() -> io.BytesIO:
    file = io.BytesIO()
    np.save(file, np.array([OrderedDict()], dtype=object), allow_pickle=True)
    file.seek(0)
    return file


def _saved(**options: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save({"a": torch.ones(2)}, file, **options)
    file.seek(0)
    return file


UNPICKLING: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "loads": lambda call: call(pickle.loads, pickle.dumps(OrderedDict())),
    "load": lambda call: call(pickle.load, io.BytesIO(pickle.dumps(OrderedDict()))),
    "protocol 0": lambda call: call(pickle.loads, pickle.dumps(OrderedDict(), protocol=0)),
    "in Python": lambda call: call(pickle._loads, pickle.dumps(OrderedDict())),  # type: ignore[attr-defined]
    "numpy": lambda call: call(np.load, _object_array(), allow_pickle=True),
    "torch": lambda call: call(torch.load, _saved(), weights_only=False),
    "torch, weights only": lambda call: call(torch.load, _saved(), weights_only=True),
    "torch, before zip": lambda call: call(torch.load, _saved(_use_new_zipfile_serialization=False)),
    "torch.serialization": lambda call: call(torch.serialization.load, _saved()),
}


@pytest.mark.parametrize("road", UNPICKLING)
def test_the_watch_sees_what_descant_unpickles(inside: types.ModuleType, road: str) -> None:
    UNPICKLING[road](inside.call)
    with pytest.raises(pytest.fail.Exception, match=r"under caller\.py:2"):
        watch.settle()
    watch.settle()  # and it is reported once


def test_the_watch_sees_other_threads(inside: types.ModuleType) -> None:
    text = pickle.dumps(OrderedDict())
    thread = threading.Thread(target=lambda: inside.call(pickle.loads, text))
    thread.start()
    thread.join()
    with pytest.raises(pytest.fail.Exception, match="OrderedDict"):
        watch.settle()


def test_the_watch_leaves_alone_what_is_not_descants(inside: types.ModuleType) -> None:
    assert pickle.loads(pickle.dumps(OrderedDict())) == {}
    assert torch.load(_saved())["a"].sum() == 2
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # the answer comes through a pipe
        assert inside.call(pool.apply, OrderedDict) == {}
    assert inside.call(OrderedDict) == {}
    watch.settle()


def test_a_test_that_unpickles_in_descant_fails(tmp_path: Path) -> None:
    """The whole road: a run of its own under this suite's conftest."""
    (tmp_path / "test_it.py").write_text(
        "import pickle, collections\n"
        "from descant.config.fields import freeze\n"
        "class Sly(dict):\n"
        "    def __iter__(self):\n"
        "        pickle.loads(pickle.dumps(collections.OrderedDict()))\n"
        "        return super().__iter__()\n"
        "def test_sly(): freeze(Sly(a=1))\n"
        "def test_good(): freeze({'a': 1})\n",
        encoding="utf-8",
    )
    reports: dict[str, pytest.TestReport] = {}

    class Reports:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.when == "call":
                reports[report.nodeid.rpartition(":")[2]] = report

    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    without = [word for plugin in ("cacheprovider", "terminal", "xdist") for word in ("-p", f"no:{plugin}")]
    pytest.main([*without, "-s", str(tmp_path)], plugins=[conftest, Reports()])
    assert reports["test_good"].passed
    assert reports["test_sly"].failed
    assert "unpickled collections.OrderedDict under config/fields.py" in str(reports["test_sly"].longrepr)


def test_a_processor_of_the_users_is_watched_too(tiny: Any) -> None:
    class Pickling(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            pickle.loads(pickle.dumps(OrderedDict()))
            return scores

    model = tiny("llama").model
    generate(model, torch.tensor([[3, 4]]), max_new_tokens=2, logits_processor=[Pickling()])
    with pytest.raises(pytest.fail.Exception, match="OrderedDict"):
        watch.settle()
