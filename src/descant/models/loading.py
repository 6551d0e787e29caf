"""Models and tokenizers by name, through transformers' Auto classes; a model's own code never runs.

Weights come from safetensors alone. What is read was written by strangers, so that whatever a library raises
over it is told as one named error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers.utils import logging
from transformers.utils.hub import cached_file

from descant.errors import DescantError, InputError, UnsupportedModel, format_value
from descant.models.weight_files import WeightFiles, first_line

__all__ = ["DTYPES", "load", "load_meta_model", "load_tokenizer", "silence_transformers"]

DTYPES: Final = ("auto", "float32", "bfloat16", "float16")
_MAX_CONFIG_BYTES: Final = 4 * 2**20  # bytes of a config
_MAX_CONFIG_VALUES: Final = (
    2**16
)  # values in it, each of which transformers copies and checks many times over


def load(name: str, dtype: str | None = None, device: str | None = None) -> tuple[Any, Any]:
    """A model ready to decode and its tokenizer, from a folder or a name on the hub.

    `dtype` is one of `DTYPES`; None is "auto", what the weights are stored in.
    """
    wanted, where = _parse_dtype(dtype), _parse_device(device)
    with silence_transformers():
        config = _load_config(name)
        with _translate_errors(name):
            weights = WeightFiles.locate(name, getattr(config, "transformers_weights", None))
            tokenizer = _auto_tokenizer(name)
            with weights.limit_model_size():
                model, told = _auto_class(config).from_pretrained(
                    name,
                    config=config,
                    dtype=wanted,
                    trust_remote_code=False,
                    use_safetensors=True,
                    output_loading_info=True,
                )
            # transformers would go on with random numbers in the place of what is not there.
            if lacking := sorted(told["missing_keys"]):
                few = ", ".join(lacking[:3]) + (", ..." if len(lacking) > 3 else "")
                raise UnsupportedModel(f"{name} lacks {len(lacking)} of its weights: {few}")
        return model.eval().to(where), tokenizer


def load_meta_model(name: str) -> Any:
    """A model without its weights: enough to say what would run on it."""
    with silence_transformers():
        config = _load_config(name)
        with _translate_errors(name), torch.device("meta"):
            model = _auto_class(config).from_config(config, trust_remote_code=False)
        # A model need not have one, and then its config speaks.
        with _translate_errors(name), contextlib.suppress(OSError):
            model.generation_config = transformers.GenerationConfig.from_pretrained(name)
        return model


def load_tokenizer(name: str) -> tuple[Any, int | None]:
    """A model's tokenizer, and how many tokens the model scores; None where no config says so."""
    with silence_transformers():
        with _translate_errors(name):
            tokenizer = _auto_tokenizer(name)
        try:
            config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
            size = getattr(config.get_text_config(decoder=True), "vocab_size", None)
        except Exception:  # a tokenizer may lie alone, or beside what nobody knows
            return tokenizer, None
        return tokenizer, size if isinstance(size, int) else None


def _load_config(name: str) -> Any:
    with _translate_errors(name):
        _check_config_size(name, "config.json", "generation_config.json")
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        _check_no_hub_kernels(name, config)
        return config


def _auto_tokenizer(name: str) -> Any:
    _check_config_size(name, "tokenizer_config.json")
    return transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)


def _check_config_size(name: str, *files: str) -> None:
    """Refuse configs that nobody wrote by hand or needs: to read them takes seconds."""
    for file in files:
        with contextlib.suppress(OSError):  # whether it is missing, and matters, is found out elsewhere
            path = Path(str(cached_file(name, file)))
            if path.stat().st_size > _MAX_CONFIG_BYTES:
                raise InputError("model", f"must have a {file} of at most {_MAX_CONFIG_BYTES} bytes", name)
            if path.read_bytes().count(b",") > _MAX_CONFIG_VALUES:
                raise InputError("model", f"must have a {file} of at most {_MAX_CONFIG_VALUES} values", name)


def _check_no_hub_kernels(name: str, config: Any) -> None:
    """Refuse a config that asks for code from the Hub as its attention, or as its experts."""
    for part in (config, *(getattr(config, key, None) for key in config.sub_configs)):
        for kind in ("_attn_implementation", "_experts_implementation"):
            asked = getattr(part, kind, None)
            if isinstance(asked, str) and "/" in asked:
                raise UnsupportedModel(
                    f"{name} asks for code from the Hub ({format_value(asked)}), which does not run here: "
                    f"take `{kind[1:]}` out of its config.json"
                )


def _auto_class(config: Any) -> Any:
    """The Auto class that makes a text generator of this kind."""
    if config.is_encoder_decoder:
        return transformers.AutoModelForSeq2SeqLM
    return transformers.AutoModelForCausalLM


def _parse_dtype(name: str | None) -> Any:
    if name not in (None, *DTYPES):
        raise InputError("dtype", f"must be one of {', '.join(DTYPES)}", name)
    return "auto" if name in (None, "auto") else getattr(torch, str(name))


def _parse_device(name: str | None) -> torch.device:
    try:
        device = torch.device(name or "cpu")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        must = f"must be a device of this machine ({first_line(error)})"
        raise InputError("device", must, name, "leave it out for the CPU") from None
    return device


@contextlib.contextmanager
def _translate_errors(name: str) -> Iterator[None]:
    """Say in one line why a model cannot be loaded."""
    try:
        yield
    except DescantError:
        raise
    except OSError as error:
        if not Path(name).is_dir() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
            must = "must be a folder that exists, or a name on the hub"
        else:
            must = (
                f"must be a folder with a model and a tokenizer, or a name on the hub ({first_line(error)})"
            )
        raise InputError("model", must, name) from error
    except Exception as error:  # each library has its own way to fail over a file that is not as it should be
        raise UnsupportedModel(f"{name} cannot be loaded as a text generator: {first_line(error)}") from error


@contextlib.contextmanager
def silence_transformers() -> Iterator[None]:
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
