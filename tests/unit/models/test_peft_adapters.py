"""PEFT adapters: the active one, and rows of different adapters in one batch."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PrefixTuningConfig, get_peft_model

import descant
from descant.testing import toy
from tests.support.random_t5 import random_t5

IDS = torch.tensor([[5, 17, 29, 41, 53, 55], [0, 0, 7, 9, 11, 13], [0, 4, 6, 8, 10, 12]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]])
CALL = {"attention_mask": MASK, "max_new_tokens": 10, "pad_token_id": 0}
NAMES = ("french", "german", "__base__")


def lora(*modules: str, rank: int = 4, **more: Any) -> LoraConfig:
    """A LoRA with random weights, whose effect is not zero."""
    targets = list(modules or ("q_proj", "v_proj"))
    return LoraConfig(r=rank, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM", **more)


def wrap(model: Any, config: Any) -> Any:
    """The model of PEFT with two adapters, german active."""
    torch.manual_seed(1)
    wrapped = get_peft_model(model, config, adapter_name="french")
    wrapped.add_adapter("german", lora("q_proj", "o_proj", rank=2))
    wrapped.set_adapter("german")
    return wrapped.eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return wrap(toy(), lora("q_proj", "v_proj", "up_proj", "lm_head"))


@pytest.fixture(scope="module")
def expected(model: Any) -> dict[str, torch.Tensor]:
    """What PEFT's own generate() returns, by adapter."""
    results = {}
    for name in NAMES[:2]:
        model.set_adapter(name)
        results[name] = model.generate(input_ids=IDS, do_sample=False, **CALL)
    with model.disable_adapter():
        results["__base__"] = model.generate(input_ids=IDS, do_sample=False, **CALL)
    assert len({tuple(one.flatten().tolist()) for one in results.values()}) == 3
    return results


def test_the_active_adapter_runs(model: Any, expected: dict[str, torch.Tensor]) -> None:
    for name in NAMES[:2]:
        model.set_adapter(name)
        assert torch.equal(descant.generate(model, IDS, **CALL), expected[name])
    with model.disable_adapter():
        assert torch.equal(descant.generate(model, IDS, **CALL), expected["__base__"])


def test_rows_of_a_batch_have_adapters_of_their_own(model: Any, expected: dict[str, torch.Tensor]) -> None:
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    mixed = descant.generate(model, IDS, adapter_names=list(NAMES), **CALL)
    assert all(torch.equal(mixed[row], expected[name][row]) for row, name in enumerate(NAMES))
    assert torch.equal(descant.generate(model, IDS, adapter_names="french", **CALL), expected["french"])
    rest = descant.generate(model, IDS, adapter_names=["french", None, None], **CALL)
    assert torch.equal(rest[1:], expected["german"][1:])
    assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks


@pytest.mark.parametrize(
    "fields",
    [
        {"num_beams": 3, "num_return_sequences": 2},
        {"guidance_scale": 1.5},
        {"prompt_lookup_num_tokens": 3},
        {"assistant_early_exit": 1},
        {"do_sample": True, "seed": 3, "top_k": 7},
        {"cache_implementation": "paged"},
        {"prefill_chunk_size": 2},
    ],
    ids=str,
)
def test_a_mixed_batch_is_the_batches_of_its_adapters(model: Any, fields: dict[str, Any]) -> None:
    mixed = descant.generate(model, IDS, adapter_names=list(NAMES), **CALL, **fields)
    each = len(mixed) // 3
    for row, name in enumerate(NAMES):
        alone = {**CALL, "attention_mask": MASK[row : row + 1], **fields}
        single = descant.generate(model, IDS[row : row + 1], adapter_names=name, **alone)
        part = mixed[row * each : (row + 1) * each]
        width = min(part.shape[1], single.shape[1])
        assert torch.equal(part[:, :width], single[:, :width])


def test_a_request_admitted_late_has_its_adapter(model: Any, expected: dict[str, torch.Tensor]) -> None:
    cache = descant.PrefixCache(block=2)
    session = descant.Session(model, prefix_cache=cache)
    config = descant.GenerationConfig(max_new_tokens=10)

    def request(row: int, name: str) -> descant.Request:
        return descant.Request(IDS[row][MASK[row].bool()], config, adapter_name=name)

    numbers, found = session.admit(request(0, "french")), {}
    session.step()
    numbers += session.admit(request(0, "german"), request(0, "__base__"))
    session.step()
    numbers += session.admit(request(0, "french"))
    while len(session):
        for event in session.step():
            if isinstance(event, descant.Finished):
                found[event.request] = event.hypotheses[0].tokens.tolist()
    for number, name in zip(numbers, (*NAMES, "french"), strict=True):
        assert found[number] == expected[name][0, 6 : 6 + len(found[number])].tolist()
    assert cache.report().hits == 1  # of the second french one: adapters share no prefix
    session.admit(descant.Request(IDS[0], config, cache_salt=b"\0adapter\0french"))
    assert cache.report().hits == 1  # a salt is no adapter


def ends(session: descant.Session) -> dict[int, list[int]]:
    """The tokens of all requests of a session."""
    finished = [event for event in session.drain() if isinstance(event, descant.Finished)]
    return {event.request: event.hypotheses[0].tokens.tolist() for event in finished}


@pytest.mark.parametrize("blocks", [None, 12], ids=["room", "preempted"])
@pytest.mark.parametrize("has_prefixes", [False, True], ids=["fresh", "prefixes"])
def test_chunks_are_read_with_the_adapter_of_their_request(
    model: Any, blocks: int | None, has_prefixes: bool
) -> None:
    """Beside rows of other adapters, which decode meanwhile, and again from the prefix cache."""
    model.set_adapter("german")
    config, names = descant.GenerationConfig(max_new_tokens=12), ("french", None, "__base__", "french")
    requests = [
        descant.Request((torch.arange(40) * (7 + place) + 3) % 50, config, adapter_name=name)
        for place, name in enumerate((*names, *names))
    ]
    expected = []
    for one in requests:
        session = descant.Session(model)
        session.admit(one)
        expected += ends(session).values()
    cache = descant.PrefixCache(block=8) if has_prefixes else None
    limits = descant.SchedulerConfig(chunk_tokens=8, num_blocks=blocks, block_size=8, headroom=0.0)
    session = descant.Session(model, scheduler=limits, prefix_cache=cache)
    for _ in range(2):
        numbers = session.admit(*requests)
        found = ends(session)
        assert [found[number] for number in numbers] == expected
    assert cache is None or blocks is not None or cache.report().hits >= len(requests)
    assert blocks is None or session.report().preemptions


@pytest.mark.parametrize("name", NAMES)
def test_prompts_are_scored_with_the_adapter_of_their_request(model: Any, name: str) -> None:
    model.set_adapter("german")
    prompt, config = torch.arange(5, 35), descant.GenerationConfig(max_new_tokens=10)
    with descant.AsyncEngine(model) as engine:
        request = descant.Request(prompt, config, adapter_name=name)
        alone = engine.submit(request).result()
        scored = engine.submit(replace(request, prompt_logprobs=0)).result()
    assert scored.hypotheses[0].tokens.tolist() == alone.hypotheses[0].tokens.tolist()
    with torch.no_grad(), ExitStack() as active:
        if name == "__base__":
            active.enter_context(model.disable_adapter())
        else:
            model.set_adapter(name)
        logprobs = model(prompt[None]).logits[0, :-1].log_softmax(-1)
    model.set_adapter("german")
    assert scored.prompt_logprobs is not None
    torch.testing.assert_close(scored.prompt_logprobs.raw, logprobs.gather(1, prompt[1:, None])[:, 0])


def test_another_active_adapter_drops_cached_prefixes(model: Any, expected: dict[str, torch.Tensor]) -> None:
    cache, prompt = descant.PrefixCache(block=2), IDS[:1]
    for name in ("french", "german", "german"):
        model.set_adapter(name)
        session = descant.Session(model, prefix_cache=cache)
        session.admit(descant.Request(prompt[0], descant.GenerationConfig(max_new_tokens=10)))
        while len(session):
            events = session.step()
        tokens = events[-1].hypotheses[0].tokens
        assert tokens.tolist() == expected[name][0, 6 : 6 + len(tokens)].tolist()
    assert cache.report().hits == 1


def test_a_cache_of_another_adapter_is_refused(model: Any) -> None:
    model.set_adapter("french")
    cache = descant.prefill(model, IDS[:1])
    model.set_adapter("german")
    with pytest.raises(descant.InputError, match="must be made by this model, whose adapters is"):
        descant.generate(model, IDS[:1], past_key_values=cache, max_new_tokens=2)
    session = descant.Session(model)
    with pytest.raises(descant.InputError, match="must be made by this model, whose adapters is"):
        session.admit(descant.Request(IDS[0], past_key_values=cache))
    model.set_adapter("french")
    call = {"past_key_values": cache, "max_new_tokens": 4, "min_new_tokens": 4}
    assert descant.generate(model, IDS[:1], adapter_names="french", **call).shape == (1, 10)
    with pytest.raises(descant.InputError, match="must be made with the adapter 'german', which is not"):
        descant.generate(model, IDS[:1], adapter_names="german", **call)


def test_an_encoder_runs_with_the_adapters_too() -> None:
    targets = {"target_modules": ["q", "v"], "init_lora_weights": False, "task_type": "SEQ_2_SEQ_LM"}
    model = get_peft_model(random_t5(), LoraConfig(r=4, **targets), adapter_name="french").eval()
    model.add_adapter("german", LoraConfig(r=4, **targets))
    call = {"attention_mask": MASK, "max_new_tokens": 8}
    mixed = descant.generate(model, IDS, adapter_names=list(NAMES), **call)
    theirs = model.generate(input_ids=IDS, adapter_names=list(NAMES), do_sample=False, **call)
    assert torch.equal(mixed, theirs)
    assert not torch.equal(mixed, descant.generate(model, IDS, **call))


@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute:UserWarning")
def test_models_of_transformers_own_adapters_take_names() -> None:
    model = toy()
    model.add_adapter(lora(), adapter_name="french")
    model.add_adapter(lora(), adapter_name="german")
    model.set_adapter("german")
    one = descant.generate(model, IDS, **CALL)
    assert torch.equal(descant.generate(model, IDS, adapter_names="german", **CALL), one)
    assert not torch.equal(descant.generate(model, IDS, adapter_names="french", **CALL), one)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            "italian",
            r"`adapter_name` must be one of 'french', 'german', or '__base__' for none, got 'italian'",
        ),
        (["french"], r"`adapter_names` must have a name for each of the 3 prompts"),
        (7, r"`adapter_names` must be a name, or a list with a name for each prompt"),
    ],
)
def test_wrong_names_are_refused(model: Any, names: Any, message: str) -> None:
    with pytest.raises(descant.InputError, match=message):
        descant.generate(model, IDS, adapter_names=names, **CALL)


def test_a_model_without_adapters_refuses_names() -> None:
    with pytest.raises(descant.InputError, match="must be None for a model without PEFT adapters"):
        descant.generate(toy(), IDS, adapter_names="french", **CALL)


def merged() -> Any:
    model = wrap(toy(), lora())
    model.merge_adapter()
    return model


def disabled() -> Any:
    model = wrap(toy(), lora())
    model.base_model.disable_adapter_layers()
    return model


def ia3() -> Any:
    config = IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM")
    return get_peft_model(toy(), config, adapter_name="french")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (merged, "has an adapter merged into its weights"),
        (disabled, "has its adapters disabled"),
        (lambda: wrap(toy(), lora(use_dora=True)), "has a variant of LoRA"),
        (ia3, r"is a peft\.tuners\.ia3\.layer\.Linear, which PEFT runs with one adapter at a time"),
    ],
    ids=["merged", "disabled", "dora", "ia3"],
)
def test_layers_that_cannot_mix_are_named(make: Any, reason: str) -> None:
    model = make()
    whole = descant.generate(model, IDS, **CALL)  # the active adapter does run
    assert torch.equal(whole, model.generate(input_ids=IDS, do_sample=False, **CALL))
    with pytest.raises(descant.InputError, match=rf"`adapter_name` must be None while \S+ {reason}"):
        descant.generate(model, IDS, adapter_names="french", **CALL)


def test_inner_layers_have_no_head_by_row(model: Any) -> None:
    with pytest.raises(descant.InputError, match="since the head has adapters"):
        descant.generate(model, IDS, adapter_names="french", dola_layers="low", **CALL)
    other = wrap(toy(), lora())
    other.set_adapter("french")
    expected = descant.generate(other, IDS, dola_layers="low", **CALL)
    other.set_adapter("german")
    found = descant.generate(other, IDS, adapter_names="french", dola_layers="low", **CALL)
    assert torch.equal(found, expected)


def test_a_learned_prompt_is_refused_by_name() -> None:
    config = PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    model = get_peft_model(toy(), config)
    with pytest.raises(descant.UnsupportedModel, match=r"learned prompt of PEFT \(PREFIX_TUNING\)"):
        descant.generate(model, IDS, **CALL)


def test_attached_methods_of_peft_models_are_descants(model: Any, expected: dict[str, torch.Tensor]) -> None:
    attached = descant.attach(model)
    try:
        found = attached.generate(input_ids=IDS, adapter_names="french", **CALL)
        assert torch.equal(found, expected["french"])
    finally:
        descant.detach(model)


def test_several_models_take_no_names(model: Any) -> None:
    joint = descant.ProxyTuning(model, toy(seed=1), toy(seed=2))
    with pytest.raises(descant.InputError, match="and for several models"):
        descant.generate(joint, IDS, adapter_names="french", **CALL)
