"""Drafts change nothing on any kind of model, whatever its inputs and its cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

import descant
from descant.errors import ConfigError
from descant.models.compat.custom_generate import as_custom_generate
from descant.models.model_adapter import as_model
from tests.contracts.speculation import ALWAYS, GREEDILY, Tries, close, near
from tools.sweep.kinds import KINDS, representative
from tools.sweep.subject import Subject
from tools.sweep.trial import subject_of

# In CI: a window, what has no positions, experts, what the model is asked for, what remembers nothing or
# cannot take back what it has read, both kinds of encoder-decoder, and images.
SHOWN = (
    "ALiBi, no positions",
    "sliding and full attention by layer",
    "chunked attention",
    "mixture of experts",
    "rows one by one",
    "recurrent and attention by layer",
    "no memory at all",
    "a prefix of its own in the cache",
    "encoder-decoder, relative positions",
    "experts in encoder and decoder",
    "images in a prompt",
)
# One hears in windows, which takes no draft model, and one has a generate() of its own around a text model.
APART = ("speech, fixed windows",)
EVERY = [
    pytest.param(kind, marks=() if kind in SHOWN else pytest.mark.slow) for kind in KINDS if kind not in APART
]
METHODS: tuple[dict[str, Any], ...] = ({}, {"do_sample": True, "seed": 3, "num_return_sequences": 2})
NEW = 12


def _inner(model: Any) -> Any:
    """What is decoded with: the text model where that has a generate() of another around it."""
    return model if as_custom_generate(model) is None else model.language_model


def _options(subject: Subject) -> dict[str, Any]:
    """A few words of the model's, so that drafts are sometimes right."""
    model = _inner(subject.model)
    kept = (11, 34, 57, 80, 103, model.generation_config.forced_eos_token_id)
    size = model.config.get_text_config().vocab_size
    return {"suppress_tokens": [one for one in range(size) if one not in kept], "max_new_tokens": NEW}


def _drafts(model: Any) -> dict[str, dict[str, Any]]:
    helper = {"num_assistant_tokens": 3, **GREEDILY}
    return {
        "lookup": {"prompt_lookup_num_tokens": 4, **ALWAYS},
        "suffix": {"suffix_lookup_num_tokens": 3, **ALWAYS},
        "draft model": {"assistant_model": near(_inner(model), 0.98), **helper},
        "early exit": {"assistant_early_exit": 1, **helper},
    }


def _refuses_drafts(subject: Subject, given: Mapping[str, Any], drafts: dict[str, Any]) -> bool:
    """Whether a model that cannot verify several drafts at once refuses them, which it then must."""
    facts = as_model(_inner(subject.model)).traits
    if facts.continues_by_one:
        with pytest.raises(ConfigError, match=r"several tokens|one by one"):
            descant.generate(subject.model, **given, **drafts, max_new_tokens=3)
        return True
    if "assistant_early_exit" in drafts and (
        facts.is_encoder_decoder or facts.cache_type == "none" or facts.prepares_own_inputs
    ):
        with pytest.raises(ConfigError, match="`assistant_early_exit` is not supported for a model that"):
            descant.generate(subject.model, **given, **drafts, max_new_tokens=3)
        return True
    return False


@pytest.mark.parametrize("kind", EVERY)
def test_drafts_change_nothing_on_any_kind(kind: str) -> None:
    subject = subject_of(representative(kind))
    options, tries, left = {**_options(subject), **subject.options}, Tries(), 0
    batches = subject.prompts if subject.batch is None else [subject.batch]
    for name, drafts in _drafts(subject.model).items():
        if _refuses_drafts(subject, batches[0], drafts):
            continue
        left += 1
        for method in METHODS:
            for given in batches:
                asked = {**options, **method, "return_dict_in_generate": True, "output_logits": True}
                plain = descant.generate(subject.model, **given, **asked)
                guessed = descant.generate(subject.model, **given, **asked, **drafts)
                assert guessed.sequences.tolist() == plain.sequences.tolist(), f"{name} on {kind}"
                # Of a state, chunks of several tokens round differently from single ones.
                is_state = as_model(_inner(subject.model)).traits.cache_type == "recurrent"
                atol = 1e-3 if is_state else 1e-4
                close(plain.logits, guessed.logits, f"{name} on {kind}: logits", atol)
                tries.add(guessed.speculation)
    if left:
        assert 0 < tries.right < tries.tried, f"{tries.right} of {tries.tried}"
    else:
        assert as_model(subject.model).traits.continues_by_one
