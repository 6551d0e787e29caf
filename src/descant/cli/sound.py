"""`descant generate --out`: the sound of one prompt as a WAV file of 16-bit PCM."""

from __future__ import annotations

import io
import wave
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from descant.api.generate import generate
from descant.cli import terminal
from descant.cli.text_output import LENGTH_FIELDS
from descant.config.generation_config import DEFAULT_NEW_TOKENS, GenerationConfig
from descant.core.atomic_file import require_writable, write_bytes
from descant.errors import ConfigError, InputError, UnsupportedModel
from descant.models.loading.loading import load_sound

__all__ = ["SoundJob", "wav_bytes"]

_SAMPLE_BYTES: Final = 2
_LARGEST: Final = 2 ** (8 * _SAMPLE_BYTES - 1) - 1


def wav_bytes(samples: Tensor, sampling_rate: int) -> bytes:
    """A WAV file of samples [channels, T], clipped to [-1, 1]."""
    levels = (samples.float().clamp(-1, 1) * _LARGEST).round().short()
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(len(samples))
        written.setsampwidth(_SAMPLE_BYTES)
        written.setframerate(sampling_rate)
        written.writeframes(levels.T.contiguous().numpy().tobytes())  # the channels of a sample side by side
    return file.getvalue()


_CHANNELS: Final = {1: "mono", 2: "stereo"}


@dataclass(frozen=True)
class SoundJob:
    """A WAV file to write, and the parameters of its sound."""

    path: str
    overwrite: bool
    parameters: Mapping[str, Any]
    file_config: GenerationConfig | None

    def run(self, model_name: str, text: str, dtype: str | None, device: str | None) -> int:
        """Load the model, generate the sound of a text, and write it."""
        self._check_path()
        self._check_parameters()
        with terminal.console().status("loading"):
            model = load_sound(model_name, dtype, device)
        needs_length = not model.kind.sets_length and not self._has_length(model.network.generation_config)
        # One output of codes or samples, also where the model's own config asks for an output object.
        asked = {**self.parameters, "return_dict_in_generate": False}
        if needs_length:
            asked["max_new_tokens"] = DEFAULT_NEW_TOKENS
        with terminal.console().status("generating"):
            output = generate(model.network, None, self.file_config, **model.prompt_inputs(text), **asked)
            samples, rate = model.samples(output), model.sampling_rate
        if not samples.isfinite().all():
            raise UnsupportedModel(
                f"{model_name} gives samples that are not finite: load it with --dtype float32"
            )
        self._write(wav_bytes(samples, rate))
        channels = _CHANNELS.get(len(samples), f"{len(samples)} channels")
        seconds = samples.shape[1] / rate
        terminal.write_untrusted(f"{self.path}: {seconds:.2f} s of sound, {rate} Hz, {channels}\n")
        if needs_length:
            terminal.print_info(
                f"generated with the default of {DEFAULT_NEW_TOKENS} new tokens: set --max-new-tokens"
            )
        return 0

    def _has_length(self, model_config: Any) -> bool:
        """Whether an option, --config or the model's own config sets a length."""
        own = GenerationConfig.from_transformers(model_config)
        return bool(GenerationConfig.merge(self.parameters, self.file_config, own).given & LENGTH_FIELDS)

    def _check_path(self) -> None:
        """Raise InputError for a path that cannot be written, before a model is loaded."""
        if not self.path.lower().endswith(".wav"):
            raise InputError("out", "must be a file whose name ends with .wav", self.path)
        if not self.overwrite and Path(self.path).exists():
            raise self._exists_error()
        try:
            require_writable(self.path)
        except OSError as error:
            must = f"must be a file that can be opened ({error.strerror})"
            raise InputError("out", must, self.path) from None

    def _check_parameters(self) -> None:
        """Raise ConfigError for more than one sequence, which one file cannot hold."""
        config = GenerationConfig.merge(self.parameters, self.file_config)
        if config.num_return_sequences not in (None, 1):
            must = "must be 1 for one WAV file"
            raise ConfigError("num_return_sequences", must, config.num_return_sequences, "leave it out")

    def _exists_error(self) -> InputError:
        do = "give --overwrite to replace it, or another file"
        return InputError("out", "must be a new file", self.path, do)

    def _write(self, data: bytes) -> None:
        try:
            write_bytes(self.path, data, exclusive=not self.overwrite)
        except FileExistsError:  # made by somebody else meanwhile
            raise self._exists_error() from None
