"""A session whose requests score given continuations in place of generating."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from descant.config.generation_config import GenerationConfig
from descant.core.interfaces import StrategyTraits
from descant.decoding.strategies.continuation_scoring import ContinuationScoring
from descant.engine.request import MERGED, Request
from descant.engine.session import Session
from descant.recipes.recipe import Recipe


class _ScoringFactory:
    """What a recipe needs of a strategy class, for a strategy that all requests of a session share."""

    traits = StrategyTraits()

    def __init__(self, strategy: ContinuationScoring) -> None:
        self._strategy = strategy

    def __call__(self, noise: Any, stop: Any, rank_group: Any) -> ContinuationScoring:  # noqa: ARG002
        """The strategy."""
        return self._strategy

    @staticmethod
    def params(config: GenerationConfig) -> dict[str, int]:
        """A row for each continuation, all of one prompt."""
        return {"max_rows": config.num_return_sequences, "num_sequences": 1}


class ScoringSession:
    """A session of prompts whose continuations are scored: `Finished.hypotheses` has one for each.

    They have a session of their own so that the logits of generating requests do not get as wide as theirs.
    """

    def __init__(self, model: Any, **session: Any) -> None:
        self.session = Session(model, **session)
        traits = self.session.traits
        self.has_keys = traits.cache_type == "kv"
        self._strategy = ContinuationScoring(traits.vocab_size, is_recurrent=not self.has_keys)
        self._recipe = Recipe("continuation scoring", "strategy", _ScoringFactory(self._strategy))

    def admit(
        self, request_id: int, request: Request, continuations: Sequence[Tensor], num_top: int = 1
    ) -> None:
        """Add a request and the continuations of its prompt (host), with so many alternatives of each token.

        Its config is complete: the model's own is not read.
        """
        self._strategy.add(request_id, continuations, num_top)
        config = request.generation_config.replace(
            max_new_tokens=max(map(len, continuations)), num_return_sequences=len(continuations)
        )
        scored = replace(request, generation_config=config, recipe=self._recipe, _call=MERGED)
        try:
            self.session.admit(scored, numbers=[request_id])
        except BaseException:
            self._strategy.drop(request_id)
            raise

    def cancel(self, request_id: int) -> None:
        """Remove a request."""
        try:
            self.session.cancel(request_id)
        finally:
            self.forget(request_id)

    def forget(self, request_id: int) -> None:
        """Drop a request that has ended without a result; one that waits is not known to a strategy yet."""
        self._strategy.drop(request_id)
