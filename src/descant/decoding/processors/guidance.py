"""Classifier-free guidance as processors for direct calls."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor

from descant.core.context import Context
from descant.decoding.processors.base import LogitsProcessor, check_number, check_positive
from descant.errors import InputError


class ClassifierFreeGuidanceLogitsProcessor(LogitsProcessor):
    """Classifier-free guidance on a batch of conditional and unconditional halves (Ho and Salimans 2022).

    It returns half as many rows as it receives, so it is only for direct calls, as in MusicGen (Copet et al.
    2023). A `guidance_scale` above 1 extrapolates beyond the conditional scores.
    """

    def __init__(self, guidance_scale: float) -> None:
        if check_number("guidance_scale", guidance_scale, 1.0) <= 1:
            raise InputError("guidance_scale", "must be > 1", guidance_scale)
        self.guidance_scale = float(guidance_scale)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores [N, V] from conditional scores followed by unconditional ones [2 N, V]."""
        if scores.shape[0] != 2 * input_ids.shape[0]:
            must = f"must have {2 * input_ids.shape[0]} rows, two per row of `input_ids`"
            raise InputError(
                "scores", must, scores, "concatenate the conditional scores and the unconditional ones"
            )
        conditional, unconditional = scores.chunk(2)
        return _apply_guidance(conditional, unconditional, self.guidance_scale)


class UnbatchedClassifierFreeGuidanceLogitsProcessor(LogitsProcessor):
    """Classifier-free guidance that runs the unconditional forward by itself (Sanchez 2023).

    `unconditional_ids` [B, U], padded on the left, replace the prompt; by default this is the prompt's last
    token. Generated tokens follow them. The ids of the first call are the prompts, one or several consecutive
    rows per row of `unconditional_ids`. Every later call has one more token; a call with other prompts starts
    over. Rows may be reordered and forked between calls, which recomputes the unconditional prefix.
    In the engine, use `guidance_scale` in the config instead: its cache follows the rows.
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
            raise InputError("model", "must be a callable model", model)
        self.guidance_scale = float(guidance_scale)
        self.model = model
        self.use_cache = bool(use_cache)
        self._negative_prompt = _check_unconditional(unconditional_ids, unconditional_attention_mask)
        self._prompt_ids: Tensor | None = None  # [N, P] ids of the first call
        self._last_input_ids: Tensor | None = None  # [N, L] ids of the last call
        self._past_key_values: Any = None  # cache of the unconditional rows

    def process(self, context: Context, scores: Tensor) -> Tensor:  # noqa: ARG002
        """Raise: the engine has its own guidance, which follows its rows."""
        must = f"must not contain a {type(self).__name__}, which is for direct calls"
        do = "set guidance_scale, and pass negative_prompt_ids to generate"
        raise InputError("logits_processor", must, self, do)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return guided log-probabilities [N, V]."""
        conditional = scores.log_softmax(-1)
        if self.guidance_scale == 1:
            return conditional
        unconditional = self._unconditional_logits(input_ids).to(scores.dtype).log_softmax(-1)
        return _apply_guidance(conditional, unconditional, self.guidance_scale)

    @torch.no_grad()
    def _unconditional_logits(self, input_ids: Tensor) -> Tensor:
        """Run the model on the unconditional ids and the new tokens; return its logits [N, V]."""
        prompts = self._match_prompts(input_ids)
        if prompts is None:
            self._prompt_ids, self._past_key_values = input_ids.clone(), None
            prompts = torch.arange(len(input_ids), device=input_ids.device)
        assert self._prompt_ids is not None
        new = input_ids[:, self._prompt_ids.shape[1] :]
        ids, mask = self._negative_inputs(prompts)
        ids, mask = torch.cat((ids, new), 1), torch.cat((mask, torch.ones_like(new)), 1)
        last_ids, self._last_input_ids = self._last_input_ids, input_ids.clone()
        extends_last = (
            self._past_key_values is not None
            and last_ids is not None
            and torch.equal(input_ids[:, :-1], last_ids)
        )
        past, self._past_key_values = (self._past_key_values if extends_last else None), None
        model_ids = ids[:, -1:] if extends_last else ids
        extra = {}
        if self._negative_prompt is not None and self._needs_position_ids():
            extra["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, -model_ids.shape[1] :]
        output = self.model(
            model_ids, attention_mask=mask, use_cache=self.use_cache, past_key_values=past, **extra
        )
        if self.use_cache:
            self._past_key_values = getattr(output, "past_key_values", None)
        logits: Tensor = output.logits[:, -1]
        return logits

    def _match_prompts(self, input_ids: Tensor) -> Tensor | None:
        """Return the prompt index of each row [N]; None if a row continues no prompt or has no new token."""
        prompt, last_ids = self._prompt_ids, self._last_input_ids
        if prompt is None or last_ids is None:
            return None
        # More than one new token means another text with the same beginning, such as a chat's next turn.
        if not prompt.shape[1] < input_ids.shape[1] <= last_ids.shape[1] + 1:
            return None
        prefix = input_ids[:, : prompt.shape[1]]
        if torch.equal(prefix, prompt):
            return torch.arange(len(prefix), device=prefix.device)
        matches = (prefix[:, None] == prompt).all(-1)  # [N, N']
        return matches.long().argmax(1) if bool(matches.any(1).all()) else None

    def _negative_inputs(self, prompts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the unconditional ids of those prompts and their mask [N, U]."""
        assert self._prompt_ids is not None
        if self._negative_prompt is None:
            last = self._prompt_ids[prompts, -1:]
            return last, torch.ones_like(last)
        ids, mask = (part.to(prompts.device) for part in self._negative_prompt)
        rows_per_prompt, remainder = divmod(len(self._prompt_ids), len(ids))
        if remainder:
            must = f"must have as many rows as `unconditional_ids`, {len(ids)}, or a multiple of that"
            raise InputError("input_ids", must, self._prompt_ids)
        return ids[prompts // rows_per_prompt], mask[prompts // rows_per_prompt]

    def _needs_position_ids(self) -> bool:
        """Whether there is padding and the model accepts `position_ids`."""
        assert self._negative_prompt is not None
        forward = getattr(self.model, "forward", self.model)
        return (
            bool((self._negative_prompt[1] == 0).any())
            and "position_ids" in inspect.signature(forward).parameters
        )


def _apply_guidance(conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    """Extrapolate from the unconditional scores towards the conditional ones."""
    guided = unconditional + (conditional - unconditional) * scale
    return torch.where(conditional == unconditional, unconditional, guided)  # -inf in both stays -inf


def _check_unconditional(ids: Any, mask: Any) -> tuple[Tensor, Tensor] | None:
    """Return the unconditional ids and their mask [B, U], validated."""
    if ids is None:
        if mask is not None:
            raise InputError("unconditional_ids", "must be given if their attention mask is given", ids)
        return None
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point() or not ids.numel():
        raise InputError("unconditional_ids", "must be token ids [B, U]", ids)
    if mask is None:
        return ids, torch.ones_like(ids)
    if not isinstance(mask, Tensor) or mask.shape != ids.shape:
        raise InputError("unconditional_attention_mask", f"must be a mask of shape {list(ids.shape)}", mask)
    mask = (mask != 0).to(ids.dtype)
    if not bool((mask[:, 1:] >= mask[:, :-1]).all() & mask[:, -1].all()):
        must = "must mask padding on the left only"
        raise InputError("unconditional_attention_mask", must, mask, "pad on the left")
    return ids, mask


class HammingDiversityLogitsProcessor(LogitsProcessor):
    """Subtracts `diversity_penalty` from a token per beam of an earlier group that chose it in this step.

    Diverse beam search (Vijayakumar et al. 2016). In the engine, the tokens of earlier groups are the column
    `earlier_group_tokens`, which the strategy maintains.
    """

    config_fields = ("diversity_penalty",)

    def __init__(self, diversity_penalty: float, num_beams: int, num_beam_groups: int) -> None:
        self.diversity_penalty = check_positive("diversity_penalty", diversity_penalty)
        self.num_beams = check_number("num_beams", num_beams, 2, integer=True)
        self.num_beam_groups = check_number("num_beam_groups", num_beam_groups, 2, num_beams, integer=True)

    def __call__(  # type: ignore[override]
        self,
        input_ids: Tensor,  # noqa: ARG002
        scores: Tensor,
        current_tokens: Tensor,
        beam_group_idx: int,
    ) -> Tensor:
        """Return scores of one group [B * G, V], given this step's tokens of all beams [B * num_beams]."""
        group_size = self.num_beams // self.num_beam_groups
        check_number("beam_group_idx", beam_group_idx, 0, self.num_beam_groups - 1, integer=True)
        batch, remainder = divmod(len(current_tokens), self.num_beams)
        if remainder or current_tokens.ndim != 1:
            must = f"must have {self.num_beams} tokens per prompt"
            raise InputError("current_tokens", must, current_tokens)
        if len(scores) != batch * group_size:
            must = f"must have {batch * group_size} rows, {group_size} per prompt"
            raise InputError("scores", must, scores)
        earlier = current_tokens.view(batch, self.num_beams)[:, : beam_group_idx * group_size]
        penalty = scores.new_full((1, 1), self.diversity_penalty)
        return apply_hamming_penalty(
            scores, earlier.repeat_interleave(group_size, 0).to(scores.device), penalty
        )

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Apply the penalty to the rows of `context`."""
        earlier = context.state("earlier_group_tokens")
        if earlier.is_floating_point():
            must = "must not contain a HammingDiversityLogitsProcessor without beam groups"
            raise InputError("logits_processor", must, self, "set num_beam_groups and diversity_penalty")
        return apply_hamming_penalty(scores, earlier.flatten(1), context.param("diversity_penalty"))


def apply_hamming_penalty(scores: Tensor, earlier: Tensor, penalty: Tensor) -> Tensor:
    """Subtract the penalty [N, 1] from scores [N, V] per occurrence in `earlier` [N, W], padded with -1."""
    vocab_size = scores.shape[1]
    ids = torch.where((earlier >= 0) & (earlier < vocab_size), earlier, vocab_size)
    counts = scores.new_zeros(len(scores), vocab_size + 1)
    counts = counts.scatter_add(1, ids, counts.new_ones(1, 1).expand(ids.shape))
    return scores - penalty * counts[:, :vocab_size]
