"""The subject of a trial: a tiny random model and prompts of different lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["Entry", "Subject"]


class Entry(NamedTuple):
    """One generative class of transformers and the mapping that lists it."""

    task: str  # "causal-lm", "seq2seq-lm", "speech-seq2seq", "image-text-to-text", "text-to-audio", ...
    model_type: str  # "llama"
    name: str  # "LlamaForCausalLM"


@dataclass
class Subject:
    """A model and its prompts.

    `prompts` are inputs of `generate()` as batches of one, of different length where the model has text
    prompts; `batch` is all of them as one padded batch as the model's own processor would make it
    (decoder-only text padded at the left with an attention mask), None where they cannot share one.
    """

    entry: Entry
    model: Any
    prompts: list[dict[str, Tensor]]
    batch: dict[str, Tensor] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # further arguments of both generate()s
    note: str = ""  # remark for the report
    reference_options: Mapping[str, Any] = field(default_factory=dict)  # arguments of transformers' own alone
