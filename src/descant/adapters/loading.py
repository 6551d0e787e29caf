"""Models and tokenizers by name, through transformers' Auto classes; a model's own code never runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers.utils import logging

from descant.errors import InputError, UnsupportedModel, shown

__all__ = ["DTYPES", "load", "outline", "quiet", "tokenizing"]

DTYPES: Final = ("auto", "float32", "bfloat16", "float16")


def load(name: str, dtype: str | None = None, device: str | None = None) -> tuple[Any, Any]:
    """A model ready to decode and its tokenizer, from a folder or a name on the hub.

    `dtype` is one of `DTYPES`; None is "auto", what the weights are stored in.
    """
    wanted, where = _dtype(dtype), _device(device)
    with quiet():
        config = _config(name)
        with _told(name):
            tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        with _told(name):
            model = _auto(config).from_pretrained(name, config=config, dtype=wanted, trust_remote_code=False)
        return model.eval().to(where), tokenizer


def outline(name: str) -> Any:
    """A model without its weights: enough to say what would run on it."""
    with quiet():
        config = _config(name)
        with _told(name), torch.device("meta"):
            model = _auto(config).from_config(config, trust_remote_code=False)
        with contextlib.suppress(OSError):  # a model need not have one, and then its config speaks
            model.generation_config = transformers.GenerationConfig.from_pretrained(name)
        return model


def tokenizing(name: str) -> tuple[Any, int | None]:
    """A model's tokenizer, and how many tokens the model scores; None where no config says so."""
    with quiet():
        with _told(name):
            tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        try:
            config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        except (OSError, ValueError, KeyError):  # a tokenizer may lie alone, or beside what nobody knows
            return tokenizer, None
        return tokenizer, getattr(config.get_text_config(decoder=True), "vocab_size", None)


def _config(name: str) -> Any:
    with _told(name):
        return transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)


def _auto(config: Any) -> Any:
    """The Auto class that makes a text generator of this kind."""
    if config.is_encoder_decoder:
        return transformers.AutoModelForSeq2SeqLM
    return transformers.AutoModelForCausalLM


def _dtype(name: str | None) -> Any:
    if name not in (None, *DTYPES):
        raise InputError("dtype", f"must be one of {', '.join(DTYPES)}", name)
    return "auto" if name in (None, "auto") else getattr(torch, str(name))


def _device(name: str | None) -> torch.device:
    try:
        device = torch.device(name or "cpu")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        must = f"must be a device of this machine ({_first_line(error)})"
        raise InputError("device", must, name, "leave it out for the CPU") from None
    return device


@contextlib.contextmanager
def _told(name: str) -> Iterator[None]:
    """Say in one line why a model cannot be loaded."""
    try:
        yield
    except OSError as error:
        if not Path(name).is_dir() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
            must = "must be a folder that exists, or a name on the hub"
        else:
            must = (
                f"must be a folder with a model and a tokenizer, or a name on the hub ({_first_line(error)})"
            )
        raise InputError("model", must, name) from error
    except (ValueError, KeyError, ImportError) as error:
        raise UnsupportedModel(
            f"{name} cannot be loaded as a text generator: {_first_line(error)}"
        ) from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".: ") if lines else shown(error)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' progress bars and hints off the terminal while something is loaded or saved."""
    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
