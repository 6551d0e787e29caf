"""A case: everything that one seed stands for."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from descant import GenerationConfig, Request
from tools.fuzz.fields import (
    METHODS,
    Fields,
    length_fields,
    method_names,
    processor_fields,
    stop_fields,
)
from tools.fuzz.known import avoided
from tools.fuzz.subjects import KINDS, Store, Subject, subject, tokenizer

__all__ = ["Action", "Ask", "Case", "case_of"]

_DRAFTER_FIELDS = (
    "prompt_lookup_num_tokens", "max_matching_ngram_size", "suffix_lookup_num_tokens", "suffix_lookup_shared",
    "assistant_early_exit", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
)  # fmt: skip
_TEXTUAL = ("stop_strings", "stop_regex", "banned_phrases", "token_healing")


class Tilt:
    """A user's processor: a bias by the last token and by the length."""

    def __init__(self, salt: int) -> None:
        self.salt = salt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The scores [N, V] with a bias."""
        token = torch.arange(scores.shape[1])[None] + input_ids[:, -1:] * 3 + self.salt
        return scores + (token % 5).to(scores.dtype) * 0.3

    def __repr__(self) -> str:
        return f"Tilt({self.salt})"


class Enough:
    """A user's stopping criterion, by the last two tokens."""

    def __init__(self, modulus: int) -> None:
        self.modulus = modulus

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:  # noqa: ARG002
        """Which rows end [N]."""
        return (input_ids[:, -1] * 3 + input_ids[:, -2]) % self.modulus == 0

    def __repr__(self) -> str:
        return f"Enough({self.modulus})"


class Blocked:
    """A user's processor that leaves no token after some calls."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # noqa: ARG002
        """The scores, or -inf."""
        self.calls -= 1
        return scores if self.calls >= 0 else torch.full_like(scores, -torch.inf)


@dataclass(frozen=True)
class Ask:
    """One request as plain data."""

    method: str
    prompt: tuple[int, ...]  # of the decoder
    fields: Fields
    source: tuple[int, ...] = ()  # the encoder's input
    negative: tuple[int, ...] = ()
    processors: tuple[Any, ...] = ()
    criteria: tuple[Any, ...] = ()
    drafts: bool = False  # with a draft model
    fails_after: int | None = None  # calls after which a processor leaves no token
    store: Store | None = None  # the cache that it names

    @property
    def is_drafted(self) -> bool:
        """Whether it has a drafter."""
        return self.drafts or any(name in self.fields for name in _DRAFTER_FIELDS)

    @property
    def is_lossy(self) -> bool:
        """Whether its cache does not keep everything."""
        return self.store is not None and self.store.lossy

    @property
    def needs_text(self) -> bool:
        """Whether it needs a tokenizer."""
        return any(self.fields.get(name) for name in _TEXTUAL)

    def without_drafter(self) -> Ask:
        """The same without what drafts."""
        kept = {name: value for name, value in self.fields.items() if name not in _DRAFTER_FIELDS}
        return replace(self, fields=kept, drafts=False)

    def on(self, store: Store | None) -> Ask:
        """The same on a cache; None: the default."""
        return replace(self, store=store)

    def config(self) -> GenerationConfig:
        """Its config."""
        return GenerationConfig(**self.fields, **(self.store.fields() if self.store else {}))

    def request(self, on: Subject) -> Request:
        """It as a request of a session."""
        inputs: dict[str, Any] = {"input_ids": torch.tensor(self.source)} if self.source else {}
        if self.negative:
            inputs["negative_prompt_ids"] = torch.tensor(self.negative)
        failing = () if self.fails_after is None else (Blocked(self.fails_after),)
        return Request(
            list(self.prompt),
            self.config(),
            inputs,
            logits_processor=(*self.processors, *failing),
            stopping_criteria=self.criteria,
            tokenizer=tokenizer(on.vocab) if self.needs_text else None,
            assistant_model=on.draft if self.drafts else None,
        )


@dataclass(frozen=True)
class Action:
    """What is done before a step: "admit", "cancel", "peek" some requests, or "refuse" a wrong one."""

    kind: str
    asks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Case:
    """Requests on a model, the caches to run them on, and when each comes and goes."""

    seed: int
    subject_name: str
    asks: tuple[Ask, ...]
    other: Store  # another exact cache; the same where the model has only one
    actions: dict[int, tuple[Action, ...]] = field(default_factory=dict)
    prefix_cache: int = 0  # tokens of a block; 0: the session has none
    trace: bool = False
    through_generate: bool = False  # alone: by `generate` instead of a session

    @property
    def subject(self) -> Subject:
        """Its model."""
        return subject(self.subject_name)

    @functools.cached_property
    def cancelled(self) -> frozenset[int]:
        """Requests that are cancelled, if they have not ended by then."""
        actions = [action for some in self.actions.values() for action in some]
        return frozenset(ask for action in actions if action.kind == "cancel" for ask in action.asks)

    @property
    def mixes_caches(self) -> bool:
        """Whether its requests name different caches."""
        return len({None if ask.store is None else ask.store.name for ask in self.asks}) > 1

    @property
    def last_step(self) -> int:
        """The last step with an action."""
        return max(self.actions, default=0)


def case_of(seed: int) -> Case:
    """The case of a seed."""
    rng = random.Random(f"case {seed}")
    name = rng.choices(list(KINDS), list(KINDS.values()))[0]
    on = subject(name)
    lossy = bool(on.lossy) and rng.random() < 0.25
    store = rng.choice(on.lossy) if lossy else rng.choice((None, *on.exact))
    others = [one for one in on.exact if store is None or one.name != store.name] or list(on.exact)
    other = rng.choice(others)
    rewinds = (store is None or store.rewinds) and other.rewinds
    count = rng.choice((1, 2, 2, 2, 2, 3, 3, 4))
    asks = []
    for index in range(count):
        ask = _ask(rng, on, rewinds, asks)
        names_none = lossy and index > 0 and rng.random() < 0.3
        asks.append(ask if names_none and not avoided("lossy neighbours") else ask.on(store))
    return Case(
        seed,
        name,
        tuple(asks),
        other,
        _actions(rng, on, asks),
        prefix_cache=rng.choice((2, 4)) if _can_share(on, store) and rng.random() < 0.2 else 0,
        trace=rng.random() < 0.1,
        through_generate=rng.random() < 0.3,
    )


def _can_share(on: Subject, store: Store | None) -> bool:
    """Whether prompts may be kept for later requests."""
    return on.cache_type == "kv" and not on.encodes and (store is None or store.rewinds)


def _ask(rng: random.Random, on: Subject, rewinds: bool, earlier: Sequence[Ask]) -> Ask:
    names = method_names(on, rewinds)
    method = rng.choices(list(names), list(names.values()))[0]
    fields = METHODS[method][1](rng, on)
    text = _text(rng, on, earlier)
    prompt, source = (text, ()) if not on.encodes else (_begin(rng, on), text)
    fields |= length_fields(rng, len(prompt))
    fields |= stop_fields(rng, on)
    fields |= processor_fields(rng, on, method, fields)
    if rng.random() < 0.25:
        fields["logprobs"] = rng.randint(0, 3)
    chunks = on.cache_type == "kv" and not on.encodes and "penalty_alpha" not in fields
    if rng.random() < 0.1 and chunks:
        fields["prefill_chunk_size"] = rng.randint(1, 5)
    guided = "guidance" in method and rng.random() < 0.5
    return Ask(
        method,
        prompt,
        fields,
        source,
        negative=tuple(rng.choices(on.tokens, k=rng.randint(1, 9))) if guided else (),
        processors=(Tilt(rng.randrange(5)),) if rng.random() < 0.1 else (),
        criteria=(Enough(rng.choice((3, 7, 11))),) if rng.random() < 0.1 else (),
        drafts="draft model" in method,
        fails_after=rng.randint(0, 5) if rng.random() < 0.04 else None,
    )


def _begin(rng: random.Random, on: Subject) -> tuple[int, ...]:
    """What a decoder begins with, behind its start token."""
    assert on.start is not None
    more = rng.choices(on.tokens, k=rng.randint(1, 4)) if rng.random() < 0.25 else ()
    return (on.start, *more)


def _text(rng: random.Random, on: Subject, earlier: Sequence[Ask]) -> tuple[int, ...]:
    """A prompt: of few words or many, and sometimes one that begins as an earlier one."""
    length = rng.choice((1, 2, 3, 5, 7, 9, 12, 16))
    words = rng.sample(on.tokens, rng.choice((3, 6, 20)))
    text = tuple(rng.choices(words, k=length))
    if earlier and rng.random() < 0.3:
        known = rng.choice(earlier)
        text = ((known.source or known.prompt)[: rng.randint(1, 12)] + text)[:20]
    return text


def _actions(rng: random.Random, on: Subject, asks: Sequence[Ask]) -> dict[int, tuple[Action, ...]]:
    """When requests are admitted, cancelled and looked at, and when wrong ones are tried."""
    latest = rng.choice((0, 0, 2, 5))
    actions: dict[int, list[Action]] = {}
    for index in rng.sample(range(len(asks)), len(asks)):
        step = rng.randint(0, latest)
        before = actions.setdefault(step, [])
        if before and before[-1].kind == "admit" and rng.random() < 0.5:
            before[-1] = Action("admit", (*before[-1].asks, index))
        else:
            before.append(Action("admit", (index,)))
        if rng.random() < 0.2 and len(asks) > 1:
            later = step + rng.choice((0, 1, 1, 2, 5))
            if avoided("cancel before the first step") and on.encodes and later == step:
                later += 1
            actions.setdefault(later, []).append(Action("cancel", (index,)))
        if rng.random() < 0.1:
            actions.setdefault(step + rng.randint(1, 4), []).append(Action("peek", (index,)))
    if rng.random() < 0.15:
        step = rng.randint(0, latest)
        if not (avoided("refused encoder requests") and on.encodes):
            actions.setdefault(step, []).append(Action("refuse"))
    if avoided("cancel before the first step") and on.encodes:
        for some in actions.values():  # what was admitted for this step has not had one
            some.sort(key=lambda action: action.kind == "admit")
    return {step: tuple(some) for step, some in actions.items()}
