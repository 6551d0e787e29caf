"""The laws of every method on one representative of each kind of model: how it is fed must not be seen."""

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

METHODS: dict[str, dict[str, Any]] = {
    "contrastive": {"penalty_alpha": 0.6, "top_k": 3},
    "groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0},
    "constrained": {"num_beams": 3, "force_words_ids": [[5, 6]]},
    "guided": {"guidance_scale": 1.5},
    "guided-beams": {"guidance_scale": 2.0, "num_beams": 2},
    "dola": {"dola_layers": "low"},
}
DECODER_ONLY = ("guided", "guided-beams", "dola")
SEQUENTIAL = {"penalty_alpha": 0.6, "top_k": 2, "low_memory": True}

# In CI: models with other state than keys, without a cache, and an encoder-decoder.
SHOWN = (
    "recurrent",
    "recurrent and attention by layer",
    "no memory at all",
    "encoder-decoder, relative positions",
)
# What prepares its inputs in a generate() of its own has none for a Session.
AROUND = "a generate of its own around a text model"
EVERY = [
    pytest.param(kind, marks=() if kind in SHOWN else pytest.mark.slow) for kind in KINDS if kind != AROUND
]


def _request(subject: Subject, number: int, fields: dict[str, Any]) -> Request:
    """A request for a method with one of a subject's prompts."""
    own = GenerationConfig.from_transformers(subject.model.generation_config)
    config = GenerationConfig.merge({**fields, "max_new_tokens": 4 + number % 3}, None, own)
    prompt = subject.prompts[number % len(subject.prompts)]
    with torch.no_grad():
        ready = prepare_prompts(prompt, config, as_model(subject.model).traits, torch.device("cpu"))
    return Request(ready.prompt(0), config, ready.inputs[0])


@pytest.mark.parametrize("kind", EVERY)
def test_laws_hold_on_every_kind(kind: str) -> None:
    subject = subject_of(representative(kind))
    facts = as_model(subject.model).traits
    given = [
        _request(subject, number, fields)
        for number, (name, fields) in enumerate(METHODS.items())
        if not (facts.is_encoder_decoder and name in DECODER_ONLY)
    ]
    sequential = _request(subject, 0, SEQUENTIAL)
    if facts.cache_type == "recurrent":
        with pytest.raises(ConfigError, match="`low_memory` needs a model that can drop a token"):
            outcomes(subject.model, [sequential])
    else:
        given.append(sequential)
    check_batch(subject.model, given)
    check_admission(subject.model, given, schedules=1)
