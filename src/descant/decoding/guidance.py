"""Model wrappers that change the next-token distribution."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

import torch
from torch import Tensor

from descant.core.context import row_params
from descant.core.interfaces import Model, ModelTraits, MultiCache, RankGroup, RowCache
from descant.core.records import ForwardOutput, Proposal
from descant.core.rows import Rows, index_rows, on_device
from descant.decoding.processors.grammar import GRAMMAR_PARAM
from descant.errors import ConfigError, InputError, UnsupportedModel
from descant.kv_cache.row_views import PairedRowCache


class ModelWrapper:
    """A model around an inner model; everything a subclass does not override is passed through."""

    required_states: tuple[str, ...] = ()  # outputs it needs from each forward besides logits
    row_flag: str = ""  # row parameter that enables it, for wrappers made by recipes
    _active_rows: tuple[object, Tensor] | None = None

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def traits(self) -> ModelTraits:
        """The inner model's traits."""
        traits: ModelTraits = self.inner.traits
        return traits

    @property
    def network(self) -> Any:
        """That of the model inside."""
        return self.inner.network

    @property
    def rank_group(self) -> RankGroup | None:
        """That of the model inside."""
        group: RankGroup | None = self.inner.rank_group
        return group

    def new_cache(self) -> RowCache:
        """An empty cache for the model inside."""
        cache: RowCache = self.inner.new_cache()
        return cache

    @property
    def device(self) -> torch.device:
        """The inner model's input device."""
        device: torch.device = self.inner.device
        return device

    def active_rows(self, rows: Rows) -> Tensor:
        """The rows that enable this wrapper [N] (host)."""
        if self._active_rows is None or self._active_rows[0] != rows.version:
            column = row_params(rows).values.get(self.row_flag)
            flags = torch.zeros(len(rows)) if not isinstance(column, Tensor) else column
            self._active_rows = (rows.version, (flags == 1).nonzero().squeeze(1))
        return self._active_rows[1]

    def set_output_states(self, states: Sequence[str]) -> None:
        """Return these states from the next forward on."""
        self.inner.set_output_states(states)

    def add_requests(self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]]) -> None:
        """Pass the inputs of new requests to the inner model."""
        self.inner.add_requests(requests, inputs)

    def remove_requests(self, requests: Sequence[int]) -> None:
        """Remove requests."""
        self.inner.remove_requests(requests)

    def wrap_cache(self, cache: RowCache) -> RowCache:
        """The cache this wrapper needs around the inner cache: unchanged by default."""
        return cache


NEGATIVE_PROMPT_KEY: Final = "negative_prompt_ids"  # the request input that holds it


class ClassifierFreeGuidance(ModelWrapper):
    """A model with logits `u + scale * (c - u)` of its conditional and unconditional log-probabilities.

    Every guided row has an unconditional row in the cache (Sanchez et al. 2023, arXiv 2306.17806): the same
    new tokens after the negative prompt, or by default after the prompt's last token. Both are fed in one
    forward, and the unconditional row follows its row on every fork. Rows without guidance have none.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._negative_prompts: dict[int, Tensor] = {}  # by request (host)

    def add_requests(self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]]) -> None:
        """Store the negative prompts of new requests and pass on the other inputs."""
        for request, ids in zip(requests, inputs.get(NEGATIVE_PROMPT_KEY, ()), strict=False):
            if ids is not None:
                self._negative_prompts[request] = torch.as_tensor(ids).cpu()
        self.inner.add_requests(
            requests, {name: values for name, values in inputs.items() if name != NEGATIVE_PROMPT_KEY}
        )

    def remove_requests(self, requests: Sequence[int]) -> None:
        """Remove requests."""
        self.inner.remove_requests(requests)
        for request in requests:
            self._negative_prompts.pop(request, None)

    def wrap_cache(self, cache: RowCache) -> RowCache:
        """The cache with unconditional rows."""
        return PairedRowCache(cache)

    def forward(self, rows: Rows, proposal: Proposal, cache: RowCache) -> ForwardOutput:
        """The logits of every row, guided where a row enables it."""
        assert isinstance(cache, PairedRowCache)
        params = row_params(rows)
        flags = params.values.get("uses_guidance")
        guided = torch.zeros(0, dtype=torch.long)
        if flags is not None:
            guided = (torch.as_tensor(flags) == 1).nonzero().squeeze(1)
            self._add_unconditional(rows, guided[cache.uncond_row[guided] < 0], cache)
        fed_rows, fed_proposal = rows, Proposal(None, proposal.drafts, proposal.num_drafts)
        if len(guided):
            fed_rows = rows.replace(columns={}).cat(self._unconditional_rows(rows, guided, cache))
            fed_rows = fed_rows.replace(columns={"params": params.extend(len(guided))})
            fed_proposal = fed_proposal.take(torch.cat((torch.arange(len(rows)), guided)))
        order = cache.inner_order(guided)
        if order is not None:
            fed_rows, fed_proposal = fed_rows.take(order), fed_proposal.take(order)
        output: ForwardOutput = self.inner.forward(fed_rows, fed_proposal, cache.inner)
        base_logits = output.logits if output.base_logits is None else output.base_logits
        row_logits, row_base_logits = (
            block[: len(rows)] if order is None else index_rows(block, cache.row_index)
            for block in (output.logits, base_logits)
        )
        states = [{**part, "rows": cache.outer_row[part["rows"]]} for part in output.states]
        if not len(guided):
            return ForwardOutput(row_logits, states, None if output.base_logits is None else row_base_logits)
        unconditional = index_rows(output.logits, cache.uncond_row[guided]).log_softmax(-1)
        conditional = index_rows(row_logits, guided).log_softmax(-1)
        scale = on_device(params["guidance_scale"][guided].float(), conditional.device)[:, None, None]
        combined = torch.where(
            conditional == unconditional, unconditional, unconditional + (conditional - unconditional) * scale
        )
        combined = torch.where(
            conditional == -torch.inf, conditional, combined
        )  # tokens at -inf stay at -inf
        return ForwardOutput(
            row_logits.index_copy(0, on_device(guided, row_logits.device), combined), states, row_base_logits
        )

    def _add_unconditional(self, rows: Rows, new: Tensor, cache: PairedRowCache) -> None:
        """Add unconditional rows for the rows `new`."""
        if not len(new):
            return
        offsets = []
        for row in new.tolist():
            request, prompt = int(rows.request[row]), int(rows.prompt_length[row])
            if request not in self._negative_prompts:
                self._negative_prompts[request] = rows.tokens[row, prompt - 1 : prompt].cpu()
            offsets.append(len(self._negative_prompts[request]) - prompt - int(rows.offset[row]))
        cache.add_uncond_rows(new, torch.tensor(offsets), rows.cached_length[new])

    def _unconditional_rows(self, rows: Rows, guided: Tensor, cache: PairedRowCache) -> Rows:
        """The unconditional rows of the rows `guided`: the negative prompts and the new tokens."""
        conditional = rows.replace(columns={}).take(guided)
        prompts = [self._negative_prompts[request] for request in conditional.request.tolist()]
        prompt_sizes = torch.tensor([len(prompt) for prompt in prompts])
        length = prompt_sizes + conditional.length - conditional.prompt_length
        # After the negative prompt, position `p` is position `p - prompt_size + prompt_length` of the row.
        source = torch.arange(int(length.max())) + (conditional.prompt_length - prompt_sizes)[:, None]
        index = on_device(source.clamp(0, conditional.tokens.shape[1] - 1), conditional.tokens.device)
        tokens = conditional.tokens.gather(1, index)
        padded = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
        in_prompt = on_device(torch.arange(padded.shape[1]) < prompt_sizes[:, None], tokens.device)
        tokens[:, : padded.shape[1]] = torch.where(
            in_prompt, on_device(padded, tokens.device), tokens[:, : padded.shape[1]]
        )
        return conditional.replace(
            tokens=tokens,
            length=length,
            cached_length=cache.uncond_lengths(guided, conditional.cached_length),
            offset=torch.zeros_like(prompt_sizes),
            prompt_length=prompt_sizes,
            request=-1 - conditional.request,  # no request's: side inputs do not apply to unconditional rows
        )


# Tokens below this share of the maximum probability are masked.
RELATIVE_TOP: Final = 0.1
_IMPLAUSIBLE: Final = 1e3  # subtracted instead of masking, where a grammar may leave nothing else
_MIN_LOGPROB: Final = -80.0  # smaller log-probabilities are treated as equal


class DoLa(ModelWrapper):
    """A model whose logits contrast its last layer with an early one (Chuang et al. 2024, arXiv 2309.03883).

    Of a row's early layers, the one whose prediction at that position differs most from the last layer's is
    used (Jensen-Shannon divergence). Early predictions are the hidden states of the same forward passed
    through the LM head. Rows that do not enable it are unchanged.
    """

    required_states = ("hidden_states",)

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._layout: tuple[object, Tensor, Tensor, list[int], Tensor] | None = None
        # Whether the logits are exactly the LM head applied to the last hidden states; None: not yet known.
        self._logits_match_head: bool | None = None

    def forward(self, rows: Rows, proposal: Proposal, cache: RowCache) -> ForwardOutput:
        """The contrast, for the rows that enable it."""
        active, active_index, layers, wanted = self._row_layout(rows)
        skip_logits = bool(self._logits_match_head) and len(active) == len(rows)
        output: ForwardOutput = self.inner.forward(rows, proposal, cache, with_logits=not skip_logits)
        if not len(active):
            return output
        # One pass of the LM head over the early layers and the last.
        layer_logits = self.inner.compute_logits(
            _early_hidden_states(output, proposal, active_index, [*layers, -1])
        )  # [N, K + 1, L + 1, V]
        last_logits = index_rows(output.logits, active) if output.logits.shape[-1] else layer_logits[:, :, -1]
        if self._logits_match_head is None:
            self._logits_match_head = torch.allclose(
                last_logits, layer_logits[:, :, -1], rtol=1e-4, atol=1e-4
            )
        final, early = last_logits.log_softmax(-1), layer_logits[:, :, :-1].log_softmax(-1)
        early_logprobs = _most_divergent(final, early, wanted) if len(layers) > 1 else early[:, :, 0]
        threshold = final.amax(-1, keepdim=True) + math.log(RELATIVE_TOP)
        contrast = torch.where(final < threshold, self._excluded(rows, active, final), final - early_logprobs)
        if skip_logits:
            return output._replace(logits=contrast, base_logits=last_logits)
        logits = output.logits.index_copy(0, on_device(active, final.device), contrast)
        return output._replace(logits=logits, base_logits=output.logits)

    def _excluded(self, rows: Rows, active: Tensor, final: Tensor) -> Tensor:
        """The logits of tokens that the last layer finds implausible: -inf, or far below all others.

        A grammar may permit none but these. Then the last layer decides among them.
        """
        excluded = final.new_full((), -torch.inf)
        pools = row_params(rows).values.get(GRAMMAR_PARAM)
        if pools is None:
            return excluded
        assert not isinstance(pools, Tensor)
        has_grammar = torch.tensor([pools[row] is not None for row in active.tolist()], device=final.device)
        return torch.where(has_grammar[:, None, None], final - _IMPLAUSIBLE, excluded)

    def _row_layout(self, rows: Rows) -> tuple[Tensor, Tensor, list[int], Tensor]:
        """The active rows, each row's index among them, all their layers, and which row uses which [N, L]."""
        if self._layout is None or self._layout[0] != rows.version:
            column = row_params(rows).values.get("early_layers")
            table = torch.full((len(rows), 1), -1) if column is None else column
            assert isinstance(table, Tensor)
            active = (table >= 0).any(1).nonzero().squeeze(1)
            layers = sorted({layer for layer in table[active].flatten().tolist() if layer >= 0})
            wanted = (table[active][:, :, None] == torch.tensor(layers, dtype=torch.long)).any(1)  # [N, L]
            active_index = torch.full((len(rows),), -1)
            active_index[active] = torch.arange(len(active))
            self._layout = (rows.version, active, active_index, layers, wanted.to(self.device))
        return self._layout[1:]


def _early_hidden_states(
    output: ForwardOutput, proposal: Proposal, active_index: Tensor, layers: Sequence[int]
) -> Tensor:
    """The hidden states of `layers` at the logit positions [N, K + 1, L, D], for the active rows."""
    stacked: Tensor | None = None
    for forward_states in output.states:
        if forward_states.get("hidden_states") is None:
            raise UnsupportedModel("`dola_layers` needs hidden states, but the model does not return them")
        batch_index = (active_index[forward_states["rows"]] >= 0).nonzero().squeeze(1)
        if not len(batch_index):
            continue
        rows = forward_states["rows"][batch_index]
        last = forward_states["fed_length"][batch_index] - proposal.draft_counts(rows) - 1
        states: Sequence[Tensor] = forward_states["hidden_states"]
        positions = (last[:, None] + torch.arange(proposal.width + 1)).clamp(0, states[-1].shape[1] - 1)
        device = states[-1].device
        batch_rows, positions = on_device(batch_index, device), on_device(positions, device)
        layer_states = torch.stack(
            [states[layer].to(device)[batch_rows[:, None], positions] for layer in layers], 2
        )
        if stacked is None:
            stacked = layer_states.new_empty(int((active_index >= 0).sum()), *layer_states.shape[1:])
        stacked[on_device(active_index[rows], device)] = layer_states
    assert stacked is not None
    return stacked


def _most_divergent(final: Tensor, early: Tensor, wanted: Tensor) -> Tensor:
    """The wanted early prediction [N, K + 1, L, V] that differs most from the last layer's."""
    last = final[:, :, None]
    # The floor avoids slow denormal numbers.
    mean = early.clamp(min=_MIN_LOGPROB).exp_().add_(last.clamp(min=_MIN_LOGPROB).exp_()).mul_(0.5)
    # Both KL divergences from the mean in one sum.
    logs = mean.log().mul_(2).sub_(early).sub_(last)
    divergence = logs.mul_(mean).sum(-1)
    best = divergence.masked_fill(~wanted[:, None], -torch.inf).argmax(-1)  # [N, K + 1]
    return early.gather(2, best[..., None, None].expand(-1, -1, 1, early.shape[-1]))[:, :, 0]


def early_layers(wanted: str | Sequence[int], traits: ModelTraits) -> list[int]:
    """The layers that `dola_layers` means for a model; 0 are the embeddings."""
    count = traits.num_layers
    if not isinstance(wanted, str):
        invalid = [layer for layer in wanted if layer > count]
        if invalid:
            raise ConfigError("dola_layers", f"must name layers up to the last, {count}", invalid[0])
        # The last layer does not differ from itself, so it is never the one that differs most.
        early = sorted(set(wanted) - {count})
        if not early:
            raise ConfigError("dola_layers", f"must name a layer below the last, {count}", list(wanted))
        return early
    if wanted == "high":
        return list(range(count // 2 if count <= 40 else count - 20, count, 2))
    # With tied embeddings layer 0 would predict its own input token.
    first = 0 if not traits.has_tied_embeddings or count < 2 else min(2, count - 1)
    return list(range(first, count // 2 if count <= 40 else 20, 2)) or [first]


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
        continues_by_one=any(traits.continues_by_one for traits in parts),
        reads_again=all(traits.reads_again for traits in parts),
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
