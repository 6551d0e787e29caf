"""The session in which an engine computes the log-probabilities of prompts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch

from descant.config.generation_config import GenerationConfig
from descant.core.records import Logprobs
from descant.core.traits import ModelTraits
from descant.decoding.strategies.prompt_scoring import PromptScoring
from descant.engine.request import Request
from descant.engine.scheduling.config import SchedulerConfig
from descant.engine.session import Session
from descant.errors import InputError
from descant.recipes.recipe import Recipe

__all__ = ["PromptScores", "check_prompt_logprobs", "empty_logprobs"]

_MAX_ROWS: Final = 4  # prompts in a forward: it returns a logit for each token of each


class PromptScores:
    """A session of prompts that are scored, a part of each in a step.

    They have a session of their own so that the others' logits do not get as wide as theirs.
    """

    def __init__(self, model: Any) -> None:
        self.session = Session(model, scheduler=SchedulerConfig(max_running_rows=_MAX_ROWS))
        self._has_keys = self.session.traits.cache_type == "kv"
        self._strategy = PromptScoring(is_recurrent=not self._has_keys)
        self._recipe = Recipe("prompt scoring", "strategy", lambda noise, stop, rank_group: self._strategy)  # noqa: ARG005

    def admit(self, number: int, request: Request) -> None:
        """Add the prompt of a request, which has at least two tokens."""
        prompt = torch.as_tensor(request.prompt).long().cpu()
        self._strategy.add(number, prompt[1:], request.prompt_logprobs or 0)
        config = GenerationConfig(max_new_tokens=len(prompt) - 1)
        scored = Request(
            prompt[:1],
            config,
            recipe=self._recipe,
            config_merged=True,
            return_past_key_values=self._has_keys,
            priority=request.priority,
            deadline=request.deadline,
            adapter_name=request.adapter_name,
        )
        try:
            self.session.admit(scored, numbers=[number])
        except BaseException:
            self._strategy.drop(number)
            raise

    def cancel(self, number: int) -> None:
        """Remove a prompt."""
        try:
            self.session.cancel(number)
        finally:
            self.forget(number)

    def forget(self, number: int) -> None:
        """Drop a prompt that has ended without a result; one that waits is not known to a strategy yet."""
        self._strategy.drop(number)


def empty_logprobs(num_top: int) -> Logprobs:
    """The log-probabilities of a prompt of one token."""
    values, top = torch.zeros(0), torch.zeros(0, num_top)
    return Logprobs(values, values, top.long(), top, top)


def check_prompt_logprobs(request: Request, traits: ModelTraits) -> Request:
    """The request without `prompt_logprobs`; raises where these are not defined."""
    count = request.prompt_logprobs
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= traits.vocab_size:
        raise InputError("prompt_logprobs", f"must be an integer from 0 to {traits.vocab_size}", count)
    if traits.is_encoder_decoder:
        must = "must be None for an encoder-decoder model, whose prompt the decoder does not predict"
        raise InputError("prompt_logprobs", must, count)
    others = sorted(request.inputs.keys() - {"negative_prompt_ids"})
    if others:
        must = f"must be None with `{others[0]}`: only prompts of tokens are scored"
        raise InputError("prompt_logprobs", must, count)
    return replace(request, prompt_logprobs=None)
