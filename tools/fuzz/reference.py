"""The oracle of transformers 4.52.4, for the methods that later versions have removed."""

from __future__ import annotations

from typing import Any

import torch

from descant import Hypothesis
from tests.reference.process.client import ReferenceClient
from tools.fuzz.cases import Ask
from tools.fuzz.runs import Result
from tools.fuzz.subjects import Subject

__all__ = ["generated", "has", "pad"]

_METHODS = frozenset(
    {"penalty_alpha", "top_k", "dola_layers", "num_beam_groups", "diversity_penalty", "force_words_ids"}
)
_SHARED = frozenset(
    {
        "max_length", "max_new_tokens", "min_length", "min_new_tokens", "num_beams", "early_stopping",
        "length_penalty", "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "sequence_bias",
        "suppress_tokens", "begin_suppress_tokens", "renormalize_logits", "eos_token_id",
        "forced_eos_token_id", "num_return_sequences",
    }
)  # fmt: skip
_NEUTRAL = frozenset({"logprobs", "prefill_chunk_size", "low_memory", "pad_token_id"})


def pad(on: Subject) -> int:
    """The token that fills up its rows."""
    return on.vocab - 1


def has(on: Subject, ask: Ask) -> bool:
    """Whether it decodes a request in the same way."""
    names = set(ask.fields)
    methods = names & (_METHODS - {"top_k"})
    single = len({"dola_layers", "penalty_alpha", "num_beams"} & names) == 1
    return bool(
        on.folder is not None
        and methods
        and single
        and not {"num_beam_groups", "force_words_ids"} <= names  # refused there
        and names <= _METHODS | _SHARED | _NEUTRAL
        and not (ask.processors or ask.criteria or ask.negative)
    )


def generated(client: ReferenceClient, on: Subject, ask: Ask) -> Result:
    """The result of `generate` there; its reasons and scores are not asked for."""
    arguments: dict[str, Any] = {k: v for k, v in ask.fields.items() if k in _METHODS | _SHARED}
    # A group of beams that has ended goes on with padding there, which later groups are kept from saying:
    # this token is in no prompt and hardly ever said.
    arguments["pad_token_id"] = pad(on)
    inputs = {"input_ids": torch.tensor([ask.source or ask.prompt])}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if ask.source:
        inputs["decoder_input_ids"] = torch.tensor([ask.prompt])
    load = {"torch_dtype": "float64"}
    said = client.generate(str(on.folder), inputs, arguments, ["sequences"], load=load)["sequences"]
    return Result([Hypothesis(row, "") for row in said[:, len(ask.prompt) :]])
