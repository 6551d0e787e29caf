"""The laws on one representative of each kind of model: how it is fed must not be seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from descant import GenerationConfig, Request
from descant.api.inputs import prepare_prompts
from descant.models.model_adapter import as_model
from descant.testing import check_admission, check_batch
from tools.sweep.kinds import KINDS, representative
from tools.sweep.subject import Subject
from tools.sweep.trial import subject_of

# What prepares its inputs in a generate() of its own has none for a Session.
_AROUND = "a generate of its own around a text model"

METHODS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "seed": 5, "temperature": 1.3},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
}


def _requests(subject: Subject) -> list[Request]:
    """Each prompt of a subject with another method, and the first again."""
    facts, made = as_model(subject.model).traits, []
    own = GenerationConfig.from_transformers(subject.model.generation_config)
    for number, (name, prompt) in enumerate(zip(METHODS, subject.prompts, strict=False)):
        config = GenerationConfig.merge({**METHODS[name], "max_new_tokens": 5 + number}, None, own)
        with torch.no_grad():
            ready = prepare_prompts(prompt, config, facts, torch.device("cpu"))
        made.append(Request(ready.prompt(0), config, ready.inputs[0]))
    return [*made, made[0]]


@pytest.mark.ci_cases(
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
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != _AROUND])
def test_laws_hold_on_every_kind(kind: str) -> None:
    subject = subject_of(representative(kind))
    requests = _requests(subject)
    check_batch(subject.model, requests)
    check_admission(subject.model, requests, schedules=2)
