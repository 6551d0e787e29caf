"""The last step of a build: all keys of the folder must load, and its probe must continue as expected."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging

from .errors import ModelError
from .recipe import Recipe

KEY_FAULTS = ("missing_keys", "unexpected_keys", "mismatched_keys")


def check(recipe: Recipe, folder: Path) -> None:
    """Raise unless the model in the folder is complete."""
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    # Version 5 warns that T5's head is not tied, which is as it should be.
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    architecture = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0]
    model, info = getattr(transformers, architecture).from_pretrained(folder, output_loading_info=True)
    faults = {kind: sorted(map(str, info[kind])) for kind in KEY_FAULTS if info[kind]}
    if faults:
        raise ModelError(
            f"{recipe.name}: weights must fit {architecture}, got {faults}; correct its converter"
        )
    if recipe.probe is not None:
        got = continuation(model.eval(), folder, recipe.probe.prompt)
        if not got.startswith(recipe.probe.continuation):
            raise ModelError(
                f"{recipe.name}: greedy decoding of {recipe.probe.prompt!r} should begin with "
                f"{recipe.probe.continuation!r}, got {got!r}; correct its converter"
            )


def continuation(model: Any, folder: Path, prompt: str, length: int = 12) -> str:
    """The greedy continuation of a prompt."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.inference_mode():
        ids = model.generate(**inputs, max_new_tokens=length, do_sample=False, num_beams=1)[0]
    prompt_length = 0 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    return str(tokenizer.decode(ids[prompt_length:], skip_special_tokens=True))
