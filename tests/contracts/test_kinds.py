"""The laws on one representative of each kind of model: how it is fed must not be seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from descant import ConfigError, GenerationConfig, Request
from descant.api.inputs import prepare_prompts
from descant.models.model_adapter import as_model
from descant.testing import check_admission, check_batch, outcomes
from tools.sweep.kinds import KINDS, representative
from tools.sweep.subject import Subject
from tools.sweep.trial import subject_of

# What prepares its inputs in a generate() of its own has none for a Session.
_AROUND = "a generate of its own around a text model"

METHODS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "seed": 5, "temperature": 1.3},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 3},
    "groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0},
    "constrained": {"num_beams": 3, "force_words_ids": [[5, 6]]},
    "guided": {"guidance_scale": 1.5},
    "guided-beams": {"guidance_scale": 2.0, "num_beams": 2},
    "dola": {"dola_layers": "low"},
    "contrastive-sequential": {"penalty_alpha": 0.6, "top_k": 2, "low_memory": True},
}
PLAIN = ("greedy", "sampling", "beams")
DECODER_ONLY = ("guided", "guided-beams", "dola")
# Other state than keys, no cache, and an encoder-decoder: CI runs all methods on these.
WHOLE = (
    "recurrent",
    "recurrent and attention by layer",
    "no memory at all",
    "encoder-decoder, relative positions",
)

# Of the plain methods it runs these kinds.
SHOWN = (
    "rotary positions",
    "positions counted from a padding line",
    "sliding and full attention by layer",
    "latent attention (MLA)",
    "recurrent",
    "recurrent and attention by layer",
    "a cache class of its own",
    "rows one by one",
    "no memory at all",
    "a prefix of its own in the cache",
    "encoder-decoder, relative positions",
    "speech, fixed windows",
    "speech in a prompt",
    "codes of sound beside every token",
    "sound added to every token",
    "images in a prompt",
    "images by cross-attention",
    "multimodal positions (M-RoPE)",
)
assert {*SHOWN, *WHOLE} <= set(KINDS)
CASES = [
    pytest.param((kind, methods), marks=() if kind in run else pytest.mark.slow, id=f"{kind}: {methods}")
    for methods, run in (("plain", SHOWN), ("others", WHOLE))
    for kind in KINDS
    if kind != _AROUND
]


def _request(subject: Subject, number: int, method: str) -> Request:
    """A request for a method with one of a subject's prompts."""
    own = GenerationConfig.from_transformers(subject.model.generation_config)
    config = GenerationConfig.merge({**METHODS[method], "max_new_tokens": 4 + number % 3}, None, own)
    prompt = subject.prompts[number % len(subject.prompts)]
    with torch.no_grad():
        ready = prepare_prompts(prompt, config, as_model(subject.model).traits, torch.device("cpu"))
    return Request(ready.prompt(0), config, ready.inputs[0])


def _requests(subject: Subject, methods: str) -> list[Request]:
    """Each prompt with another plain method, and the first again; or a request for each other method."""
    if methods == "plain":
        made = [_request(subject, at, name) for at, name in enumerate(PLAIN[: len(subject.prompts)])]
        return [*made, made[0]]
    facts = as_model(subject.model).traits
    left_out = {*PLAIN, *(DECODER_ONLY if facts.is_encoder_decoder else ())}
    if facts.cache_type == "recurrent":
        left_out.add("contrastive-sequential")
        with pytest.raises(ConfigError, match="`low_memory` needs a model that can drop a token"):
            outcomes(subject.model, [_request(subject, 0, "contrastive-sequential")])
    return [_request(subject, at, name) for at, name in enumerate(METHODS) if name not in left_out]


@pytest.mark.parametrize("case", CASES)
def test_laws_hold_on_every_kind(case: tuple[str, str]) -> None:
    kind, methods = case
    subject = subject_of(representative(kind))
    requests = _requests(subject, methods)
    check_batch(subject.model, requests)
    check_admission(subject.model, requests, schedules=2 if methods == "plain" else 1)
