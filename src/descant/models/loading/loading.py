"""Loads models and tokenizers by name through transformers' Auto classes, without remote code.

Weights are read from safetensors, or from a GGUF file. Files are untrusted: whatever a library raises on them
becomes one named error.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers.utils import logging
from transformers.utils.hub import cached_file

from descant.config.dtype_names import DTYPES
from descant.errors import DescantError, InputError, UnsupportedModel, first_line, format_value
from descant.models.loading.gguf import GgufFile
from descant.models.loading.sound_model import SOUND_KINDS, SoundModel
from descant.models.loading.weight_files import WeightFiles

__all__ = [
    "check_device",
    "load",
    "load_meta_model",
    "load_processor",
    "load_sound",
    "load_tokenizer",
    "silence_transformers",
]

_MAX_CONFIG_BYTES: Final = 4 * 2**20
_MAX_CONFIG_VALUES: Final = 2**16  # transformers copies and checks each value many times


def load(
    name: str, dtype: str | None = None, device: str | None = None, *, speech: bool = False
) -> tuple[Any, Any]:
    """Load a model in eval mode and its tokenizer, from a folder, a GGUF file, or by a name on the Hub.

    `dtype` is one of `DTYPES`; None is "auto", the dtype of the stored weights, and float32 for a GGUF file,
    whose weights are dequantized. With `speech`, Whisper models are loaded too.
    """
    torch_dtype, torch_device = _parse_dtype(dtype), check_device(device)
    with silence_transformers():
        source = _find_source(name)
        config = _load_config(source)
        _require_text(name, config)
        with _translate_errors(name):
            weights = source.weights(config)
            tokenizer = _auto_tokenizer(source)
            if source.gguf is not None and torch_dtype == "auto":
                torch_dtype = torch.float32
            model = _load_weights(source, weights, _auto_class(config, speech), config, torch_dtype)
        return model.eval().to(torch_device), tokenizer


def load_sound(name: str, dtype: str | None = None, device: str | None = None) -> SoundModel:
    """Load a model of sound in eval mode, with its processor and codec, from a folder or by a Hub name."""
    torch_dtype, torch_device = _parse_dtype(dtype), check_device(device)
    with silence_transformers():
        source = _find_source(name)
        config = _load_config(source)
        kind = SOUND_KINDS.get(config.model_type)
        if kind is None:
            must = (
                f"must be a model of sound for --out ({', '.join(SOUND_KINDS)}), and not {config.model_type}"
            )
            raise InputError("model", must, name, "remove --out")
        with _translate_errors(name, "a model of sound"):
            processor = (
                _auto_tokenizer(source)
                if kind.codec_class is None
                else _codec_processor(source, kind.codec_class, torch_device)
            )
            weights, model_class = source.weights(config), getattr(transformers, kind.class_name)
            model = _load_weights(source, weights, model_class, config, torch_dtype)
        return SoundModel(name, model.eval().to(torch_device), processor)


def load_meta_model(name: str) -> Any:
    """A model on the meta device, without weights; enough to inspect its traits."""
    with silence_transformers():
        source = _find_source(name)
        config = _load_config(source)
        with _translate_errors(name), torch.device("meta"):
            model = _auto_class(config).from_config(config, trust_remote_code=False)
        # The file is optional; without it the defaults come from the config.
        with _translate_errors(name), contextlib.suppress(OSError):
            model.generation_config = transformers.GenerationConfig.from_pretrained(source.place)
        return model


def load_tokenizer(name: str) -> tuple[Any, int | None]:
    """The tokenizer of a model, and the model's vocabulary size; None if there is no config that has one."""
    with silence_transformers():
        source = _find_source(name)
        with _translate_errors(name):
            tokenizer = _auto_tokenizer(source)
        try:
            config = transformers.AutoConfig.from_pretrained(source.place, **source.options)
            size = getattr(config.get_text_config(decoder=True), "vocab_size", None)
        except Exception:  # the folder may hold a tokenizer alone, or an unknown config
            return tokenizer, None
        return tokenizer, size if isinstance(size, int) else None


@dataclass(frozen=True)
class _ModelSource:
    """What transformers reads a model from: a folder or a name on the Hub, or a GGUF file in a folder."""

    name: str  # as given
    gguf: GgufFile | None = None

    @property
    def place(self) -> str:
        """The folder, or the name on the Hub."""
        return self.name if self.gguf is None else self.gguf.folder

    @property
    def options(self) -> dict[str, Any]:
        """Options of every `from_pretrained`."""
        return {"trust_remote_code": False} | ({} if self.gguf is None else {"gguf_file": self.gguf.file})

    def weights(self, config: Any) -> WeightFiles:
        """The checked files of the weights."""
        if self.gguf is not None:
            return self.gguf.weights()
        return WeightFiles.locate(self.name, getattr(config, "transformers_weights", None))

    def quiet(self) -> contextlib.AbstractContextManager[Any]:
        """Hides the bar of the conversion of a GGUF file, which transformers has no switch for."""
        return contextlib.nullcontext() if self.gguf is None else contextlib.redirect_stderr(io.StringIO())


def _find_source(name: str) -> _ModelSource:
    with _translate_errors(name):
        gguf = GgufFile.find(name)
        if gguf is not None:
            _ = gguf.header  # checked before any library reads the file
        return _ModelSource(name, gguf)


def _load_config(source: _ModelSource) -> Any:
    with _translate_errors(source.name):
        _check_config_size(source.place, "config.json", "generation_config.json")
        config = transformers.AutoConfig.from_pretrained(source.place, **source.options)
        _check_no_hub_kernels(source.name, config)
        return config


def _load_weights(
    source: _ModelSource, weights: WeightFiles, model_class: Any, config: Any, dtype: Any
) -> Any:
    """A model with the weights of its checked files."""
    with weights.limit_model_size(), source.quiet():
        model, info = model_class.from_pretrained(
            source.place,
            config=config,
            dtype=dtype,
            use_safetensors=source.gguf is None,
            output_loading_info=True,
            **source.options,
        )
    # transformers would initialise missing weights randomly, without an error.
    if missing := sorted(info["missing_keys"]):
        examples = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise UnsupportedModel(f"{source.name} lacks {len(missing)} of its weights: {examples}")
    return model


def _codec_processor(source: _ModelSource, codec_class: str, device: torch.device) -> Any:
    """The processor of a model of sound, with the codec that its config names."""
    place = _codec_place(source, codec_class)
    # The processor loads its codec too, without these checks: they come first, and their codec is used.
    codec_source = _find_source(place)
    config = _load_config(codec_source)
    weights = codec_source.weights(config)
    codec = _load_weights(codec_source, weights, getattr(transformers, codec_class), config, "auto")
    processor = load_processor(source.place)
    processor.audio_tokenizer = codec.eval().to(device)
    return processor


def _codec_place(source: _ModelSource, codec_class: str) -> str:
    """The folder or Hub name of the codec, which the config of the processor names with its class."""
    entry: Any = None
    for file in ("audio_tokenizer_config.json", "processor_config.json"):  # the first one wins
        _check_config_size(source.place, file)
        with contextlib.suppress(OSError):
            read = json.loads(Path(str(cached_file(source.place, file))).read_bytes())
            entry = read if file.startswith("audio") else read.get("audio_tokenizer")
            break
    place = entry.get("audio_tokenizer_name_or_path") if isinstance(entry, dict) else None
    if isinstance(place, str) and entry.get("audio_tokenizer_class") == codec_class:
        return place
    raise UnsupportedModel(
        f"{source.name} names no {codec_class} in the config of its processor, which makes sound of its "
        "output: save the processor with its audio tokenizer (`save_pretrained`)"
    )


def _auto_tokenizer(source: _ModelSource) -> Any:
    _check_config_size(source.place, "tokenizer_config.json")
    load_any = transformers.AutoTokenizer.from_pretrained
    tokenizer = load_any(source.place, **source.options)
    return tokenizer if source.gguf is None else source.gguf.complete_tokenizer(tokenizer)


def _check_config_size(name: str, *files: str) -> None:
    """Raise for oversized configs, which take seconds to read."""
    for file in files:
        with contextlib.suppress(OSError):  # a missing file is reported by the loader if it is needed
            path = Path(str(cached_file(name, file)))
            if path.stat().st_size > _MAX_CONFIG_BYTES:
                raise InputError("model", f"must have a {file} of at most {_MAX_CONFIG_BYTES} bytes", name)
            if path.read_bytes().count(b",") > _MAX_CONFIG_VALUES:
                raise InputError("model", f"must have a {file} of at most {_MAX_CONFIG_VALUES} values", name)


def _check_no_hub_kernels(name: str, config: Any) -> None:
    """Raise for a config that names attention or expert kernels on the Hub, which are code."""
    for part in (config, *(getattr(config, key, None) for key in config.sub_configs)):
        for kind in ("_attn_implementation", "_experts_implementation"):
            kernel = getattr(part, kind, None)
            if isinstance(kernel, str) and "/" in kernel:
                raise UnsupportedModel(
                    f"{name} asks for code from the Hub ({format_value(kernel)}), which is not supported: "
                    f"remove `{kind[1:]}` from its config.json"
                )


def load_processor(name: str) -> Any:
    """Load the processor of a model, such as the one that turns recordings into features."""
    with silence_transformers(), _translate_errors(name):
        load_any: Any = transformers.AutoProcessor.from_pretrained  # it has no types
        return load_any(name, trust_remote_code=False)


def _auto_class(config: Any, speech: bool = False) -> Any:
    """The Auto class for text generation with this config; with `speech`, also of Whisper models."""
    if speech and config.model_type == "whisper":
        return transformers.AutoModelForSpeechSeq2Seq
    if config.is_encoder_decoder:
        return transformers.AutoModelForSeq2SeqLM
    return transformers.AutoModelForCausalLM


def _require_text(name: str, config: Any) -> None:
    """Raise for a model of sound, which gives no text."""
    if kind := SOUND_KINDS.get(config.model_type):
        raise UnsupportedModel(
            f"{name} is a model of sound ({kind.class_name}), and gives no text: "
            "use `descant generate` with --out FILE.wav"
        )


def _parse_dtype(name: str | None) -> Any:
    if name not in (None, *DTYPES):
        raise InputError("dtype", f"must be one of {', '.join(DTYPES)}", name)
    return "auto" if name in (None, "auto") else getattr(torch, str(name))


def check_device(name: str | None) -> torch.device:
    """The device of that name, or an InputError if this machine does not have it; None is the CPU."""
    try:
        device = torch.device(name or "cpu")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        must = f"must be an available device ({first_line(error)})"
        raise InputError("device", must, name, "leave it out to use the CPU") from None
    return device


@contextlib.contextmanager
def _translate_errors(name: str, kind: str = "a text generator") -> Iterator[None]:
    """Turn any error of a block into InputError or UnsupportedModel with a one-line reason."""
    try:
        yield
    except DescantError:
        raise
    except OSError as error:
        if not Path(name).is_dir() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
            must = "must be a folder that exists, or a name on the Hub"
        else:
            reason = first_line(error)
            must = f"must be a folder with a model and a tokenizer, or a name on the Hub ({reason})"
        raise InputError("model", must, name) from error
    except Exception as error:  # libraries raise many types for malformed files
        raise UnsupportedModel(f"{name} cannot be loaded as {kind}: {first_line(error)}") from error


@contextlib.contextmanager
def silence_transformers() -> Iterator[None]:
    """Disable transformers' progress bars and log messages inside a block."""
    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
