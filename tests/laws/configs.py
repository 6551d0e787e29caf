"""Calls of generate() made by chance, over every documented field, with good, odd and bad values and inputs.

A case is made from its number alone, so one that fails can be made again: `case(seed, number)`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from descant import GenerationConfig
from descant.config import FIELDS, LATER
from tests.config_cases import CASES
from tests.tiny import ARCHITECTURES, pad, prompts

NAN, INF = float("nan"), float("inf")
VOCAB = 97  # of the tiny Llama; those of the others are a little larger

# What makes sense on a tiny model, and what only just does. Where a value is huge no machine could do it: one
# that could be done, slowly, would only test patience.
GOOD: dict[str, list[Any]] = {
    "max_length": [1, 5, 12, 20, 30, 2**31, 2**63 - 1],
    "max_new_tokens": [1, 2, 5, 8, 12, 200, 2**31, 2**63 - 1],
    "min_length": [0, 1, 5, 9, 25, 2**63 - 1],
    "min_new_tokens": [0, 1, 3, 6, 10, 21, 2**63 - 1],
    "max_time": [1e-9, 0.5, 60, 1e30],
    "do_sample": [True, True, True, False],
    "num_beams": [1, 2, 3, 4, 8, 100, 2**40, 2**63 - 1],
    "seed": [0, 1, 7, 2**32, 2**63 - 1],
    "early_stopping": [True, False, "never"],
    "length_penalty": [-50, -1, 0, 0.3, 1, 2, 50.0],
    "temperature": [0, 1e-30, 0.1, 0.7, 1, 1.5, 30, 1e30],
    "top_k": [0, 1, 5, 50, 1000, 2**63 - 1],
    "top_p": [0, 1e-9, 0.5, 0.9, 1],
    "min_p": [0, 0.05, 0.5, 1],
    "repetition_penalty": [1e-30, 0.5, 1, 1.2, 5, 1e30],
    "suppress_tokens": [[], [2], [0, 1, 3], [5, 5], range(1, VOCAB), range(200), [150], torch.tensor([3])],
    "begin_suppress_tokens": [[], [2], [0, 1, 3], range(1, VOCAB), range(200), [2**63 - 1]],
    "renormalize_logits": [True, False],
    "remove_invalid_values": [True, False],
    "pad_token_id": [0, 2, 50, 96, 150, 2**62],
    "bos_token_id": [0, 1, 50, 150],
    "eos_token_id": [2, 5, [2, 3], [5, 7, 9], [4, 4], 150, range(VOCAB), list(range(120)), None, 2**63 - 1],
    "forced_bos_token_id": [4, 96, 150],
    "forced_eos_token_id": [2, 60, [2, 3], 150],
    "num_return_sequences": [1, 2, 3, 100, 2**40, 2**63 - 1],
    "return_dict_in_generate": [True, False],
    "output_scores": [True, False],
    "output_logits": [True, False],
    "output_attentions": [True, False],
    "output_hidden_states": [True, False],
    "decoder_start_token_id": [0, 5, [0], [0, 5], [0, 5, 6], 150, [0, 150]],
}  # fmt: skip


class Odd:
    """An object that is nothing."""

    def __repr__(self) -> str:
        return "Odd()"


class Rude:
    """An object that cannot even be shown, compared or counted."""

    def __repr__(self) -> str:
        raise RuntimeError("no")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no")

    def __len__(self) -> int:
        raise RuntimeError("no")

    __hash__ = None  # type: ignore[assignment]


ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3.0, 0.5, -0.5, NAN, INF, -INF, 1e-40, 1e40, 2**40, 2**63 - 1, 2**63,
    -(2**63), 10**30, "", "x", "1", "True", b"x", 1j, [], [[]], [1], [-1], [1.5], [1, 2], [[1, 2]], [None],
    ["a"], [True], [NAN], {}, {"a": 1}, {1: 2}, (), (1, 2), set(), {1, 2}, range(0), range(3),
    torch.tensor(1), torch.tensor([1, 2]), torch.tensor([[1]]), torch.tensor(0.5), torch.tensor(NAN),
    torch.empty(0), torch.tensor(True), np.int64(3),
    np.float32(0.5), np.array([1, 2]), np.array([]), np.nan, np.bool_(True), "é" * 300, list(range(5000)),
    Odd(), Rude(), int, len,
]  # fmt: skip

NOW = tuple(name for name in FIELDS if name not in LATER)
SAMPLING = ("temperature", "top_k", "top_p", "min_p")
BEAMS = ("early_stopping", "length_penalty")
OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


@dataclass
class Case:
    """One call: which tiny model, the fields (some in the `generation_config` argument), and the inputs."""

    number: int
    model: str
    call: dict[str, Any] = field(default_factory=dict)
    argument: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)
    rows: list[list[int]] = field(default_factory=list)  # the prompts, where the inputs are as they should be
    odd: str = ""  # what is odd about the inputs

    @property
    def fields(self) -> dict[str, Any]:
        """Every field, the call's own before the argument's."""
        return {**self.argument, **self.call}

    @property
    def encoder_decoder(self) -> bool:
        return ARCHITECTURES[self.model].encoder_decoder


def value(rng: random.Random, name: str) -> Any:
    """A value for a field: good more often than not."""
    luck = rng.random()
    if luck < 0.76 and name in GOOD:
        return rng.choice(GOOD[name])
    good, bad = CASES[name]
    if luck < 0.88:
        # Half of the good values of a field to come are those that ask for nothing.
        if name in LATER and rng.random() < 0.5:
            return rng.choice([one for one in LATER[name].neutral if one != ()])
        return rng.choice(
            [one for one in good if name not in ("num_beams", "num_return_sequences") or int(one) < 9]
        )
    if luck < 0.94:
        return rng.choice(bad)
    return rng.choice(ODD)


def fields(rng: random.Random) -> dict[str, Any]:
    """One to six fields, half of the time with what gives them a use."""
    names = [
        rng.choice(NOW) if rng.random() < 0.85 else rng.choice(tuple(FIELDS))
        for _ in range(rng.randint(1, 6))
    ]
    given = {name: value(rng, name) for name in names}
    if rng.random() < 0.7:
        if given.keys() & set(SAMPLING) and "do_sample" not in given:
            given["do_sample"] = True
        if given.keys() & set(BEAMS) and "num_beams" not in given:
            given["num_beams"] = rng.choice((2, 3))
        if given.keys() & set(OUTPUTS):
            given["return_dict_in_generate"] = True
        if "num_return_sequences" in given and not given.keys() & {"do_sample", "num_beams"}:
            given["do_sample"] = True
    return given


def case(seed: int, number: int) -> Case:
    """The case of that number."""
    rng = random.Random(f"{seed}-{number}")
    model = rng.choice(("llama", "llama", "llama", "gpt2", "t5"))
    made = Case(number, model)
    given = fields(rng)
    if rng.random() < 0.3:
        made.argument = {name: given[name] for name in given if rng.random() < 0.6}
    made.call = {name: one for name, one in given.items() if name not in made.argument}
    arch = ARCHITECTURES[model]
    lengths = [rng.randint(1, 7) for _ in range(rng.randint(1, 3))]
    made.rows = prompts(arch, lengths, rng.randrange(2**31))
    ids, mask = pad(made.rows, arch.pad, "right" if arch.encoder_decoder else "left")
    made.inputs = {"input_ids": ids, "attention_mask": mask}
    if rng.random() < 0.2:
        made.odd, made.inputs = _odd_inputs(rng, ids, mask)
        if "stopping_criteria" in made.inputs:  # then nothing else ends what has no limit
            made.call["max_new_tokens"] = 6
    return made


def cases(seed: int, count: int, first: int = 0) -> Iterator[Case]:
    """Cases `first` to `first + count`."""
    return (case(seed, number) for number in range(first, first + count))


def _odd_inputs(rng: random.Random, ids: torch.Tensor, mask: torch.Tensor) -> tuple[str, dict[str, Any]]:
    """Inputs that are odd: many wrong, some right in an unusual way."""
    far, low = ids.clone(), ids.clone()
    far[0, -1], low[0, -1] = 10_000, -1
    zero, holes = mask.clone(), mask.clone()
    zero[0] = 0
    holes[:, ::2] = 0
    two = torch.cat((ids, ids), 1)
    kinds: Mapping[str, dict[str, Any]] = {
        "ids as int32": {"input_ids": ids.int(), "attention_mask": mask},
        "ids as float": {"input_ids": ids.float(), "attention_mask": mask},
        "ids as bool": {"input_ids": ids.bool(), "attention_mask": mask},
        "ids of one dimension": {"input_ids": ids[0]},
        "ids of three dimensions": {"input_ids": ids[None]},
        "ids of none": {"input_ids": torch.tensor(5)},
        "no rows": {"input_ids": ids[:0], "attention_mask": mask[:0]},
        "no columns": {"input_ids": ids[:, :0], "attention_mask": mask[:, :0]},
        "an id too large": {"input_ids": far, "attention_mask": mask},
        "an id below 0": {"input_ids": low, "attention_mask": mask},
        "a list": {"input_ids": ids.tolist(), "attention_mask": mask},
        "an array": {"input_ids": ids.numpy(), "attention_mask": mask},
        "text": {"input_ids": "Once upon a time"},
        "nothing": {},
        "ids alone": {"input_ids": ids},
        "a mask alone": {"attention_mask": mask},
        "a mask of bools": {"input_ids": ids, "attention_mask": mask.bool()},
        "a mask of floats": {"input_ids": ids, "attention_mask": mask.float()},
        "a mask of twos": {"input_ids": ids, "attention_mask": mask * 2},
        "a mask below 0": {"input_ids": ids, "attention_mask": mask - 1},
        "a mask of NaN": {"input_ids": ids, "attention_mask": mask * NAN},
        "a mask of nothing": {"input_ids": ids, "attention_mask": zero},
        "a mask with holes": {"input_ids": two, "attention_mask": torch.cat((mask, mask), 1)},
        "a mask of every other": {"input_ids": two, "attention_mask": torch.cat((holes, mask), 1)},
        "a mask too wide": {"input_ids": ids, "attention_mask": torch.cat((mask, mask), 1)},
        "a mask too high": {"input_ids": ids, "attention_mask": torch.cat((mask, mask))},
        "a mask of one dimension": {"input_ids": ids, "attention_mask": mask[0]},
        "a mask of four dimensions": {"input_ids": ids, "attention_mask": mask[:, None, None]},
        "a list for a mask": {"input_ids": ids, "attention_mask": mask.tolist()},
        "text for a mask": {"input_ids": ids, "attention_mask": "yes"},
        "both names": {"inputs": ids, "input_ids": ids},
        "the other name": {"inputs": ids, "attention_mask": mask},
        "odd inputs": {"inputs": rng.choice(ODD)},
        "odd embeddings": {"inputs_embeds": rng.choice(ODD)},
        "embeddings of one dimension": {"inputs_embeds": torch.randn(4)},
        "embeddings of another size": {"inputs_embeds": torch.randn(2, 3, 5)},
        "embeddings of integers": {"inputs_embeds": torch.ones(1, 3, 32, dtype=torch.long)},
        "embeddings": {"inputs_embeds": torch.ones(1, 3, 32)},
        "embeddings and ids": {"inputs_embeds": torch.ones(len(ids), ids.shape[1], 32), "input_ids": ids},
        "embeddings and other ids": {"inputs_embeds": torch.ones(len(ids), 9, 32), "input_ids": ids},
        "an unknown name": {"input_ids": ids, "attention_mask": mask, "top_kk": 3},
        "an odd config": {"input_ids": ids, "generation_config": rng.choice(ODD[1:])},
        "odd processors": {"input_ids": ids, "logits_processor": rng.choice(ODD)},
        "a list of odd processors": {"input_ids": ids, "logits_processor": [rng.choice(ODD)]},
        "odd criteria": {"input_ids": ids, "stopping_criteria": rng.choice(ODD)},
        "a list of odd criteria": {"input_ids": ids, "stopping_criteria": [rng.choice(ODD)]},
        "an odd streamer": {"input_ids": ids, "streamer": rng.choice(ODD)},
        "odd decoder ids": {"input_ids": ids, "decoder_input_ids": rng.choice(ODD)},
        "decoder ids too large": {"input_ids": ids, "decoder_input_ids": far},
        "an odd decoder mask": {"input_ids": ids, "decoder_attention_mask": rng.choice(ODD)},
        "odd encoder outputs": {"encoder_outputs": rng.choice(ODD)},
        "an odd past": {"input_ids": ids, "past_key_values": rng.choice(ODD)},
        "an odd assistant": {"input_ids": ids, "assistant_model": rng.choice(ODD)},
        "an odd tokenizer": {"input_ids": ids, "tokenizer": rng.choice(ODD)},
    }  # fmt: skip
    name = rng.choice(list(kinds))
    return name, kinds[name]


# Inputs that nobody can have meant: to accept them would be to guess.
HOPELESS = frozenset({
    "ids as float", "ids as bool", "ids of one dimension", "ids of three dimensions", "ids of none",
    "no rows", "no columns", "an id too large", "an id below 0", "text", "a mask below 0", "a mask of twos",
    "a mask of NaN", "a mask of nothing", "a mask too wide", "a mask too high", "a mask of one dimension",
    "a mask of four dimensions", "text for a mask", "both names", "embeddings of one dimension",
    "embeddings of another size", "embeddings of integers", "embeddings and other ids", "an unknown name",
    "decoder ids too large",
})  # fmt: skip


def as_config(given: Mapping[str, Any]) -> GenerationConfig:
    """The `generation_config` argument of a case."""
    return GenerationConfig(**given)
