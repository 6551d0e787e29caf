"""Models of sound for the command line: how each kind reads a prompt, and gives samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from descant.errors import DescantError, InputError, first_line

__all__ = ["SOUND_KINDS", "SoundKind", "SoundModel"]


@dataclass(frozen=True)
class SoundKind:
    """What differs between models of sound: class, prompt, and where the codec is.

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
        """What the model differs in from other models of sound."""
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
        tensors = {name: one.to(device) if isinstance(one, Tensor) else one for name, one in inputs.items()}
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
