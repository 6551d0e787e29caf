"""Generated text on standard output, as it streams or of a function recipe; generated sound as a WAV file."""

from __future__ import annotations

import io
import wave
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from descant.api.generate import generate
from descant.api.stream import StreamEvent
from descant.cli import terminal
from descant.config.generation_config import DEFAULT_NEW_TOKENS, GenerationConfig
from descant.core.atomic_file import require_writable, write_bytes
from descant.errors import ConfigError, InputError, RecipeError, UnsupportedModel, file_errors
from descant.models.loading.loading import load_sound
from descant.recipes.recipe import Recipe
from descant.tokenization.detokenizer import IncrementalDetokenizer

SEPARATOR: Final = "---\n"


class StreamPrinter:
    """Prints sequences one after the other: the first one as it grows, the others afterwards."""

    def __init__(self) -> None:
        self._pending_texts: dict[int, str] = {}  # not printed yet
        self._finished: set[int] = set()
        self._current = 0
        self._has_separator = True  # the first sequence needs none
        self._last_char = "\n"
        self._output = terminal.UntrustedText()

    def print_event(self, event: StreamEvent) -> None:
        """Print what is next in order; raises the error of an event."""
        if event.error is not None:
            raise event.error
        self._pending_texts[event.sequence] = self._pending_texts.get(event.sequence, "") + (event.text or "")
        if event.finish_reason is not None:
            self._finished.add(event.sequence)
        while True:
            text = self._pending_texts.pop(self._current, "")
            if not self._has_separator and (text or self._current in self._finished):
                self.end_line()
                self._write(SEPARATOR)
                self._has_separator = True
            self._write(text)
            if self._current not in self._finished:
                return
            self._current += 1
            self._has_separator = False

    def end_line(self) -> None:
        """End the last line, if needed."""
        if self._last_char != "\n":
            self._write("\n")

    def _write(self, text: str) -> None:
        if text:
            self._last_char = text[-1]  # before writing, which may be interrupted
            self._output.write(text)


LENGTH_FIELDS: Final = frozenset({"max_new_tokens", "max_length"})


class DefaultLengthNote:
    """Collects why texts of a run ended, and says once that the default length has cut one."""

    def __init__(self) -> None:
        self._is_due = False

    def add(self, config: GenerationConfig, finish_reason: str | None) -> None:
        """Take the end of a text that was generated with a merged config."""
        self._is_due |= finish_reason == "length" and not config.given & LENGTH_FIELDS

    def print_if_due(self) -> None:
        """Print the note, if a text was cut."""
        if self._is_due:
            terminal.print_info(
                f"stopped at the default of {DEFAULT_NEW_TOKENS} new tokens: set --max-new-tokens"
            )


@dataclass(frozen=True)
class FunctionRecipe:
    """A function recipe with its model; its text is known only when it returns."""

    recipe: Recipe
    model: Any
    tokenizer: Any

    @classmethod
    def from_request(
        cls, request_extras: Mapping[str, Any], model: Any, tokenizer: Any
    ) -> FunctionRecipe | None:
        """The function recipe of a request; None if it has no such recipe."""
        recipe = request_extras.get("recipe")
        if not isinstance(recipe, Recipe) or recipe.kind != "generate":
            return None
        return cls(recipe, model, tokenizer)

    def stream_events(
        self, request_args: Mapping[str, Any], file_config: GenerationConfig | None, values: Mapping[str, Any]
    ) -> Generator[StreamEvent]:
        """The result for one prompt as stream events, one per sequence."""
        for index, (ids, text) in enumerate(self.generate(request_args, file_config, values)):
            yield StreamEvent(0, index, tuple(ids), text, finish_reason="stop")

    def generate(
        self, request_args: Mapping[str, Any], file_config: GenerationConfig | None, values: Mapping[str, Any]
    ) -> list[tuple[list[int], str]]:
        """New tokens and text of each sequence for a prompt [1, L]."""
        inputs = dict(request_args)
        if not self._accepts("attention_mask"):  # redundant: one prompt has no padding
            inputs.pop("attention_mask", None)
        if self._accepts("tokenizer"):
            inputs["tokenizer"] = self.tokenizer
        result: Any = generate(self.model, generation_config=file_config, **inputs, **values)
        ids = getattr(result, "sequences", result)
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point() or ids.is_complex():
            requirement = "must return token ids [N, L], or a record with `sequences`"
            raise RecipeError(self.recipe.name, f"{requirement}, got {type(result).__name__}")
        prompt = request_args["input_ids"][0].tolist()
        return [self._split_prompt(sequence, prompt) for sequence in ids.tolist()]

    def _accepts(self, name: str) -> bool:
        return self.recipe.accepts_kwargs or name in self.recipe.argument_names

    def _split_prompt(self, sequence: list[int], prompt: list[int]) -> tuple[list[int], str]:
        """The new tokens of a sequence and their text; all tokens if it does not start with the prompt."""
        if self.model.config.is_encoder_decoder:
            return sequence, self._decode(sequence, [])
        start = 0
        while (
            start < len(sequence)
            and sequence[start] == self.tokenizer.pad_token_id
            and sequence[start] != prompt[0]
        ):
            start += 1
        if sequence[start : start + len(prompt)] != prompt:
            return sequence, self._decode(sequence, [])
        new = sequence[start + len(prompt) :]
        return new, self._decode(new, prompt)

    def _decode(self, ids: list[int], prompt: list[int]) -> str:
        text = IncrementalDetokenizer(self.tokenizer, prompt_ids=prompt, skip_special_tokens=True)
        return text.put(ids) + text.end()


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
        with file_errors("out", self.path):
            require_writable(self.path)

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
