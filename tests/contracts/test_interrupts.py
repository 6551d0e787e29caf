"""A step that is interrupted anywhere in a forward can be made again, and nothing tells that it was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from descant import ContrastiveDecoding, Finished, GenerationConfig, Request, Session
from descant.api.inputs import prepare_prompts
from descant.models.forward.traits import traits_of
from tests.contracts.test_cache_matrix import CACHES, TIGHT
from tests.support.tiny_models import prompts
from tests.unit.decoding.guidance import pairs
from tools.sweep.kinds import representative
from tools.sweep.subject import Subject
from tools.sweep.trial import subject_of

METHODS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "seed": 5},
    "beams": {"num_beams": 3},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 3},
    "guided": {"guidance_scale": 1.5},
}
# In CI: recurrent, a hybrid, an encoder-decoder, and an image that is fed once.
SHOWN = (
    "recurrent",
    "recurrent and attention by layer",
    "encoder-decoder, learned positions",
    "images in a prompt",
)
KINDS = (
    *SHOWN,
    "recurrent and attention in one layer",
    "linear attention",
    "state on its modules",
    "a cache class of its own",
    "state under another name",
    "rows one by one",
    "no memory at all",
    "memory along another dimension",
    "a prefix of its own in the cache",
    "images by cross-attention",
    "images before the prompt",
    "multimodal positions (M-RoPE)",
)
EVERY = [pytest.param(kind, marks=() if kind in SHOWN else pytest.mark.slow) for kind in KINDS]


class Interruption:
    """Raises KeyboardInterrupt at one call or return of a module, once armed."""

    def __init__(self) -> None:
        self.left = -1
        self.calls = 0

    def tick(self, *_: Any) -> None:
        """Count a call or a return."""
        self.calls += 1
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Be told of the calls and returns of every module."""
        hooks = [register_module_forward_pre_hook(self.tick), register_module_forward_hook(self.tick)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def interrupted(model: Any, requests: Sequence[Request], shift: int, stride: int) -> list[list[list[int]]]:
    """The tokens of requests in one session; every step is interrupted, each at another place, then made."""
    session, clock = Session(model), Interruption()
    numbers = session.admit(*requests)
    found: dict[int, list[list[int]]] = {}
    place, ticks = shift, 40
    with clock.watching():
        while len(session):
            place = (place + stride) % (ticks + 1)
            clock.left, clock.calls = place + 1, 0
            try:
                events = session.step()
            except KeyboardInterrupt:
                clock.left, clock.calls = -1, 0
                events = session.step()
            ticks = clock.calls
            for event in events:
                if isinstance(event, Finished):
                    found[event.request] = [one.tokens.tolist() for one in event.hypotheses]
    return [found[number] for number in numbers]


def alone(model: Any, requests: Sequence[Request]) -> list[list[list[int]]]:
    """The tokens of each request in a session of its own."""
    found = []
    for request in requests:
        session = Session(model)
        session.admit(request)
        ended = [event for event in session.drain() if isinstance(event, Finished)]
        found.append([one.tokens.tolist() for one in ended[0].hypotheses])
    return found


def kind_requests(subject: Subject) -> list[Request]:
    """A request for each method that a kind of model has."""
    facts = traits_of(subject.model)
    own = GenerationConfig.from_transformers(subject.model.generation_config)
    found = []
    for number, (name, fields) in enumerate(METHODS.items()):
        if name == "guided" and facts.is_encoder_decoder:
            continue
        config = GenerationConfig.merge({**fields, "max_new_tokens": 5 + number % 3}, None, own)
        prompt = subject.prompts[number % len(subject.prompts)]
        with torch.no_grad():
            ready = prepare_prompts(prompt, config, facts, torch.device("cpu"))
        found.append(Request(ready.prompt(0), config, ready.inputs[0]))
    return found


@pytest.mark.parametrize("kind", EVERY)
def test_a_kind_of_model_goes_on_after_an_interrupt(kind: str) -> None:
    subject = subject_of(representative(kind))
    given = kind_requests(subject)
    expected = alone(subject.model, given)
    for shift, stride in ((0, 7), (3, 11)):
        assert interrupted(subject.model, given, shift, stride) == expected


def cache_cases() -> list[Any]:
    """Every cache with room for all, and those that forget with little room."""
    cases = [(name, models[0], settings) for name, (models, settings) in CACHES.items()]
    return cases + [(name, model, settings) for name, (model, settings) in TIGHT.items()]


@pytest.mark.parametrize(("name", "model", "settings"), cache_cases())
def test_a_cache_goes_on_after_an_interrupt(name: str, model: str, settings: dict[str, Any]) -> None:
    methods = ("greedy", "sampling", "beams") if name in TIGHT else tuple(METHODS)
    fields = {"cache_implementation": name, "cache_config": settings or None}
    own = pairs.arch(model, 0)
    texts = prompts(own, [5, 9, 3, 7, 4], 0)
    given = [
        Request(text, GenerationConfig(**METHODS[method], **fields, max_new_tokens=8 + number))
        for number, (text, method) in enumerate(zip(texts, methods, strict=False))
    ]
    subject = pairs.made(model, 0)
    assert interrupted(subject, given, 1, 9) == alone(subject, given)


@pytest.mark.parametrize("draft", ["llama", "mamba"])
def test_a_draft_model_goes_on_after_an_interrupt(draft: str) -> None:
    target, assistant = pairs.made("llama", 0), pairs.made(draft, 4)
    plain = [GenerationConfig(max_new_tokens=5 + 4 * number) for number in range(3)]
    given = pairs.requests("llama", plain)
    expected = alone(target, given)
    drafted = [
        replace(one, assistant_model=assistant, generation_config=config.replace(num_assistant_tokens=3))
        for one, config in zip(given, plain, strict=True)
    ]
    for shift in range(3):
        assert interrupted(target, drafted, shift, 13) == expected


def test_several_models_go_on_after_an_interrupt() -> None:
    joint = ContrastiveDecoding(pairs.made("llama", 3), pairs.made("mamba", 4))
    given = pairs.requests("llama", [GenerationConfig(max_new_tokens=6 + number) for number in range(3)])
    assert interrupted(joint, given, 2, 9) == alone(joint, given)
