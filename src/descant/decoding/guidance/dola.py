"""DoLa: contrast the last layer's prediction with that of an earlier layer."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import Any, Final

import torch
from torch import Tensor

from descant.core.context import row_params
from descant.core.interfaces import ModelTraits, RowCache
from descant.core.records import ForwardOutput, Proposal
from descant.core.rows import Rows, index_rows
from descant.decoding.guidance.model_wrapper import ModelWrapper
from descant.decoding.processors.grammar import GRAMMAR_PARAM
from descant.errors import ConfigError, UnsupportedModel

__all__ = ["DoLa", "early_layers"]

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
        threshold = final.amax(-1, keepdim=True) + log(RELATIVE_TOP)
        contrast = torch.where(final < threshold, self._excluded(rows, active, final), final - early_logprobs)
        if skip_logits:
            return output._replace(logits=contrast, base_logits=last_logits)
        logits = output.logits.index_copy(0, active.to(final.device), contrast)
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
        batch_rows, positions = batch_index.to(device), positions.to(device)
        layer_states = torch.stack(
            [states[layer].to(device)[batch_rows[:, None], positions] for layer in layers], 2
        )
        if stacked is None:
            stacked = layer_states.new_empty(int((active_index >= 0).sum()), *layer_states.shape[1:])
        stacked[active_index[rows].to(device)] = layer_states
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
