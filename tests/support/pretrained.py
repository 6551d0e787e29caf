"""Pretrained models for tests, built by `tools/models.py` into `models/` or the folder DESCANT_MODELS."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Pretrained:
    """A pretrained model loaded in this process, its tokenizer, and the folder both came from."""

    name: str
    folder: Path
    model: Any
    tokenizer: Any

    @property
    def encoder_decoder(self) -> bool:
        return bool(self.model.config.is_encoder_decoder)

    @property
    def eos(self) -> int | list[int]:
        ids: int | list[int] = self.model.generation_config.eos_token_id
        return ids

    @property
    def pad(self) -> int:
        return int(self.model.generation_config.pad_token_id)

    @property
    def vocab(self) -> int:
        return int(self.model.config.vocab_size)

    def tokens(self, text: str) -> list[int]:
        """Token ids of `text` as the model expects a prompt to begin."""
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids


def folder(name: str) -> Path:
    """The folder of the model `name`; if it is missing, an error with the command that builds it."""
    where = Path(os.environ.get("DESCANT_MODELS") or ROOT / "models") / name
    if not (where / "config.json").exists() or not list(where.glob("*.safetensors")):
        raise FileNotFoundError(f"no model in {where}: build it with `python tools/models.py {name}`")
    return where


@functools.cache
def tokenizer(name: str) -> Any:
    """The tokenizer of the model `name`, for tests that do not change it; a large one loads in seconds."""
    import transformers

    return transformers.AutoTokenizer.from_pretrained(folder(name))


# A handful at most, so that a test process does not hold every model at once.
@functools.lru_cache(maxsize=4)
def load(name: str) -> Pretrained:
    """Load the model `name` in fp32."""
    import transformers

    where = folder(name)
    config = transformers.AutoConfig.from_pretrained(where)
    auto = (
        transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    )
    model = auto.from_pretrained(where, dtype=torch.float32).eval()
    return Pretrained(name, where, model, transformers.AutoTokenizer.from_pretrained(where))
