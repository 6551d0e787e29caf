"""Every method beyond greedy search, sampling and plain beams, and requests that differ for each."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from descant import GenerationConfig, Request
from descant.decoding.constraints import DisjunctiveConstraint, PhrasalConstraint
from descant.decoding.processors.allowed_sequences import AllowedSequences
from tests.contracts.configs import TEXTS, tokenizer
from tests.contracts.subjects import METHODS as PLAIN
from tests.contracts.subjects import requests
from tests.support.tiny_models import Tiny, prompts

Fields = Callable[[int, Tiny], dict[str, Any]]  # of a request's number on a model
NEGATIVE = "negative_prompt_ids"

_LAYERS = ("low", "high", [0, 1], [1])
_SCALES = (1.5, 0.0, 3.0, -1.0)


def _plain(tiny: Tiny, at: int, count: int) -> list[int]:
    """Tokens that mean nothing special."""
    return prompts(tiny.arch, [count], 300 + at)[0]


def _alpha(at: int, tiny: Tiny) -> dict[str, Any]:
    return {"penalty_alpha": (0.6, 0.2, 0.8, 0.5)[at % 4], "top_k": (4, 2, 5, 3)[at % 4]}


def _demands(at: int, tiny: Tiny) -> dict[str, Any]:
    """Constraints of another kind for each request."""
    one, two, three, four, five = _plain(tiny, at, 5)
    kinds: tuple[dict[str, Any], ...] = (
        {"constraints": [PhrasalConstraint([one, two])]},
        {"constraints": [DisjunctiveConstraint([[one], [two, three]]), PhrasalConstraint([four])]},
        {"force_words_ids": [[one, two], [three]], "ordered_constraints": True},
        {"force_words_ids": [[[one, two], [three, four]], [five]], "constraint_gap": 2},
    )
    return kinds[at % 4]


def _trie(at: int, tiny: Tiny) -> dict[str, Any]:
    rng = random.Random(at)
    tokens = _plain(tiny, at, 6)
    listed = [[rng.choice(tokens) for _ in range(rng.randint(1, 7))] for _ in range(40)]
    return {"prefix_allowed_tokens_fn": AllowedSequences(listed, tiny.arch.eos)}


def _banned(at: int, tiny: Tiny) -> dict[str, Any]:
    """Pairs of characters, so many that rows often take back a token."""
    return {"banned_phrases": [one + two for one in TEXTS[at:94:2] for two in TEXTS[:94:3]]}


def _both(*parts: Fields) -> Fields:
    """The fields of several methods together."""
    return lambda at, tiny: {name: one for part in parts for name, one in part(at, tiny).items()}


def _given(**fields: Any) -> Fields:
    return lambda at, tiny: dict(fields)


def _dola(at: int, tiny: Tiny) -> dict[str, Any]:
    return {"dola_layers": _LAYERS[at % 4]}


def _guided(at: int, tiny: Tiny) -> dict[str, Any]:
    return {"guidance_scale": _SCALES[at % 4]}


def _seeded(first: int, temperature: float = 1.3) -> Fields:
    return lambda at, tiny: {"do_sample": True, "seed": first + 10 * at, "temperature": temperature}


_groups = _given(num_beams=4, num_beam_groups=2, diversity_penalty=1.5, num_return_sequences=3)

METHODS: dict[str, Fields] = {
    "contrastive": _alpha,
    "contrastive-ruled": _both(_alpha, _given(repetition_penalty=1.3, min_new_tokens=4)),
    "contrastive-sequential": _both(_alpha, _given(low_memory=True)),
    "groups": _groups,
    "groups-never": _given(
        num_beams=6, num_beam_groups=3, diversity_penalty=0.7, early_stopping="never", length_penalty=0.5
    ),
    "constrained": _both(_demands, _given(num_beams=4, num_return_sequences=2)),
    "constrained-never": _both(_demands, _given(num_beams=3, early_stopping="never", length_penalty=2.0)),
    "constrained-groups": _both(_demands, _groups),
    "banned": _banned,
    "banned-sampled": _both(_banned, _seeded(26)),
    "trie": _trie,
    "trie-beams": _both(_trie, _given(num_beams=4, num_return_sequences=2)),
    "trie-sampled": _both(_trie, _seeded(31)),
    "trie-groups": _both(_trie, _groups),
    "trie-contrastive": _both(_trie, _alpha),
}
# An encoder's prompt is not in the decoder, so that these have no meaning there.
DECODER_ONLY: dict[str, Fields] = {
    "healed": _given(token_healing=True),
    "healed-beams": _given(token_healing=True, num_beams=3),
    "banned-guided": _both(_banned, _guided),
    "banned-dola": _both(_banned, _dola),
    "dola": _dola,
    # Few tokens are left to draw from, which takes some heat.
    "dola-sampled": _both(_dola, _seeded(21, 9.0)),
    "dola-beams": _both(_dola, _given(num_beams=3, num_return_sequences=2)),
    "dola-beam-sampling": _both(_dola, _seeded(23, 9.0), _given(num_beams=3)),
    "dola-groups": _both(_dola, _groups),
    "dola-contrastive": _both(_dola, _alpha),
    "dola-constrained": _both(_dola, _demands, _given(num_beams=4)),
    "guided": _guided,
    "guided-sampled": _both(_guided, _seeded(22)),
    "guided-beams": _both(_guided, _given(num_beams=3, num_return_sequences=2)),
    "guided-beam-sampling": _both(_guided, _seeded(24), _given(num_beams=3)),
    "guided-fanned": _both(_guided, _seeded(25), _given(num_return_sequences=3)),
    "guided-contrastive": _both(_guided, _alpha),
    "guided-sequential": _both(_guided, _alpha, _given(low_memory=True)),
    "guided-groups": _both(_guided, _groups),
    "guided-constrained": _both(_guided, _demands, _given(num_beams=4)),
    "guided-trie-beams": _both(_guided, _trie, _given(num_beams=3)),
}
SEEDED = ("dola-sampled", "dola-beam-sampling", "guided-sampled", "guided-beam-sampling", "guided-fanned")


def methods(tiny: Tiny) -> dict[str, Fields]:
    """Those that have a meaning on a model."""
    return METHODS if tiny.encoder_decoder else {**METHODS, **DECODER_ONLY}


def _completed(tiny: Tiny, given: Sequence[Request]) -> list[Request]:
    """The same with a tokenizer where text counts, and for every other guided one a negative prompt."""
    made = []
    for at, one in enumerate(given):
        if one.generation_config.guidance_scale is not None and at % 2 == 0:
            count = (3, 13, 1, 7)[at // 2 % 4]
            negative = torch.tensor(prompts(tiny.arch, [count], 700 + at)[0])
            one = replace(one, inputs={**one.inputs, NEGATIVE: negative})
        if one.generation_config.banned_phrases or one.generation_config.token_healing:
            one = replace(one, tokenizer=tokenizer())
        made.append(one)
    return made


def of_method(tiny: Tiny, method: str, count: int = 4, seed: int = 0, new: int = 7) -> list[Request]:
    """Requests of one method that differ in prompt, length, and whatever the method takes."""
    fields = methods(tiny)[method]
    configs = [GenerationConfig(**fields(at, tiny), max_new_tokens=new + 3 * at) for at in range(count)]
    return _completed(tiny, requests(tiny, configs, (5, 9, 1, 6), seed))


def mixed(tiny: Tiny, seed: int = 0) -> list[Request]:
    """One request of every method there is, those of `subjects` included."""
    configs = [GenerationConfig(**given, max_new_tokens=5 + at) for at, given in enumerate(PLAIN.values())]
    configs += [
        GenerationConfig(**fields(at, tiny), max_new_tokens=5 + at % 7)
        for at, fields in enumerate(methods(tiny).values())
    ]
    return _completed(tiny, requests(tiny, configs, (4, 9, 1, 7, 12), seed))
