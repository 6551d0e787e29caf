"""Logit arithmetic: several models that read the same text, and one distribution made of what they say."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from descant.core.interfaces import Model, ModelTraits, RankGroup, RowCache
from descant.core.records import ForwardOutput, Proposal
from descant.core.rows import Rows
from descant.errors import InputError

__all__ = ["ContrastiveDecoding", "DExperts", "JointModel", "LogitArithmetic", "ProxyTuning"]

_FLOAT32 = torch.finfo(torch.float32)

# Inputs that hold what one model makes of a text, which says nothing to another.
_MODEL_SPECIFIC_INPUTS = ("inputs_embeds", "encoder_outputs")


class LogitArithmetic(ABC):
    """Models and a formula over their logits, given wherever a model is: `generate(ProxyTuning(...), ...)`.

    The first model leads: what is asked of the whole (its generation config, its states, its own logits) is
    the first one's. All must have one vocabulary, and the same token must mean the same to all of them.
    """

    def __init__(self, **models: Any) -> None:
        distinct: dict[int, tuple[str, Any]] = {}
        for name, model in models.items():
            if model is None:
                raise InputError(name, "must be a model", None)
            distinct.setdefault(id(model), (name, model))
        order = list(distinct)
        self.models = tuple(model for _, model in distinct.values())  # each once, and so fed once
        self.model_names = tuple(name for name, _ in distinct.values())
        # Which of them each of those given is.
        self.model_indices = tuple(order.index(id(model)) for model in models.values())

    @abstractmethod
    def combine(self, logits: Sequence[Tensor]) -> Tensor:
        """The logits of the whole from those of the models [..., V], in the order they were given."""

    @property
    def config(self) -> Any:
        """The first model's."""
        return self.models[0].config

    @property
    def generation_config(self) -> Any:
        """The first model's own; None where it has none."""
        return getattr(self.models[0], "generation_config", None)

    @property
    def main_input_name(self) -> str:
        """The name of the first model's main input."""
        return str(getattr(self.models[0], "main_input_name", "input_ids"))

    @property
    def device(self) -> torch.device:
        """Where the first model is."""
        return torch.device(self.models[0].device)


class ContrastiveDecoding(LogitArithmetic):
    """What an expert finds likely and an amateur does not, among the tokens that the expert finds plausible.

    A token is plausible if its probability is at least `alpha` times that of the expert's likeliest. Its
    logit is log p(expert) - log p(amateur) (Li et al. 2023, arXiv 2210.15097), or with `beta`
    (1 + beta) * expert - beta * amateur in logits (O'Brien and Lewis 2023, arXiv 2309.09117). The amateur's
    logits are divided by `amateur_temperature` first. Beams score the whole as a distribution, normalised.
    """

    def __init__(
        self,
        expert: Any,
        amateur: Any,
        alpha: float = 0.1,
        beta: float | None = None,
        *,
        amateur_temperature: float = 1.0,
    ) -> None:
        super().__init__(expert=expert, amateur=amateur)
        self.alpha = _check_number("alpha", alpha, "from 0 to 1", lambda value: 0 <= value <= 1)
        self.beta = None if beta is None else _check_number("beta", beta, ">= 0", lambda value: value >= 0)
        self.amateur_temperature = _check_number(
            "amateur_temperature", amateur_temperature, "> 0", lambda value: value > 0
        )

    def combine(self, logits: Sequence[Tensor]) -> Tensor:
        """The contrast, -inf where a token is not plausible."""
        expert, amateur = logits
        if self.amateur_temperature != 1:
            amateur = amateur / self.amateur_temperature
        if self.beta is None:
            contrast = expert.log_softmax(-1) - amateur.log_softmax(-1)
        else:
            contrast = _shift_logits(expert, amateur, expert, self.beta)
        least = expert.amax(-1, keepdim=True) + (math.log(self.alpha) if self.alpha else -math.inf)
        # What the expert rules out is never plausible, also where `alpha` rules nothing out.
        return contrast.masked_fill(~(expert >= least.clamp(min=_FLOAT32.min)), -torch.inf)


class ProxyTuning(LogitArithmetic):
    """A model moved by what tuning did to a smaller one: base + alpha * (tuned - untuned), in logits.

    Liu et al. 2024, arXiv 2401.08565.
    """

    def __init__(self, base: Any, tuned: Any, untuned: Any, alpha: float = 1.0) -> None:
        super().__init__(base=base, tuned=tuned, untuned=untuned)
        self.alpha = _check_number("alpha", alpha)

    def combine(self, logits: Sequence[Tensor]) -> Tensor:
        """The base's logits, moved."""
        base, tuned, untuned = logits
        return _shift_logits(base, untuned, tuned, self.alpha)


class DExperts(LogitArithmetic):
    """A model drawn to an expert, away from an anti-expert: base + alpha * (expert - antiexpert), in logits.

    Where one of the two is None the base takes its place. With `top_p` only those tokens remain that make
    up so much of the base's own probability, the likeliest first. Liu et al. 2021, arXiv 2105.03023.
    """

    def __init__(
        self, base: Any, expert: Any, antiexpert: Any, alpha: float = 2.0, *, top_p: float | None = None
    ) -> None:
        if expert is None and antiexpert is None:
            raise InputError("expert", "must be a model where `antiexpert` is None", None)
        super().__init__(
            base=base,
            expert=base if expert is None else expert,
            antiexpert=base if antiexpert is None else antiexpert,
        )
        self.alpha = _check_number("alpha", alpha)
        self.top_p = (
            None
            if top_p is None
            else _check_number("top_p", top_p, "above 0 and at most 1", lambda value: 0 < value <= 1)
        )

    def combine(self, logits: Sequence[Tensor]) -> Tensor:
        """The base's logits, moved."""
        base, expert, antiexpert = logits
        if self.top_p is not None:
            base = _keep_top_p(base, self.top_p)
        return _shift_logits(base, antiexpert, expert, self.alpha)


class _MultiModelCache(RowCache, Protocol):
    """A cache of several parts, one a model."""

    parts: Sequence[RowCache]


class JointModel:
    """The models of an Arithmetic behind one port: each is fed all rows and has a cache of its own."""

    def __init__(
        self, rule: LogitArithmetic, parts: Sequence[Model], caches: Callable[[Sequence[Model]], RowCache]
    ) -> None:
        self.arithmetic = rule
        self.parts = tuple(parts)  # those of `rule.models`, in order
        self.traits: ModelTraits = _joint_traits(rule.model_names, [part.traits for part in parts])
        self.device: torch.device = self.parts[0].device
        found: list[RankGroup | None] = [getattr(part, "rank_group", None) for part in parts]
        self.rank_group = next((one for one in found if one is not None), None)
        self._make_cache = caches

    @property
    def encoder_output(self) -> Any:
        """The first model's encoder's last output, with the states asked for."""
        return getattr(self.parts[0], "encoder_output", {})

    def new_cache(self) -> RowCache:
        """An empty cache with a part for each model."""
        return self._make_cache(self.parts)

    def add_requests(self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]]) -> None:
        """Give every model what new requests give besides decoder tokens."""
        for name in _MODEL_SPECIFIC_INPUTS:
            given = next((one for one in inputs.get(name, ()) if one is not None), None)
            if given is not None:
                must = "is what one model makes of a text, and several read this one"
                raise InputError(name, must, given, "give `input_ids`")
        try:
            for part in self.parts:
                part.add_requests(requests, inputs)
        except Exception:
            self.remove_requests(requests)
            raise

    def remove_requests(self, requests: Sequence[int]) -> None:
        """Forget those requests."""
        for part in self.parts:
            part.remove_requests(requests)

    def set_output_states(self, states: Sequence[str]) -> None:
        """Bring these states of the first model along from the next forward on."""
        self.parts[0].set_output_states(states)

    def forward(self, rows: Rows, proposal: Proposal, cache: RowCache) -> ForwardOutput:
        """Feed every model; the logits of the whole, and the first model's own beside them."""
        own = cast(_MultiModelCache, cache).parts
        heard = [
            part.forward(*_to_device(rows, proposal, part.device), mine)
            for part, mine in zip(self.parts, own, strict=True)
        ]
        first = heard[0]
        logits = [heard[place].logits.to(self.device) for place in self.arithmetic.model_indices]
        # What only one model rules out may be infinitely far from it, which no distribution can hold.
        combined = self.arithmetic.combine(logits).clamp(max=_FLOAT32.max)
        return ForwardOutput(
            combined, first.states, first.logits if first.base_logits is None else first.base_logits
        )


def _to_device(rows: Rows, proposal: Proposal, device: torch.device) -> tuple[Rows, Proposal]:
    """The same rows and drafts where a model takes its inputs."""
    if rows.tokens.device == device:
        return rows, proposal
    drafts = proposal.drafts
    rows = rows.replace(tokens=rows.tokens.to(device, non_blocking=True))
    return rows, proposal if drafts is None else proposal._replace(drafts=drafts.to(device))


def _joint_traits(names: Sequence[str], parts: Sequence[ModelTraits]) -> ModelTraits:
    """What holds of all models together: the first one's facts, made stricter where another's are."""
    first = parts[0]
    for name, facts in zip(names, parts, strict=True):
        if facts.vocab_size != first.vocab_size:
            must = f"must have the vocabulary of `{names[0]}`, {first.vocab_size} tokens"
            raise InputError(name, must, f"{facts.vocab_size} tokens", "take models of one tokenizer")
        if facts.is_encoder_decoder != first.is_encoder_decoder:
            kinds = {True: "an encoder and a decoder", False: "a decoder alone"}
            must = f"must be what `{names[0]}` is, {kinds[first.is_encoder_decoder]}"
            raise InputError(name, must, kinds[facts.is_encoder_decoder])
        if facts.is_encoder_decoder and facts.main_input_name != first.main_input_name:
            raise InputError(
                name, f"must read what `{names[0]}` reads, `{first.main_input_name}`", facts.main_input_name
            )
    return replace(
        first,
        supports_position_ids=all(facts.supports_position_ids for facts in parts),
        has_lm_head=False,  # each has its own, and no hidden state speaks for all
        max_positions=min(
            (facts.max_positions for facts in parts if facts.max_positions is not None), default=None
        ),
        context_length=min(
            (facts.context_length for facts in parts if facts.context_length is not None), default=None
        ),
        cache_type="own" if any(facts.cache_type == "own" for facts in parts) else first.cache_type,
        needs_equal_lengths=any(facts.needs_equal_lengths for facts in parts),
        needs_batch_size_one=any(facts.needs_batch_size_one for facts in parts),
        input_names=frozenset.intersection(*(facts.input_names for facts in parts)),
        placeholder_tokens={
            kind: token
            for kind, token in first.placeholder_tokens.items()
            if all(facts.placeholder_tokens.get(kind) == token for facts in parts)
        },
    )


def _shift_logits(start: Tensor, away: Tensor, towards: Tensor, weight: float) -> Tensor:
    """Logits moved from what one model says towards what another says; what they rule out stays ruled out."""
    # What both rule out is as far from the one as from the other.
    way = torch.where(towards == away, 0.0, towards - away)
    return (start + weight * way).masked_fill(start == -torch.inf, -torch.inf)


def _keep_top_p(logits: Tensor, mass: float) -> Tensor:
    """The logits of the likeliest tokens that make up so much of the probability, -inf for the rest."""
    probs, order = logits.softmax(-1).sort(stable=True, dim=-1, descending=True)
    outside = probs.cumsum(-1) - probs >= mass  # of those before it: the first is always inside
    return logits.masked_fill(outside.scatter(-1, order, outside), -torch.inf)


def _check_number(
    name: str, value: Any, which: str = "that is finite", holds: Callable[[float], bool] = lambda _: True
) -> float:
    """A finite number of which something holds."""
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    if not plain or not math.isfinite(value) or not holds(value):
        raise InputError(name, f"must be a number {which}", value)
    return float(value)
