"""Grammars: only tokens that a grammar permits after the row's new text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from descant.config.fields import Field
from descant.config.generation_config import FIELDS, GenerationConfig
from descant.core.context import Context, PromptInfo
from descant.decoding.grammars.backend import MatcherPool, fill_masks
from descant.decoding.grammars.compiler import compile_grammar
from descant.decoding.processors.base import LogitsProcessor, TokenIds, as_id_list, check_number
from descant.errors import InputError
from descant.tokenization.token_healing import HealedSuffix

GRAMMAR_PARAM = "grammar_matchers"  # the row parameter with a request's `MatcherPool`


class GrammarLogitsProcessor(LogitsProcessor):
    """Permits the tokens that continue a text of a grammar, and end tokens where the text is complete.

    `grammar` has the form of the config field. In a direct call, `prompt_length` is the number of ids before
    the text. The engine makes the matchers with a request's text matchers, as they need its tokenizer.
    """

    def __init__(
        self,
        grammar: Mapping[str, Any],
        tokenizer: Any,
        eos_token_id: TokenIds | None = None,
        prompt_length: int = 0,
    ) -> None:
        field: Field = FIELDS["grammar"]
        end_ids = as_id_list(tokenizer.eos_token_id if eos_token_id is None else eos_token_id)
        if not end_ids:
            raise InputError("eos_token_id", "must be at least one token id", eos_token_id)
        self.prompt_length = check_number("prompt_length", prompt_length, 0, integer=True)
        self.grammar_matchers = MatcherPool(compile_grammar(field.parse(grammar), tokenizer), end_ids)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Scores of -inf for every token that is not permitted."""
        pools = context.object_param(GRAMMAR_PARAM)
        texts = context.new_token_arrays()
        by_backend: dict[Any, list[int]] = {}
        for line, pool in enumerate(pools):
            by_backend.setdefault(pool.grammar.backend, []).append(line)
        for backend, lines in by_backend.items():
            masks = np.empty((len(lines), backend.mask_width), np.uint32)
            fill_masks([pools[line] for line in lines], [texts[line] for line in lines], masks)
            if len(by_backend) == 1:
                return apply_masks(scores, masks)
            index = torch.tensor(lines, device=scores.device)
            scores = scores.index_copy(0, index, apply_masks(scores[index], masks))
        return scores


def apply_masks(scores: Tensor, masks: np.ndarray[Any, Any]) -> Tensor:
    """The scores [N, V] with -inf where the bit of a mask [N, W] is not set."""
    size = scores.shape[1]
    packed = torch.from_numpy(masks.view(np.uint8))  # [N, 4 W], bits in little-endian order
    if scores.device.type == "cpu":
        bits = torch.from_numpy(np.unpackbits(packed.numpy(), axis=1, bitorder="little"))
    else:  # eight times less to copy
        packed = packed.to(scores.device, non_blocking=True)
        shifts = torch.arange(8, device=scores.device, dtype=torch.uint8)
        bits = ((packed[:, :, None] >> shifts) & 1).flatten(1)
    permitted = bits.bool()
    if permitted.shape[1] < size:  # the model has more logits than the tokenizer has tokens
        permitted = torch.nn.functional.pad(permitted, (0, size - permitted.shape[1]))
    return scores.masked_fill(~permitted[:, :size], -torch.inf)


_NO_SUFFIX = HealedSuffix()


class HealingLogitsProcessor(LogitsProcessor):
    """Allows only tokens consistent with the text removed from the prompt, until it is reproduced.

    In a direct call, `HealedSuffix.from_prompt(tokenizer, ids)` gives the ids to remove, and `prompt_length`
    is the number of ids that remain.
    """

    def __init__(self, healed_suffix: HealedSuffix, prompt_length: int) -> None:
        if not isinstance(healed_suffix, HealedSuffix):
            raise InputError(
                "healed_suffix",
                "must be a HealedSuffix",
                healed_suffix,
                "create it with HealedSuffix.from_prompt(tokenizer, ids)",
            )
        self.healed_suffix = healed_suffix
        self.prompt_length = check_number("prompt_length", prompt_length, 0, integer=True)

    @classmethod
    def params_from_config(cls, config: GenerationConfig, prompt: PromptInfo) -> dict[str, Any]:  # noqa: ARG003
        """Return the text removed from the prompt."""
        return {"healed_suffix": _NO_SUFFIX if prompt.healed_suffix is None else prompt.healed_suffix}

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Mask the tokens that do not match the removed text."""
        suffixes: list[HealedSuffix] = context.object_param("healed_suffix")
        # The number of generated tokens already excludes most rows.
        unfinished = [
            row for row, count in enumerate(context.generated_on_host) if count < len(suffixes[row])
        ]
        allowed = {
            row: ids
            for row in unfinished
            if (ids := suffixes[row].allowed_ids(context.new_tokens(row))) is not None
        }
        if not allowed:
            return scores
        banned = torch.zeros(scores.shape, dtype=torch.bool)
        for row, ids in allowed.items():
            banned[row] = True
            banned[row, torch.from_numpy(ids[ids < scores.shape[1]])] = False
        return scores.masked_fill(banned.to(scores.device), -torch.inf)
