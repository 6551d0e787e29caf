"""Fast paths: which are on, why others are off, and the switch of packed forwards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import descant
from descant import GenerationConfig, InputError, Request, Session
from descant.config.compile_config import CompileConfig
from descant.kv_cache.stores.dense import DenseStore, StaticStore
from descant.kv_cache.stores.paged import PagedStore
from descant.models.fast_paths import FastPath, fast_paths
from descant.models.transformers_model import TransformersModel
from descant.testing import toy


def by_name(model: Any, cache: Any = None) -> dict[str, FastPath]:
    return {path.name: path for path in fast_paths(model, cache)}


@pytest.fixture
def model() -> Any:
    return toy()


def test_a_plain_model_has_all_but_what_must_be_asked_for(model):
    paths = by_name(model)
    assert [name for name, path in paths.items() if path.is_on] == [
        "packed forwards",
        "grouped query heads",
        "shared prefixes",
    ]
    assert "4 query heads read 2 key heads" in paths["grouped query heads"].detail
    assert all(path.detail and path.switch for path in paths.values())
    assert by_name(TransformersModel(model)) == paths


@pytest.mark.parametrize(
    ("cache", "on"),
    [
        (DenseStore(), {"packed forwards", "grouped query heads"}),
        (PagedStore(), {"packed forwards", "grouped query heads", "shared prefixes"}),
        (StaticStore(16), set()),
        (StaticStore(16, compile_config=CompileConfig()), {"compiled step"}),
    ],
)
def test_they_depend_on_the_cache(model, cache, on):
    assert {name for name, path in by_name(model, cache).items() if path.is_on} == on


def test_attention_decides(model):
    model.set_attn_implementation("eager")
    paths = by_name(model)
    assert not any(path.is_on for path in paths.values())
    assert paths["packed forwards"].detail == "its attention is eager, not sdpa"
    assert paths["shared prefixes"].detail == "its attention is eager, not sdpa"
    assert paths["grouped query heads"].detail == "rows are not packed"


def test_heads_of_their_own_are_not_grouped(tiny):
    assert by_name(tiny("gpt2").model)["grouped query heads"].detail == (
        "every query head has a key head of its own"
    )


def test_an_encoder_is_a_reason(tiny):
    paths = by_name(tiny("bart").model)
    assert not any(path.is_on for path in paths.values())
    assert "has an encoder" in paths["compiled step"].detail


def test_prepacked_weights_are_seen(monkeypatch):
    model = toy(vocab_size=2**12)  # the output layer is large enough
    assert not by_name(model)["prepacked weights"].is_on
    with descant.prepack_weights(model):
        path = by_name(model)["prepacked weights"]
        assert (path.is_on, path.detail[:15]) == (True, "1 linear layers")
    assert not by_name(model)["prepacked weights"].is_on
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert by_name(model)["prepacked weights"].detail == "torch has no MKL or no oneDNN"


def test_reasons_against_prepacked_weights(model):
    assert by_name(model)["prepacked weights"].detail == "the weights are too small to gain from it"
    large = toy(vocab_size=2**12)
    assert "float32 weights on the CPU" in by_name(large.bfloat16())["prepacked weights"].detail
    assert by_name(large.to("meta"))["prepacked weights"].detail == "the weights are not loaded"


def test_a_model_without_a_network_has_none():
    assert fast_paths(SimpleNamespace(traits=None, network=None)) == []


# ------------------------------------------------------------------------ the switch
def new_tokens(model: Any) -> list[list[int]]:
    """The tokens of ragged prompts by generate, stream and a session."""
    lengths = (3, 40, 21)
    ids = torch.zeros(3, 40, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, 40 - length :] = torch.arange(length) % 50 + 3
        mask[row, 40 - length :] = 1
    made = descant.generate(model, input_ids=ids, attention_mask=mask, max_new_tokens=6)
    streamed = list(descant.stream(model, input_ids=ids, attention_mask=mask, max_new_tokens=6))
    session = Session(model)
    config = GenerationConfig(max_new_tokens=6)
    session.admit(*(Request(row[part.bool()], config) for row, part in zip(ids, mask, strict=True)))
    ended = [event for event in session.drain() if isinstance(event, descant.Finished)]
    rows = [[token for one in streamed if one.row == row for token in one.token_ids] for row in range(3)]
    assert rows == made[:, 40:].tolist()
    by_request = {event.request: event.hypotheses[0].tokens.tolist() for event in ended}
    assert [by_request[index] for index in range(3)] == made[:, 40:].tolist()
    return rows


def test_packed_forwards_on_and_off_give_the_same_tokens(model, monkeypatch):
    monkeypatch.setattr("descant.models.forward.batches._MIN_PACKED_READ", 0)
    packed: list[int] = []
    run = TransformersModel._run_packed

    def counted(self: Any, *given: Any) -> Any:
        packed.append(1)
        return run(self, *given)

    monkeypatch.setattr(TransformersModel, "_run_packed", counted)
    on = new_tokens(model)
    assert len(packed) >= 3 * 6
    packed.clear()
    model.packed_forwards = False
    assert by_name(model)["packed forwards"].detail == "`model.packed_forwards` is False"
    assert new_tokens(model) == on
    assert packed == []
    model.packed_forwards = True
    assert by_name(model)["packed forwards"].is_on


def test_the_switch_is_a_bool(model):
    model.packed_forwards = "no"
    with pytest.raises(InputError, match=r"`model\.packed_forwards` must be True or False, got 'no'"):
        Session(model)
