"""Guidance: towards what a prompt says and away from what is said without it."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor

from descant.core.context import Context
from descant.decoding.processors.base import LogitsProcessor, check_number
from descant.errors import InputError

__all__ = ["ClassifierFreeGuidanceLogitsProcessor", "UnbatchedClassifierFreeGuidanceLogitsProcessor"]


class ClassifierFreeGuidanceLogitsProcessor(LogitsProcessor):
    """Classifier-free guidance over a batch in halves, with the prompt and without (Ho and Salimans 2022).

    It has half as many lines as it is given, so it is only for calls by hand, as in MusicGen (Copet et
    al. 2023). A `guidance_scale` above 1 goes beyond what the prompt alone says.
    """

    def __init__(self, guidance_scale: float) -> None:
        if check_number("guidance_scale", guidance_scale, 1.0) <= 1:
            raise InputError("guidance_scale", "must be > 1", guidance_scale)
        self.guidance_scale = float(guidance_scale)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [N, V] from those with the prompt and, below them, those without [2 N, V]."""
        if scores.shape[0] != 2 * input_ids.shape[0]:
            must = f"must have {2 * input_ids.shape[0]} lines, two for each of `input_ids`"
            raise InputError("scores", must, scores, "give those with the prompt first, then those without")
        conditional, plain = scores.chunk(2)
        return _apply_guidance(conditional, plain, self.guidance_scale)


class UnbatchedClassifierFreeGuidanceLogitsProcessor(LogitsProcessor):
    """Classifier-free guidance that runs a model by itself on what is said without the prompt (Sanchez 2023).

    `unconditional_ids` [B, U], padded on the left, take the place of the prompt; without them it is the
    prompt's last token alone. What is generated follows them. The first call's ids are the prompt, one
    line for each of `unconditional_ids` or several, neighbours, for each. Every call has a token more; one
    with other prompts starts again. Lines may be reordered and forked in between: then all is read again.
    The loop has guidance of its own, whose cache follows its rows: `guidance_scale` in a config.
    """

    def __init__(
        self,
        guidance_scale: float,
        model: Any,
        unconditional_ids: Tensor | None = None,
        unconditional_attention_mask: Tensor | None = None,
        use_cache: bool | None = True,
    ) -> None:
        if math.isinf(check_number("guidance_scale", guidance_scale, -math.inf)):
            raise InputError("guidance_scale", "must be finite", guidance_scale)
        if not callable(model):
            raise InputError("model", "must be a model that can be called with ids", model)
        self.guidance_scale = float(guidance_scale)
        self.model = model
        self.use_cache = bool(use_cache)
        self._negative_prompt = _check_unconditional(unconditional_ids, unconditional_attention_mask)
        self._prompt_ids: Tensor | None = None  # [N, P] the ids of the first call
        self._last_input_ids: Tensor | None = None  # [N, L] those of the last
        self._past_key_values: Any = None  # what the model remembers of their unconditional side

    def process(self, context: Context, scores: Tensor) -> Tensor:  # noqa: ARG002
        """Refused: the rows of the loop come and go, and its own guidance follows them."""
        must = f"must not hold a {type(self).__name__}, which is for calls by hand"
        do = "set guidance_scale, and give negative_prompt_ids to generate"
        raise InputError("logits_processor", must, self, do)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Log-probabilities [N, V], led away from what the model says without the prompt."""
        conditional = scores.log_softmax(-1)
        if self.guidance_scale == 1:
            return conditional
        plain = self._unconditional_logits(input_ids).to(scores.dtype).log_softmax(-1)
        return _apply_guidance(conditional, plain, self.guidance_scale)

    @torch.no_grad()
    def _unconditional_logits(self, input_ids: Tensor) -> Tensor:
        """What the model says after the unconditional ids and what is new [N, V]."""
        whose = self._match_prompts(input_ids)
        if whose is None:
            self._prompt_ids, self._past_key_values = input_ids.clone(), None
            whose = torch.arange(len(input_ids), device=input_ids.device)
        assert self._prompt_ids is not None
        new = input_ids[:, self._prompt_ids.shape[1] :]
        ids, mask = self._negative_inputs(whose)
        ids, mask = torch.cat((ids, new), 1), torch.cat((mask, torch.ones_like(new)), 1)
        seen, self._last_input_ids = self._last_input_ids, input_ids.clone()
        grown = (
            self._past_key_values is not None and seen is not None and torch.equal(input_ids[:, :-1], seen)
        )
        past, self._past_key_values = (self._past_key_values if grown else None), None
        fed = ids[:, -1:] if grown else ids
        more = {}
        if self._negative_prompt is not None and self._needs_position_ids():
            more["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, -fed.shape[1] :]
        out = self.model(fed, attention_mask=mask, use_cache=self.use_cache, past_key_values=past, **more)
        if self.use_cache:
            self._past_key_values = getattr(out, "past_key_values", None)
        logits: Tensor = out.logits[:, -1]
        return logits

    def _match_prompts(self, input_ids: Tensor) -> Tensor | None:
        """Which of the prompts each line continues [N]; None where these are not, or none has a new token."""
        prompt, seen = self._prompt_ids, self._last_input_ids
        if prompt is None or seen is None:
            return None
        # What is longer by several tokens is another text that begins alike, such as a chat's next turn.
        if not prompt.shape[1] < input_ids.shape[1] <= seen.shape[1] + 1:
            return None
        before = input_ids[:, : prompt.shape[1]]
        if torch.equal(before, prompt):
            return torch.arange(len(before), device=before.device)
        same = (before[:, None] == prompt).all(-1)  # [N, N']
        return same.long().argmax(1) if bool(same.any(1).all()) else None

    def _negative_inputs(self, whose: Tensor) -> tuple[Tensor, Tensor]:
        """What stands in the place of those prompts, and its mask [N, U]."""
        assert self._prompt_ids is not None
        if self._negative_prompt is None:
            last = self._prompt_ids[whose, -1:]
            return last, torch.ones_like(last)
        ids, mask = (part.to(whose.device) for part in self._negative_prompt)
        times, rest = divmod(len(self._prompt_ids), len(ids))
        if rest:
            must = f"must have as many lines as `unconditional_ids`, {len(ids)}, or a multiple of them"
            raise InputError("input_ids", must, self._prompt_ids)
        return ids[whose // times], mask[whose // times]

    def _needs_position_ids(self) -> bool:
        """Whether padding has to be kept from counting as positions, and the model can be told so."""
        assert self._negative_prompt is not None
        called = getattr(self.model, "forward", self.model)
        return (
            bool((self._negative_prompt[1] == 0).any())
            and "position_ids" in inspect.signature(called).parameters
        )


def _apply_guidance(conditional: Tensor, plain: Tensor, scale: float) -> Tensor:
    """From the plain scores in the direction of the conditional ones, and beyond them above 1."""
    guided = plain + (conditional - plain) * scale
    return torch.where(conditional == plain, plain, guided)  # ruled out in both, so ruled out


def _check_unconditional(ids: Any, mask: Any) -> tuple[Tensor, Tensor] | None:
    """Unconditional ids and their mask [B, U], checked."""
    if ids is None:
        if mask is not None:
            raise InputError("unconditional_ids", "must be given with a mask of them", ids)
        return None
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point() or not ids.numel():
        raise InputError("unconditional_ids", "must be token ids [B, U]", ids)
    if mask is None:
        return ids, torch.ones_like(ids)
    if not isinstance(mask, Tensor) or mask.shape != ids.shape:
        must = f"must be a mask of shape {list(ids.shape)}"
        raise InputError("unconditional_attention_mask", must, mask)
    mask = (mask != 0).to(ids.dtype)
    if not bool((mask[:, 1:] >= mask[:, :-1]).all() & mask[:, -1].all()):
        must = "must mask padding on the left only"
        raise InputError("unconditional_attention_mask", must, mask, "pad on the left")
    return ids, mask
