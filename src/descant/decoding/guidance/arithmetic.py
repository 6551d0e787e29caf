"""Logit arithmetic: several models read the same tokens, a formula combines their logits."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from descant.core.interfaces import Model, ModelTraits, MultiCache, RankGroup, RowCache
from descant.core.records import ForwardOutput, Proposal
from descant.core.rows import Rows
from descant.errors import InputError

__all__ = ["ContrastiveDecoding", "DExperts", "JointModel", "LogitArithmetic", "ProxyTuning"]

_FLOAT32 = torch.finfo(torch.float32)

# Inputs computed by one model, meaningless to another.
_MODEL_SPECIFIC_INPUTS = ("inputs_embeds", "encoder_outputs")


class LogitArithmetic(ABC):
    """Models and a formula over their logits, usable wherever a model is: `generate(ProxyTuning(...), ...)`.

    The first model is the main one: generation config, hidden states and raw logits are taken from it. All
    models must share one vocabulary, with the same meaning of every token.
    """

    def __init__(self, **models: Any) -> None:
        distinct: dict[int, tuple[str, Any]] = {}
        for name, model in models.items():
            if model is None:
                raise InputError(name, "must be a model", None)
            distinct.setdefault(id(model), (name, model))
        order = list(distinct)
        self.models = tuple(model for _, model in distinct.values())  # distinct models, each fed once
        self.model_names = tuple(name for name, _ in distinct.values())
        # Index into `models` of each argument.
        self.model_indices = tuple(order.index(id(model)) for model in models.values())

    @abstractmethod
    def combine(self, logits: Sequence[Tensor]) -> Tensor:
        """The combined logits from those of the models [..., V], in argument order."""

    @property
    def config(self) -> Any:
        """The first model's config."""
        return self.models[0].config

    @property
    def generation_config(self) -> Any:
        """The first model's generation config; None if it has none."""
        return getattr(self.models[0], "generation_config", None)

    @property
    def main_input_name(self) -> str:
        """The name of the first model's main input."""
        return str(getattr(self.models[0], "main_input_name", "input_ids"))

    @property
    def device(self) -> torch.device:
        """The first model's device."""
        return torch.device(self.models[0].device)


class ContrastiveDecoding(LogitArithmetic):
    """Prefer tokens that an expert rates higher than an amateur, among those plausible to the expert.

    A token is plausible if its probability is at least `alpha` times the expert's maximum. Its logit is
    log p(expert) - log p(amateur) (Li et al. 2023, arXiv 2210.15097), or with `beta`
    (1 + beta) * expert - beta * amateur in logits (O'Brien and Lewis 2023, arXiv 2309.09117). The amateur's
    logits are first divided by `amateur_temperature`. Beam search normalises the combined logits.
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
        """The contrast, -inf for implausible tokens."""
        expert, amateur = logits
        if self.amateur_temperature != 1:
            amateur = amateur / self.amateur_temperature
        if self.beta is None:
            contrast = expert.log_softmax(-1) - amateur.log_softmax(-1)
        else:
            contrast = _shift_logits(expert, amateur, expert, self.beta)
        threshold = expert.amax(-1, keepdim=True) + (math.log(self.alpha) if self.alpha else -math.inf)
        # Tokens at -inf for the expert are never plausible, even with `alpha` = 0.
        return contrast.masked_fill(~(expert >= threshold.clamp(min=_FLOAT32.min)), -torch.inf)


class ProxyTuning(LogitArithmetic):
    """Shift a model by the effect of tuning a smaller one: base + alpha * (tuned - untuned), in logits.

    Liu et al. 2024, arXiv 2401.08565.
    """

    def __init__(self, base: Any, tuned: Any, untuned: Any, alpha: float = 1.0) -> None:
        super().__init__(base=base, tuned=tuned, untuned=untuned)
        self.alpha = _check_number("alpha", alpha)

    def combine(self, logits: Sequence[Tensor]) -> Tensor:
        """The shifted base logits."""
        base, tuned, untuned = logits
        return _shift_logits(base, untuned, tuned, self.alpha)


class DExperts(LogitArithmetic):
    """Shift a model towards an expert, away from an anti-expert: base + alpha * (expert - antiexpert).

    If one of the two is None, the base takes its place. With `top_p` only the most likely tokens that make up
    this share of the base's probability remain. Liu et al. 2021, arXiv 2105.03023.
    """

    def __init__(
        self, base: Any, expert: Any, antiexpert: Any, alpha: float = 2.0, *, top_p: float | None = None
    ) -> None:
        if expert is None and antiexpert is None:
            raise InputError("expert", "must be a model if `antiexpert` is None", None)
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
        """The shifted base logits."""
        base, expert, antiexpert = logits
        if self.top_p is not None:
            base = _keep_top_p(base, self.top_p)
        return _shift_logits(base, antiexpert, expert, self.alpha)


class JointModel:
    """The models of a `LogitArithmetic` as one model: each is fed all rows and has its own cache."""

    def __init__(
        self,
        arithmetic: LogitArithmetic,
        parts: Sequence[Model],
        make_cache: Callable[[Sequence[Model]], RowCache],
    ) -> None:
        self.arithmetic = arithmetic
        self.parts = tuple(parts)  # one for each of `arithmetic.models`
        self.traits: ModelTraits = _joint_traits(arithmetic.model_names, [part.traits for part in parts])
        self.device: torch.device = self.parts[0].device
        self.network: Any = None  # there are several
        rank_groups = [part.rank_group for part in parts]
        self.rank_group: RankGroup | None = next((group for group in rank_groups if group is not None), None)
        self._make_cache = make_cache

    @property
    def encoder(self) -> Any:
        """The first model's encoder."""
        return getattr(self.parts[0], "encoder", None)

    def new_cache(self) -> RowCache:
        """An empty cache with one part per model."""
        return self._make_cache(self.parts)

    def max_request_length(self, inputs: Mapping[str, Any]) -> int | None:
        """The most tokens of a row with these inputs, prompt included; None: no model has a limit."""
        limits = [getattr(part, "max_request_length", lambda _: None)(inputs) for part in self.parts]
        return min((limit for limit in limits if limit is not None), default=None)

    def add_requests(self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]]) -> None:
        """Pass the inputs of new requests to every model."""
        for name in _MODEL_SPECIFIC_INPUTS:
            value = next((item for item in inputs.get(name, ()) if item is not None), None)
            if value is not None:
                must = "must not be given with several models, as it is computed by one of them"
                raise InputError(name, must, value, "pass `input_ids`")
        try:
            for part in self.parts:
                part.add_requests(requests, inputs)
        except BaseException:
            self.remove_requests(requests)
            raise

    def remove_requests(self, requests: Sequence[int]) -> None:
        """Remove requests."""
        for part in self.parts:
            part.remove_requests(requests)

    def set_output_states(self, states: Sequence[str]) -> None:
        """Return these states of the first model from the next forward on."""
        self.parts[0].set_output_states(states)

    def forward(self, rows: Rows, proposal: Proposal, cache: RowCache) -> ForwardOutput:
        """Feed every model; returns the combined logits and the first model's raw logits."""
        caches = cast(MultiCache, cache).parts
        outputs = [
            part.forward(*_to_device(rows, proposal, part.device), part_cache)
            for part, part_cache in zip(self.parts, caches, strict=True)
        ]
        first = outputs[0]
        logits = [outputs[index].logits.to(self.device) for index in self.arithmetic.model_indices]
        # A token at -inf for one model only can become +inf, which softmax cannot handle.
        combined = self.arithmetic.combine(logits).clamp(max=_FLOAT32.max)
        return ForwardOutput(
            combined, first.states, first.logits if first.base_logits is None else first.base_logits
        )


def _to_device(rows: Rows, proposal: Proposal, device: torch.device) -> tuple[Rows, Proposal]:
    """The rows and drafts on the device of a model."""
    if rows.tokens.device == device:
        return rows, proposal
    drafts = proposal.drafts
    rows = rows.replace(tokens=rows.tokens.to(device, non_blocking=True))
    return rows, proposal if drafts is None else proposal._replace(drafts=drafts.to(device))


def _joint_traits(names: Sequence[str], parts: Sequence[ModelTraits]) -> ModelTraits:
    """The first model's traits, restricted to what all models support."""
    first = parts[0]
    for name, traits in zip(names, parts, strict=True):
        if traits.vocab_size != first.vocab_size:
            must = f"must have the vocabulary size of `{names[0]}`, {first.vocab_size} tokens"
            raise InputError(name, must, f"{traits.vocab_size} tokens", "use models with the same tokenizer")
        if traits.is_encoder_decoder != first.is_encoder_decoder:
            kinds = {True: "an encoder-decoder model", False: "a decoder-only model"}
            must = f"must be {kinds[first.is_encoder_decoder]} like `{names[0]}`"
            raise InputError(name, must, kinds[traits.is_encoder_decoder])
        if traits.is_encoder_decoder and traits.main_input_name != first.main_input_name:
            raise InputError(
                name,
                f"must have the main input of `{names[0]}`, `{first.main_input_name}`",
                traits.main_input_name,
            )
    return replace(
        first,
        supports_position_ids=all(traits.supports_position_ids for traits in parts),
        has_lm_head=False,  # no single head maps hidden states to the combined logits
        max_positions=min(
            (traits.max_positions for traits in parts if traits.max_positions is not None), default=None
        ),
        context_length=min(
            (traits.context_length for traits in parts if traits.context_length is not None), default=None
        ),
        cache_type="recurrent"
        if any(traits.cache_type == "recurrent" for traits in parts)
        else first.cache_type,
        needs_equal_lengths=any(traits.needs_equal_lengths for traits in parts),
        needs_batch_size_one=any(traits.needs_batch_size_one for traits in parts),
        input_names=frozenset.intersection(*(traits.input_names for traits in parts)),
        needs_own_cache=True,
        placeholder_tokens={
            kind: token
            for kind, token in first.placeholder_tokens.items()
            if all(traits.placeholder_tokens.get(kind) == token for traits in parts)
        },
    )


def _shift_logits(start: Tensor, away: Tensor, towards: Tensor, weight: float) -> Tensor:
    """`start + weight * (towards - away)`; tokens at -inf in `start` stay there."""
    # Equal values, -inf included, have distance 0.
    direction = torch.where(towards == away, 0.0, towards - away)
    return (start + weight * direction).masked_fill(start == -torch.inf, -torch.inf)


def _keep_top_p(logits: Tensor, mass: float) -> Tensor:
    """The logits of the most likely tokens that make up `mass` of the probability, -inf for the rest."""
    probs, order = logits.softmax(-1).sort(stable=True, dim=-1, descending=True)
    outside = probs.cumsum(-1) - probs >= mass  # the mass before each token: the first is always inside
    return logits.masked_fill(outside.scatter(-1, order, outside), -torch.inf)


def _check_number(
    name: str, value: Any, expected: str = "that is finite", holds: Callable[[float], bool] = lambda _: True
) -> float:
    """A finite number that satisfies `holds`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not holds(value):
        raise InputError(name, f"must be a number {expected}", value)
    return float(value)
