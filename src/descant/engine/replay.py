"""replay_logprobs(): the log-probabilities of a generated sequence in a training forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from descant.core.context import Context
from descant.core.records import Proposal, Support
from descant.core.rows import Rows
from descant.decoding.processors.filters import FilteringWarper
from descant.decoding.watermark.synthid import SynthIDTextWatermarkLogitsProcessor
from descant.engine.request import Request
from descant.engine.session import Session
from descant.engine.step.strategy_group import ProcessorRows, StrategyGroup, as_stateful
from descant.errors import InputError, UnsupportedModel
from descant.models.wrapping.wrapped_model import unwrap_model


def replay_logprobs(
    model: Any, request: Request, tokens: Tensor, support: Support | None = None, *, chunk: int = 128
) -> Tensor:
    """The log-probability of each new token of a request [T], with gradients: what its sampler used.

    The prompt and the `tokens` [T] are read in one forward of the model, as it is: in training mode, with its
    active adapter. The processors of the request run on its logits; the `support` that was recorded with
    `logprobs_support` takes the place of the filters, so that the same tokens are left after the weights have
    changed. Scores of `chunk` tokens [chunk, V] are in memory at once, also in the backward pass.
    """
    size: Any = chunk
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise InputError("chunk", "must be an integer >= 1", chunk)
    model = unwrap_model(model)
    session = Session(model)
    _check(session, request)
    session.admit(request)
    table = next(session.tables)
    rows = table.rows
    assert rows is not None
    [group] = table.running.strategy_groups(rows)
    plan = next(iter(table.running.requests.values())).plan
    if plan.wrappers or group.strategy.has_groups or plan.strategy.num_candidates > 1:
        must = "must score its tokens by the processed logits alone: no guidance, DoLa, groups or contrast"
        raise InputError("generation_config", must, request.generation_config)
    if any(isinstance(processor, SynthIDTextWatermarkLogitsProcessor) for processor, _ in group.processors):
        must = "must not be SynthID's: its rounds have no gradients"
        raise InputError("watermarking_config", must, request.generation_config.watermarking_config)
    tokens = tokens.to(rows.tokens.device, torch.long)
    if tokens.ndim != 1 or not len(tokens):
        raise InputError("tokens", "must be one sequence of new tokens [T]", tokens)
    if support is not None and len(support.offsets) != len(tokens) + 1:
        must = f"must be of the {len(tokens)} tokens"
        raise InputError("support", must, f"{len(support.offsets) - 1} tokens")
    replay = _Replay(replace(group, errors=None, traces=None, observers=()), rows, tokens, support)
    if any(as_stateful(processor) for processor, _ in replay.processors(None)):
        chunk = len(tokens)  # its state after a chunk is not kept
    states, head = _last_states(model, torch.cat((rows.tokens[0, : int(rows.length[0])], tokens[:-1])))
    states = states[-len(tokens) :]
    return torch.cat(
        [
            checkpoint(replay.chunk_logprobs, states[start : start + chunk], head, start, use_reentrant=False)
            for start in range(0, len(tokens), chunk)
        ]
    )


@dataclass(frozen=True)
class _SupportMask:
    """A processor that leaves the tokens of a recorded support, in place of the filters that chose it."""

    mask: Tensor  # [K + 1, V]

    def process(self, context: Context, scores: Tensor) -> Tensor:  # noqa: ARG002
        """The scores of those tokens."""
        return scores.masked_fill(~self.mask, -torch.inf)


@dataclass(frozen=True)
class _Replay:
    """A row after its prompt, its new tokens, and the processors of its request."""

    group: StrategyGroup
    rows: Rows
    tokens: Tensor  # [T]
    support: Support | None

    def processors(self, mask: _SupportMask | None) -> list[ProcessorRows]:
        """The processors in order, with the mask in place of the first filter, or behind them."""
        given = list(self.group.processors)
        if self.support is None:
            return given
        is_filter = [isinstance(processor, FilteringWarper) for processor, _ in given]
        place = is_filter.index(True) if any(is_filter) else len(given)
        own: list[ProcessorRows] = [] if mask is None else [(mask, None)]
        kept = [entry for entry, filters in zip(given, is_filter, strict=True) if not filters]
        return [*kept[:place], *own, *kept[place:]]

    def chunk_logprobs(self, states: Tensor, head: Callable[[Tensor], Tensor], start: int) -> Tensor:
        """The log-probabilities of the tokens from `start` on, one for each state [N, D]."""
        logits = head(states).float()[None]  # [1, N, V]
        stop = start + len(states)
        mask = None
        if self.support is not None:
            lines = replace(self.support, offsets=self.support.offsets[start : stop + 1])
            mask = lines.mask(logits.shape[-1]).to(logits.device)
        rows = self.rows.append(self.tokens[None, :start], self.rows.length + start) if start else self.rows
        drafts = self.tokens[None, start : stop - 1]
        proposal = Proposal(None, drafts, torch.tensor([drafts.shape[1]])) if len(states) > 1 else Proposal()
        chain = self.processors(None if mask is None else _SupportMask(mask))
        group = replace(self.group, processors=chain, device_params={})
        scores = group.process(rows, proposal, logits)[0]
        if mask is not None:  # a penalty or a temperature changes no support
            scores = scores.masked_fill(~mask, -torch.inf)
        own = scores.log_softmax(-1).gather(1, self.tokens[start:stop, None])
        return own[:, 0]


def _check(session: Session, request: Request) -> None:
    """Raise for a request whose tokens have other inputs than a prompt of tokens."""
    if session.traits.is_encoder_decoder or session.model.network is None:
        raise UnsupportedModel("`replay_logprobs` needs one decoder-only model of transformers")
    for name, is_given in (
        ("inputs", bool(request.inputs)),
        ("past_key_values", request.past_key_values is not None),
        ("adapter_name", request.adapter_name is not None),
        ("token_healing", bool(request.generation_config.token_healing)),
    ):
        if is_given:
            must = "must not be given: prompts of tokens are replayed, by the model as it is"
            raise InputError(name, must, True)


def _last_states(model: Any, ids: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The last states of the network [L, D] after these ids [L], and the function that makes them logits.

    A model that does more than its output embeddings gives the logits themselves.
    """
    network = unwrap_model(model)
    body, head = network.base_model, network.get_output_embeddings()
    if head is not None and body is not network:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            probe = network(input_ids=ids[None, :1], use_cache=False, output_hidden_states=True)
            is_plain = torch.equal(head(probe.hidden_states[-1]), probe.logits)
        if is_plain:
            return body(input_ids=ids[None], use_cache=False).last_hidden_state[0], head
    return network(input_ids=ids[None], use_cache=False).logits[0], lambda logits: logits
