"""DoLa: what the last layer says over and above an earlier one."""

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
from descant.errors import ConfigError, UnsupportedModel

__all__ = ["DoLa", "early_layers"]

# Tokens less likely than this share of the likeliest are ruled out.
RELATIVE_TOP: Final = 0.1
_MIN_LOGPROB: Final = -80.0  # the logarithm of the least probability that is told from none


class DoLa(ModelWrapper):
    """A model that answers with the contrast of its last layer and an early one (Chuang et al. 2024).

    Of a row's early layers the one is taken whose prediction at that position is farthest from the last
    layer's, by Jensen-Shannon divergence. The early predictions are those of the one forward: hidden
    states given to the output embeddings. Rows that do not ask for it are left alone.
    """

    required_states = ("hidden_states",)

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._layout: tuple[object, Tensor, Tensor, list[int], Tensor] | None = None
        # Whether the model's logits are its output embeddings of its last states, and no more than that.
        self._logits_match_head: bool | None = None

    def forward(self, rows: Rows, proposal: Proposal, cache: RowCache) -> ForwardOutput:
        """The contrast, for the rows that ask for it."""
        mine, place, layers, wanted = self._row_layout(rows)
        alone = bool(self._logits_match_head) and len(mine) == len(rows)
        output: ForwardOutput = self.inner.forward(rows, proposal, cache, with_logits=not alone)
        if not len(mine):
            return output
        # The last layer's prediction with the others', in one pass over the output embeddings.
        said = self.inner.compute_logits(
            _early_hidden_states(output, proposal, place, [*layers, -1])
        )  # [N, K + 1, L + 1, V]
        plain = index_rows(output.logits, mine) if output.logits.shape[-1] else said[:, :, -1]
        if self._logits_match_head is None:
            self._logits_match_head = torch.allclose(plain, said[:, :, -1], rtol=1e-4, atol=1e-4)
        final, early = plain.log_softmax(-1), said[:, :, :-1].log_softmax(-1)
        base = _most_divergent(final, early, wanted) if len(layers) > 1 else early[:, :, 0]
        least = final.amax(-1, keepdim=True) + log(RELATIVE_TOP)
        contrast = (final - base).masked_fill(final < least, -torch.inf)
        if alone:
            return output._replace(logits=contrast, base_logits=plain)
        logits = output.logits.index_copy(0, mine.to(final.device), contrast)
        return output._replace(logits=logits, base_logits=output.logits)

    def _row_layout(self, rows: Rows) -> tuple[Tensor, Tensor, list[int], Tensor]:
        """The rows that ask for it, each row's place among them, all their layers, and whose is which."""
        if self._layout is None or self._layout[0] != rows.version:
            own = row_params(rows).values.get("early_layers")
            table = torch.full((len(rows), 1), -1) if own is None else own
            assert isinstance(table, Tensor)
            mine = (table >= 0).any(1).nonzero().squeeze(1)
            layers = sorted({layer for layer in table[mine].flatten().tolist() if layer >= 0})
            wanted = (table[mine][:, :, None] == torch.tensor(layers, dtype=torch.long)).any(1)  # [N, L]
            place = torch.full((len(rows),), -1)
            place[mine] = torch.arange(len(mine))
            self._layout = (rows.version, mine, place, layers, wanted.to(self.device))
        return self._layout[1:]


def _early_hidden_states(
    output: ForwardOutput, proposal: Proposal, place: Tensor, layers: Sequence[int]
) -> Tensor:
    """The early layers' states where logits are [N, K + 1, L, D], for the rows that have a place."""
    found: Tensor | None = None
    for part in output.states:
        if part.get("hidden_states") is None:
            raise UnsupportedModel("`dola_layers` needs hidden states, which the model does not give")
        here = (place[part["rows"]] >= 0).nonzero().squeeze(1)
        if not len(here):
            continue
        whose = part["rows"][here]
        last = part["fed_length"][here] - proposal.draft_counts(whose) - 1
        states: Sequence[Tensor] = part["hidden_states"]
        at = (last[:, None] + torch.arange(proposal.width + 1)).clamp(0, states[-1].shape[1] - 1)
        device = states[-1].device
        line, at = here.to(device), at.to(device)
        exits = torch.stack([states[layer].to(device)[line[:, None], at] for layer in layers], 2)
        if found is None:
            found = exits.new_empty(int((place >= 0).sum()), *exits.shape[1:])
        found[place[whose].to(device)] = exits
    assert found is not None
    return found


def _most_divergent(final: Tensor, early: Tensor, wanted: Tensor) -> Tensor:
    """The early prediction, of those [N, K + 1, L, V] that a row wants, farthest from the last's."""
    last = final[:, :, None]
    # A floor keeps probabilities that do not matter from being too small to be computed with quickly.
    mean = early.clamp(min=_MIN_LOGPROB).exp_().add_(last.clamp(min=_MIN_LOGPROB).exp_()).mul_(0.5)
    # Both divergences from the mean at once.
    logs = mean.log().mul_(2).sub_(early).sub_(last)
    apart = logs.mul_(mean).sum(-1)
    best = apart.masked_fill(~wanted[:, None], -torch.inf).argmax(-1)  # [N, K + 1]
    return early.gather(2, best[..., None, None].expand(-1, -1, 1, early.shape[-1]))[:, :, 0]


def early_layers(wanted: str | Sequence[int], facts: ModelTraits) -> list[int]:
    """The layers that `dola_layers` stands for on a model, 0 being its embeddings."""
    count = facts.num_layers
    if not isinstance(wanted, str):
        odd = [layer for layer in wanted if layer >= count]
        if odd:
            raise ConfigError("dola_layers", f"must name layers below {count}, the last", odd[0])
        return sorted(set(wanted))
    if wanted == "high":
        return list(range(count // 2 if count <= 40 else count - 20, count, 2))
    # With tied embeddings the first layer would only say its own token again.
    first = 0 if not facts.has_tied_embeddings or count < 2 else min(2, count - 1)
    return list(range(first, count // 2 if count <= 40 else 20, 2)) or [first]
