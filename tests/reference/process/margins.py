"""The reference's margins and running beams, for the methods whose scores do not show them.

A choice that hangs on the last bits may fall either way on another machine, so parity tests refuse it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers.generation import beam_search, utils

DEAD = -1e8  # beams with a lower sum only fill their places


@dataclass
class Watch:
    """What was seen of contrastive search, DoLa, diverse and constrained beams."""

    margins: list[float] = field(default_factory=list)  # the narrowest choice of each step
    sums: list[Tensor] = field(default_factory=list)  # [B, group's beams], one a group and step
    groups: int = 1

    @property
    def running(self) -> list[Tensor]:
        """The sums of the beams that go on after each step [B, K]."""
        starts = range(0, len(self.sums), self.groups)
        return [torch.cat(self.sums[start : start + self.groups], dim=1) for start in starts]

    def first(self) -> Tensor:
        """The sums with which the beams of every group begin [B, K]."""
        begin = torch.full_like(self.sums[0], -1e9)
        begin[:, 0] = 0
        return begin.repeat(1, self.groups)


@contextlib.contextmanager
def watched() -> Iterator[Watch]:
    """Watch the reference's own functions while it decodes."""
    watch = Watch()

    def with_margin(function: Callable[..., Any], margin: Callable[..., float]) -> Callable[..., Any]:
        def both(*given: Any, **named: Any) -> Any:
            watch.margins.append(margin(*given, **named))
            return function(*given, **named)

        return both

    def scored(process: Callable[..., Any]) -> Callable[..., Any]:
        def both(scorer: Any, ids: Tensor, sums: Tensor, tokens: Tensor, *given: Any, **named: Any) -> Any:
            watch.groups = scorer.num_beam_groups if hasattr(scorer, "num_beam_groups") else 1
            group = named.get("group_index", 0)
            before = _done(scorer, group, watch.groups)
            chosen = process(scorer, ids, sums, tokens, *given, **named)
            after = _done(scorer, group, watch.groups)
            kept = chosen["next_beam_scores"].view(len(sums), -1)
            ends = torch.isin(tokens, torch.as_tensor(named["eos_token_id"]))
            # Down to the first that is not kept.
            matter = (~ends).cumsum(1) - (~ends).long() <= kept.shape[1]
            rows = zip(sums, matter, before, strict=True)
            watch.margins += [_apart(row[which]) for row, which, done in rows if not done]
            watch.sums.append(torch.where(after[:, None], torch.tensor(-1e9), kept))
            return chosen

        return both

    scorers = beam_search.BeamSearchScorer, beam_search.ConstrainedBeamSearchScorer
    with contextlib.ExitStack() as stack:
        for name, margin in (("_ranking_fast", _contrastive), ("_dola_select_contrast", _layers)):
            stack.enter_context(mock.patch.object(utils, name, with_margin(getattr(utils, name), margin)))
        for scorer in scorers:
            stack.enter_context(mock.patch.object(scorer, "process", scored(scorer.process)))
        yield watch


def _done(scorer: Any, group: int, groups: int) -> Tensor:
    """Which requests' group has ended [B]."""
    return torch.as_tensor([bool(done) for done in scorer._done]).view(-1, groups)[:, group]


def _apart(values: Tensor) -> float:
    """The smallest distance between adjacent finite descending values."""
    living = values[values > DEAD]
    return float((living[:-1] - living[1:]).min()) if len(living) > 1 else float("inf")


def _contrastive(
    context: Tensor, ahead: Tensor, likelihood: Tensor, mask: Tensor, alpha: float, width: int
) -> float:
    """Of the rankings, likelihood less the greatest similarity: the best from the second."""
    alike = torch.cosine_similarity(context, ahead, dim=-1)
    alike = alike.masked_fill(mask == 0, -1.0).amax(-1).view(-1, width)
    ranks = ((1 - alpha) * likelihood.view(-1, width) - alpha * alike).topk(min(2, width), dim=1).values
    return float((ranks[:, 0] - ranks[:, -1]).min())


def _layers(names: list[int], early: Mapping[int, Tensor], final: Tensor) -> float:
    """Of the divergences between the last layer and each candidate: the greatest from the second."""
    last = final.double().softmax(-1)
    found = []
    for name in names:
        other = early[name].double().softmax(-1)
        middle = (last + other) / 2
        found.append(float(sum((p * (p / middle).log()).nansum(-1).mean() for p in (last, other)) / 2))
    return _apart(torch.tensor(sorted(found, reverse=True)[:2]))
