"""Forwards that are launched before the tokens of the last step are read: the same events as without."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM

import descant
from bench.fake_devices import FIRST, placed, pretended
from descant import GenerationConfig, Request, SchedulerConfig, Session
from descant.testing import toy

VOCAB = 61
POISON = 13  # a token on which the network of `poisoned` raises

METHODS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "seed": 3, "top_p": 0.9, "temperature": 1.3},
    "unseeded": {"do_sample": True},
    "two sequences": {"do_sample": True, "seed": 5, "num_return_sequences": 2},
    "penalties": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "presence_penalty": 0.4},
    "mirostat": {"do_sample": True, "seed": 1, "mirostat_tau": 3.0},
    "watermark": {
        "do_sample": True,
        "seed": 2,
        "watermarking_config": descant.WatermarkingConfig(hashing_key=7_919),
    },
    "guidance": {"guidance_scale": 1.6},
    "DoLa": {"dola_layers": "low"},
    "log probabilities": {"logprobs": 2},
    "beams": {"num_beams": 3},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 3},
    "lookup": {"prompt_lookup_num_tokens": 2},
}


class Raising:
    """A processor that raises at its third token."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] >= 7:
            raise ValueError("the processor of this request is broken")
        return scores


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return toy(VOCAB)


@pytest.fixture(scope="module")
def poisoned() -> Any:
    torch.manual_seed(0)
    network = toy(VOCAB)

    def refuse(module: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        if bool((ids == POISON).any()):
            raise RuntimeError("the network cannot read this token")

    network.model.embed_tokens.register_forward_pre_hook(
        lambda module, args: refuse(module, args, {"input_ids": args[0]})
    )
    return network


def request(chance: random.Random, method: str, **fields: Any) -> Request:
    prompt = [chance.choice([token for token in range(3, VOCAB) if token != POISON]) for _ in range(4)]
    config = {"max_new_tokens": chance.randint(1, 14), "eos_token_id": [7, 9], **METHODS[method]}
    if method == "contrastive":
        config["max_new_tokens"] = max(2, config["max_new_tokens"])
    return Request(prompt[: chance.randint(2, 4)], GenerationConfig(**config), **fields)


def outcome(session: Session, seed: int, *, with_faults: bool) -> list[str]:
    """What a random schedule of requests, cancellations and faults returns, step by step."""
    chance, events, running = random.Random(seed), [], []
    torch.manual_seed(seed)
    methods = list(METHODS)
    for step in range(14):
        if step < 6 and chance.random() < 0.6:
            # Not beside others: which of torch's numbers a row gets depends on the requests of its call.
            method = chance.choice([name for name in methods if name != "unseeded" or not len(session)])
            own = {"logits_processor": [Raising()]} if with_faults and chance.random() < 0.3 else {}
            if method in ("beams", "contrastive", "lookup"):
                own = {}
            running += session.admit(request(chance, method, **own))
        if running and chance.random() < 0.1 and running[-1] in set(session.running):
            session.cancel(running.pop())
        events += [f"{step}: {describe(event)}" for event in session.step()]
    return events + [describe(event) for event in session.drain()]


def describe(event: Any) -> str:
    if isinstance(event, descant.Finished):
        return f"{event.request} {[(each.tokens.tolist(), each.reason) for each in event.hypotheses]}"
    if isinstance(event, descant.Failed):
        return f"{event.request} failed: {event.error.__cause__}"
    return f"{event.request.tolist()} {event.slot.tolist()} {event.token.tolist()}"


@pytest.mark.parametrize("with_faults", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_a_schedule_has_the_same_events_with_and_without_overlap(
    model: Any, seed: int, with_faults: bool
) -> None:
    direct = outcome(Session(model, overlap=False), seed, with_faults=with_faults)
    assert outcome(Session(model, overlap=True), seed, with_faults=with_faults) == direct


@pytest.mark.parametrize("seed", range(6))
def test_a_network_that_raises_harms_only_its_request(poisoned: Any, seed: int) -> None:
    direct = outcome(Session(poisoned, overlap=False), seed, with_faults=True)
    assert outcome(Session(poisoned, overlap=True), seed, with_faults=True) == direct


PARTS: Mapping[str, Callable[[], Mapping[str, Any]]] = {
    "prefix cache": lambda: {"prefix_cache": descant.PrefixCache()},
    "scheduler": lambda: {"scheduler": SchedulerConfig(max_running_rows=3)},
    "chunked prefill": lambda: {"scheduler": SchedulerConfig(chunk_tokens=4)},
    "small pool": lambda: {"scheduler": SchedulerConfig(num_blocks=14, block_size=4)},
    "states": lambda: {"states": ["hidden_states"]},
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("method", ["greedy", "sampling", "two sequences"])
def test_a_session_with_other_parts_has_the_same_events(model: Any, part: str, method: str) -> None:
    found = []
    for overlap in (False, True):
        chance, session = random.Random(4), Session(model, overlap=overlap, **PARTS[part]())
        session.admit(*(request(chance, method) for _ in range(5)))
        found.append([describe(event) for event in session.drain()])
    assert found[0] == found[1]


@pytest.mark.parametrize("cache", ["dynamic", "paged", "static", "quantized", "snapkv", "sink"])
def test_every_cache_gives_the_same_tokens_and_the_same_keys(model: Any, cache: str) -> None:
    found = []
    for overlap in (False, True):
        session = Session(model, overlap=overlap)
        config = GenerationConfig(max_new_tokens=9, cache_implementation=cache, eos_token_id=7)
        wants_keys = cache in ("dynamic", "paged")
        session.admit(
            *(Request([3 + row, 5, 6, 4], config, return_past_key_values=wants_keys) for row in range(4))
        )
        ended = sorted(
            (event for event in session.drain() if isinstance(event, descant.Finished)),
            key=lambda event: event.request,
        )
        kept = [row for event in ended for row in event.past_key_values]
        keys = [row.store.read(0, torch.tensor([row.row]))[0][:, :, : row.length] for row in kept]
        found.append(([describe(event) for event in ended], keys))
    assert found[0][0] == found[1][0]
    assert len(found[0][1]) == (4 if wants_keys else 0)
    torch.testing.assert_close(found[0][1], found[1][1])


def test_the_tokens_of_a_device_are_read_after_the_next_forward_is_launched() -> None:
    order: list[str] = []
    torch.manual_seed(0)
    with pretended():
        network = placed(toy(VOCAB), lambda _: FIRST)
        network.register_forward_pre_hook(lambda *_: order.append("forward"))
        session = Session(network)
        [request_id] = session.admit(
            Request([5, 6, 4], GenerationConfig(max_new_tokens=4, eos_token_id=None))
        )
        tokens = [order.append("token") or event for event in session.drain()]
        direct = Session(network, overlap=False)
        direct.admit(Request([5, 6, 4], GenerationConfig(max_new_tokens=4, eos_token_id=None)))
        again = list(direct.drain())
    assert order[:5] == ["forward", "forward", "token", "forward", "token"]
    assert [describe(event) for event in tokens] == [describe(event) for event in again]
    assert request_id == 0


def test_a_model_whose_forward_cannot_be_repeated_is_not_fed_early() -> None:
    config = MambaConfig(vocab_size=VOCAB, hidden_size=16, state_size=4, num_hidden_layers=1)
    with pytest.raises(descant.InputError, match="`overlap` must be False or None: a forward of Mamba"):
        Session(MambaForCausalLM(config), overlap=True)
