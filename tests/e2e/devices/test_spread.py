"""Models on another device than the host, spread over two, or kept elsewhere than they compute."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import Tensor

import descant
from bench.fake_devices import FIRST, SECOND, Pretended, placed, pretended
from descant.models.distributed import input_device, is_multi_device
from descant.models.transformers_model import TransformersModel
from tests.support.tiny_models import Tiny, pad, prompts

Models = Callable[..., Tiny]

_DECODER = {
    "model.embed_tokens": FIRST,
    "model.rotary_emb": FIRST,
    "model.layers.0": FIRST,
    "model.layers.1": SECOND,
    "model.norm": SECOND,
    "lm_head": SECOND,
}
# Which device each part of a model is on.
MAPS: dict[str, dict[str, torch.device]] = {
    "llama": _DECODER,
    "mistral": _DECODER,
    "gpt2": {
        "transformer.wte": FIRST, "transformer.wpe": FIRST, "transformer.drop": FIRST, "lm_head": FIRST,
        "transformer.h.0": FIRST, "transformer.h.1": SECOND, "transformer.ln_f": SECOND,
    },
    "t5": {
        "shared": FIRST, "encoder.embed_tokens": FIRST, "decoder.embed_tokens": FIRST, "lm_head": FIRST,
        "encoder.block.0": FIRST, "encoder.block.1": SECOND, "encoder.final_layer_norm": SECOND,
        "decoder.block.0": FIRST, "decoder.block.1": SECOND, "decoder.final_layer_norm": SECOND,
    },
}  # fmt: skip

HOW: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5},
    "seeded": {"do_sample": True, "seed": 3, "num_return_sequences": 2},
    "by chance": {"do_sample": True, "top_k": 20},
    "beams by chance": {"do_sample": True, "num_beams": 2},
    "rules": {
        "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 4, "suppress_tokens": [11],
        "bad_words_ids": [[7], [8, 9]], "sequence_bias": {(12, 13): 2.0}, "frequency_penalty": 0.4,
        "dry_multiplier": 0.8, "exponential_decay_length_penalty": (3, 1.2), "logit_bias": {21: 1.5},
    },
    "samplers": {
        "do_sample": True, "seed": 9, "temperature": 1.4, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.95,
        "epsilon_cutoff": 1e-4, "eta_cutoff": 1e-4, "xtc_probability": 0.5, "xtc_threshold": 0.05,
    },
    "mirostat": {"do_sample": True, "seed": 4, "mirostat_tau": 2.0},
}  # fmt: skip


def on(homes: dict[str, torch.device] | torch.device) -> Callable[[str], torch.device]:
    if isinstance(homes, torch.device):
        return lambda _: homes
    return lambda name: next(home for part, home in homes.items() if name.startswith(f"{part}."))


def dealt_out(tiny: Tiny) -> Any:
    """The model over two devices, with the hooks that accelerate gives a model with a `device_map`."""
    homes = MAPS[tiny.name]
    model = placed(copy.deepcopy(tiny.model), on(homes))
    skip = model._skip_keys_device_placement
    for part, home in homes.items():
        add_hook_to_module(model.get_submodule(part), AlignDevicesHook(home, skip_keys=skip))
    model.hf_device_map = {part: str(home) for part, home in homes.items()}
    # Its inputs go to one device; what it answers comes back to where they came from.
    add_hook_to_module(model, AlignDevicesHook(FIRST, io_same_device=True, skip_keys=skip))
    return model


def batch(tiny: Tiny, lengths: tuple[int, ...] = (5, 9, 3)) -> dict[str, Tensor]:
    ids, mask = pad(prompts(tiny.arch, lengths, 7), tiny.pad, "right" if tiny.encoder_decoder else "left")
    return {"input_ids": ids, "attention_mask": mask}


def answer(model: Any, given: dict[str, Tensor], home: torch.device | None = None, **how: Any) -> Any:
    torch.manual_seed(0)
    moved = given if home is None else {name: value.to(home) for name, value in given.items()}
    found = descant.generate(model, **moved, max_new_tokens=8, **how)
    if home is not None:
        assert isinstance(found, Tensor)
        assert found.device == home
    return found.cpu() if isinstance(found, Tensor) else found


# ------------------------------------------------------------------------ what is pretended
def test_pretended_devices_refuse_what_hardware_refuses() -> None:
    with pretended():
        here, there = torch.ones(3, device=FIRST), torch.ones(3).to(SECOND)
        assert (here + 1).device == FIRST
        assert torch.equal((here + there.to(FIRST)).cpu(), torch.full((3,), 2.0))
        for wrong in (
            lambda: here + there,
            lambda: here + torch.ones(3),
            lambda: here[torch.tensor([0]).to(SECOND)],
        ):
            with pytest.raises(RuntimeError, match="same device"):
                wrong()
        with pytest.raises((TypeError, RuntimeError)):
            here.numpy()
        assert here[torch.tensor([0, 2])].device == FIRST  # an index may be on the host
        here[0] = 5
        assert here.tolist() == [5, 1, 1]
        assert isinstance(torch.tensor([1], device=SECOND), Pretended)


# ------------------------------------------------------------------------ one device, two devices
@pytest.mark.ci_cases("rules", "beams by chance", "seeded", "mirostat")
@pytest.mark.parametrize("how", HOW)
def test_a_model_on_a_device_answers_as_on_the_host(tiny: Models, how: str) -> None:
    one = tiny("llama")
    given = batch(one)
    with pretended():
        model = placed(copy.deepcopy(one.model), on(FIRST))
        assert torch.equal(answer(model, given, FIRST, **HOW[how]), answer(one.model, given, **HOW[how]))


@pytest.mark.parametrize(
    ("name", "how"),
    [(name, how) for name in MAPS for how in ("greedy", "beams")] + [("llama", "rules"), ("t5", "seeded")],
)
def test_a_model_over_two_devices_answers_as_on_the_host(tiny: Models, name: str, how: str) -> None:
    one = tiny(name)
    given = batch(one)
    with pretended():
        assert torch.equal(
            answer(dealt_out(one), given, FIRST, **HOW[how]), answer(one.model, given, **HOW[how])
        )


@pytest.mark.ci_cases("t5")
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_records_of_a_model_over_two_devices(tiny: Models, name: str) -> None:
    one = tiny(name, attn_implementation="eager")
    how = {
        "return_dict_in_generate": True, "output_scores": True, "output_logits": True, "logprobs": 2,
        "output_hidden_states": True, "output_attentions": True,
    }  # fmt: skip
    given = batch(one)
    with pretended():
        ours = answer(one.model, given, **how)
        moved = {key: value.to(FIRST) for key, value in given.items()}
        there = descant.generate(dealt_out(one), **moved, max_new_tokens=8, **how)
        assert torch.equal(there.sequences.cpu(), ours.sequences)
        states = "decoder_hidden_states" if one.encoder_decoder else "hidden_states"
        for field in ("scores", "logits"):
            assert all(block.device == FIRST for block in there[field])
            torch.testing.assert_close([block.cpu() for block in there[field]], list(ours[field]))
        for mine, theirs in zip(ours[states], there[states], strict=True):
            torch.testing.assert_close([layer.cpu() for layer in theirs], list(mine))


def test_rows_of_different_age_share_a_forward_over_two_devices(tiny: Models) -> None:
    one = tiny("llama")

    def run(model: Any) -> list[list[int]]:
        session = descant.Session(model)
        config = descant.GenerationConfig(max_new_tokens=6, eos_token_id=None)
        beams = descant.GenerationConfig(max_new_tokens=5, num_beams=2, eos_token_id=None)
        rows = prompts(one.arch, (4, 7, 3), 5)
        session.admit(descant.Request(rows[0], config))
        session.step()
        session.admit(descant.Request(rows[1], config), descant.Request(rows[2], beams))
        session.step()
        session.cancel(1)
        return [
            event.hypotheses[0].tokens.tolist() for event in session.drain() if hasattr(event, "hypotheses")
        ]

    with pretended():
        assert run(dealt_out(one)) == run(one.model)


def test_every_layer_keeps_its_keys_on_its_own_device(tiny: Models) -> None:
    one = tiny("llama")
    with pretended():
        model = dealt_out(one)
        session = descant.Session(model)
        session.admit(descant.Request([5, 6, 7], descant.GenerationConfig(max_new_tokens=3)))
        session.step()
        blocks = session._tables.default.cache._keys
        assert {layer: block.device for layer, block in blocks.items()} == {0: FIRST, 1: SECOND}
        assert session._tables.default.rows.tokens.device == FIRST


def test_a_model_that_answers_elsewhere_is_heard(tiny: Models) -> None:
    """Without a hook around the whole, logits come from the last device."""
    one = tiny("llama")
    given = batch(one)
    with pretended():
        model = dealt_out(one)
        accelerate.hooks.remove_hook_from_module(model)
        del model.hf_device_map
        moved = {name: value.to(FIRST) for name, value in given.items()}
        assert model(**moved).logits.device == SECOND
        assert torch.equal(answer(model, given, FIRST), answer(one.model, given))


def test_where_a_model_takes_its_inputs(tiny: Models) -> None:
    one = tiny("llama")
    assert input_device(one.model) == torch.device("cpu")
    assert not is_multi_device(one.model)
    with pretended():
        model = dealt_out(one)
        assert (input_device(model), is_multi_device(model)) == (FIRST, True)
        assert TransformersModel(model).device == FIRST


# ------------------------------------------------------------------------ weights kept elsewhere
@pytest.mark.parametrize("name", ["llama", "t5"])
@pytest.mark.parametrize("kept", ["memory", "disk"])
def test_offloaded_weights(tiny: Models, tmp_path: Path, name: str, kept: str) -> None:
    one, host = tiny(name), torch.device("cpu")
    given = batch(one)
    if kept == "memory":
        model = accelerate.cpu_offload(copy.deepcopy(one.model), host)
    else:
        model = accelerate.disk_offload(copy.deepcopy(one.model), str(tmp_path), host)
    assert model.device.type == "meta"
    assert input_device(model) == host
    for how in ("greedy", "beams", "seeded"):
        assert torch.equal(answer(model, given, **HOW[how]), answer(one.model, given, **HOW[how]))


def test_a_device_map_given_to_from_pretrained(tiny: Models, tmp_path: Path) -> None:
    one = tiny("llama")
    homes = {part: "disk" if home == SECOND else "cpu" for part, home in _DECODER.items()}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        one.folder, device_map=homes, offload_folder=tmp_path, dtype=torch.float32
    ).eval()
    given = batch(one)
    assert model.hf_device_map == homes
    theirs = model.generate(**given, max_new_tokens=8, do_sample=False)
    assert torch.equal(answer(model, given), theirs)
    assert torch.equal(answer(model, given, num_beams=2), answer(one.model, given, num_beams=2))
