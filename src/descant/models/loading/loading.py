"""Models of sound for the command line: how each kind reads a prompt, and gives samples."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import Tensor
from transformers.utils import logging
from transformers.utils.hub import cached_file

from descant.config.dtype_names import DTYPES
from descant.errors import DescantError, InputError, UnsupportedModel, first_line, format_value
from descant.models.loading.weight_files import GgufFile, WeightFiles


@dataclass(frozen=True)
class SoundKind:
    """Differences between models of sound: class, prompt, and where the codec is.

    `codec_class` is the codec of the processor; None: the codec is a part of the model, and the prompt needs
    no more than the tokenizer.
    """

    class_name: str
    codec_class: str | None = None
    codec_config: str = ""  # the part of the model's config that describes its codec
    rate_name: str = "sampling_rate"  # of the config of the codec
    call_options: Mapping[str, Any] = field(default_factory=dict)  # more arguments of `generate`
    has_messages: bool = False  # the prompt is a user message in the processor's chat template
    sets_length: bool = False  # without a length, the model's own generate() sets one for the text
    system_text: str | None = None  # a message before the prompt, with which the model was trained


_POCKET_CODEC: Final = "PocketTTSAudioTokenizerModel"

# By the model type of the config.
SOUND_KINDS: Final[Mapping[str, SoundKind]] = {
    "csm": SoundKind(
        "CsmForConditionalGeneration", codec_config="codec_config", call_options={"output_audio": True}
    ),
    "dia": SoundKind("DiaForConditionalGeneration", "DacModel"),
    "gradium_phonon_tts": SoundKind(
        "GradiumPhononTTSForConditionalGeneration", _POCKET_CODEC, has_messages=True, sets_length=True
    ),
    "higgs_audio_v2": SoundKind(
        "HiggsAudioV2ForConditionalGeneration",
        "HiggsAudioV2TokenizerModel",
        rate_name="sample_rate",
        has_messages=True,
        system_text="Generate audio following instruction.",
    ),
    "musicgen": SoundKind("MusicgenForConditionalGeneration", codec_config="audio_encoder"),
    "musicgen_melody": SoundKind("MusicgenMelodyForConditionalGeneration", codec_config="audio_encoder"),
    "pocket_tts": SoundKind(
        "PocketTTSForConditionalGeneration", _POCKET_CODEC, has_messages=True, sets_length=True
    ),
}


@dataclass(frozen=True)
class SoundModel:
    """A model of sound with its processor, or with its tokenizer where the codec is in the model."""

    name: str
    network: Any
    processor: Any

    @property
    def kind(self) -> SoundKind:
        """The differences from other models of sound."""
        return SOUND_KINDS[self.network.config.model_type]

    @property
    def sampling_rate(self) -> int:
        """Samples in a second, by the config of the codec."""
        kind = self.kind
        if kind.codec_class is None:
            config = getattr(self.network.config, kind.codec_config)
        else:
            config = self.processor.audio_tokenizer.config
        return int(getattr(config, kind.rate_name))

    def prompt_inputs(self, text: str) -> dict[str, Any]:
        """The arguments of `generate` for a prompt, on the device of the model."""
        if self.kind.has_messages:
            inputs = self.processor.apply_chat_template(
                self._messages(text),
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
            )
        else:
            inputs = self.processor(text=[text], padding=False, return_tensors="pt")
        device = self.network.device
        tensors = {
            name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()
        }
        return {**tensors, **self.kind.call_options}

    def samples(self, output: Any) -> Tensor:
        """The samples [channels, T] of the one prompt of a call."""
        try:
            sound = self._decode(output)
        except (IndexError, RuntimeError, ValueError) as error:  # of any layer of a codec
            raise DescantError(
                f"the codec of {self.name} cannot decode what was generated ({first_line(error)}): "
                "if that is too short for a frame, set a larger `max_new_tokens`"
            ) from error
        sound = torch.as_tensor(sound).detach().float().cpu()
        return sound if sound.ndim == 2 else sound.reshape(1, -1)

    def _decode(self, output: Any) -> Any:
        """The samples of the first row of an output."""
        if self.kind.codec_class is None:
            return output[0]
        if self.kind.codec_class == _POCKET_CODEC:
            return self.processor.decode(output[0])
        return self.processor.batch_decode(output)[0]

    def _messages(self, text: str) -> list[dict[str, Any]]:
        if getattr(self.processor, "chat_template", None) is None:
            must = "must have a chat template in its processor"
            raise InputError("model", must, self.name, "add the chat_template.jinja of the model")
        texts = [("system", self.kind.system_text), ("user", text)]
        return [
            {"role": role, "content": [{"type": "text", "text": content}]}
            for role, content in texts
            if content is not None
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
        # Raise for a model of sound, which gives no text.
        if kind := SOUND_KINDS.get(config.model_type):
            raise UnsupportedModel(
                f"{name} is a model of sound ({kind.class_name}), and gives no text: "
                "use `descant generate` with --out FILE.wav"
            )
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
    """The source of a model for transformers: a folder, a name on the Hub, or a GGUF file in a folder."""

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
