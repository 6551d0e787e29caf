"""A case: everything that one seed stands for."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from descant import GenerationConfig, Recipe, Request
from tools.fuzz.branching import Branching
from tools.fuzz.fields import Fields
from tools.fuzz.subjects import Store, Subject, adapted, subject, tokenizer

__all__ = ["Action", "Ask", "Case", "Enough", "Tilt"]

_DRAFTER_FIELDS = (
    "prompt_lookup_num_tokens", "max_matching_ngram_size", "suffix_lookup_num_tokens", "suffix_lookup_shared",
    "assistant_early_exit", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
)  # fmt: skip
_TEXTUAL = ("stop_strings", "stop_regex", "banned_phrases", "token_healing", "grammar")


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
    adapter: str | None = None
    priority: int = 0
    prompt_logprobs: int | None = None
    branches: int = 0  # sequences that a strategy of a third party forks it into; 0: it has a built-in one

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

    def by_itself(self) -> Ask:
        """The same without what only an engine or a batch knows."""
        return replace(self, adapter=None, priority=0, prompt_logprobs=None)

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
            recipe=Recipe.from_object(Branching)(most=self.branches) if self.branches else None,
            prompt_logprobs=self.prompt_logprobs,
            priority=self.priority,
            adapter_name=self.adapter,
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
    has_adapters: bool = False
    scheduler: Mapping[str, Any] | None = None  # fields of its config; None: the session has none
    spare_blocks: int | None = None  # of the pool, beside those of the largest request; None: it has no limit
    change: str = ""  # of the weights, after a first run that fills the prefix cache
    in_engine: bool = False  # the crowd: in an `AsyncEngine` instead of a session

    def subject(self) -> Subject:
        """Its model; one of its own if its weights change."""
        on = adapted(self.subject_name) if self.has_adapters else subject(self.subject_name)
        return replace(on, model=copy.deepcopy(on.model), folder=None) if self.change else on

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
