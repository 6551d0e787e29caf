"""Models inside the wrappers of other libraries decode as the bare model does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import descant
from descant.testing import toy

IDS = torch.tensor([[5, 17, 29, 41, 53, 55], [0, 0, 7, 9, 11, 13]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
CALL = {"attention_mask": MASK, "max_new_tokens": 10, "pad_token_id": 0}


@pytest.fixture(scope="module")
def model() -> Any:
    return toy()


@pytest.fixture(scope="module")
def expected(model: Any) -> torch.Tensor:
    """What the bare model's own generate() returns."""
    return model.generate(IDS, do_sample=False, **CALL)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of one."""
    file = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_compiled_model_runs(model: Any, expected: torch.Tensor) -> None:
    compiled: Any = torch.compile(model)
    assert torch.equal(descant.generate(compiled, IDS, **CALL), expected)
    assert torch.equal(descant.attach(compiled).generate(IDS, **CALL), expected)


def test_a_model_compiled_in_place_runs(expected: torch.Tensor) -> None:
    model = toy()
    model.compile()
    assert torch.equal(descant.generate(model, IDS, **CALL), expected)


def test_data_parallel_runs(model: Any, expected: torch.Tensor) -> None:
    wrapped = nn.DataParallel(model)
    assert torch.equal(descant.generate(wrapped, IDS, **CALL), expected)
    assert torch.equal(descant.attach(wrapped).generate(IDS, **CALL), expected)


def test_the_defaults_are_those_of_the_model_inside() -> None:
    wrapped, request = nn.DataParallel(toy()), descant.Request(IDS[0])
    wrapped.module.generation_config.max_new_tokens = 3
    session = descant.Session(wrapped)
    session.admit(request)
    while len(session):
        events = session.step()
    assert len(events[-1].hypotheses[0].tokens) == 3


@pytest.mark.usefixtures("one_process")
def test_distributed_data_parallel_runs(model: Any, expected: torch.Tensor) -> None:
    wrapped = nn.parallel.DistributedDataParallel(model)
    assert torch.equal(descant.generate(wrapped, IDS, **CALL), expected)


@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning")
def test_fully_sharded_data_parallel_runs_in_a_call(expected: torch.Tensor) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    wrapped: Any = FullyShardedDataParallel(toy(), device_id=torch.device("cpu"))
    assert torch.equal(descant.generate(wrapped, IDS, **CALL), expected)
    assert torch.equal(descant.attach(wrapped).generate(IDS, **CALL), expected)
    for refused in (descant.Session, lambda one: descant.stream(one, IDS)):
        with pytest.raises(descant.UnsupportedModel, match=r"FullyShardedDataParallel.*descant\.generate"):
            refused(wrapped)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_model_prepared_by_accelerate_runs(precision: str) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    before = dict(os.environ)
    AcceleratorState._reset_state(True)
    try:
        prepared = Accelerator(cpu=True, mixed_precision=precision).prepare(toy())
        expected = prepared.generate(IDS, do_sample=False, **CALL)
        assert torch.equal(descant.generate(prepared, IDS, **CALL), expected)
    finally:
        AcceleratorState._reset_state(True)
        os.environ.clear()
        os.environ.update(before)


def test_wrappers_nest_and_serve_every_entry(model: Any, expected: torch.Tensor) -> None:
    wrapped: Any = nn.DataParallel(torch.compile(model))
    events = list(descant.stream(wrapped, IDS, **CALL))
    tokens = [token for event in events if event.row == 0 for token in event.token_ids]
    assert tokens == expected[0, IDS.shape[1] :].tolist()
    cache = descant.prefill(wrapped, IDS[:1])
    whole = torch.cat((IDS[:1], expected[:1, 6:7]), 1)
    assert torch.equal(
        descant.generate(wrapped, whole, past_key_values=cache, max_new_tokens=9), expected[:1]
    )
    assert descant.estimate(wrapped, prompt_length=4).rows == 1
    drafted = descant.generate(model, IDS, assistant_model=wrapped, **CALL)
    assert torch.equal(drafted, expected)
