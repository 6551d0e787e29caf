"""Folders with tiny random models of sound, as `save_pretrained` writes them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import transformers

from descant.models.loading.loading import SoundModel
from tests.support import wordpiece
from tests.support.codebooks import codebook_subject
from tools.sweep.subject import Entry
from tools.sweep.trial import subject_of

__all__ = ["FOLDERS", "higgs_sound_model"]

_POCKET_TOKENS = {
    "audio_prompt_token": "<voice>",
    "audio_latent_token": "<latent>",
    "audio_prompt_bos_token": "<voice-start>",
    "audio_bos_token": "<sound>",
}
_HIGGS_TOKENS = {
    "audio_token": "<|AUDIO_OUT|>",
    "audio_bos_token": "<|audio_out_bos|>",
    "audio_eos_token": "<|audio_eos|>",
    "audio_delay_token": "<|reserved_special_token_6|>",
}
_TEXTS = "{% for m in messages %}{{ m['content'][0]['text'] }} {% endfor %}"


def musicgen(folder: Path) -> None:
    """MusicGen with a tokenizer alone."""
    config = copy.deepcopy(codebook_subject("musicgen").model.config)
    _save_random(transformers.MusicgenForConditionalGeneration, config, folder)
    wordpiece.tokenizer().save_pretrained(folder)


def stereo_musicgen(folder: Path) -> None:
    """MusicGen with two channels, whose codebooks alternate."""
    config = copy.deepcopy(codebook_subject("musicgen").model.config)
    config.decoder.audio_channels, config.decoder.num_codebooks = 2, 2 * config.decoder.num_codebooks
    _save_random(transformers.MusicgenForConditionalGeneration, config, folder)
    wordpiece.tokenizer().save_pretrained(folder)


def melody(folder: Path) -> None:
    """MusicGen Melody with a tokenizer alone."""
    config = copy.deepcopy(codebook_subject("melody").model.config)
    _save_random(transformers.MusicgenMelodyForConditionalGeneration, config, folder)
    wordpiece.tokenizer().save_pretrained(folder)


def csm(folder: Path) -> None:
    """CSM with a tokenizer alone, and a codec that has all codes of the model."""
    config = copy.deepcopy(codebook_subject("csm").model.config)
    config.codec_config.codebook_size = 128  # a power of 2 is required
    _save_random(transformers.CsmForConditionalGeneration, config, folder)
    wordpiece.tokenizer().save_pretrained(folder)


def dia(folder: Path) -> None:
    """Dia with a processor and a codec; its processor has codes and delays of its own."""
    config = copy.deepcopy(codebook_subject("dia").model.config)
    decoder = config.decoder_config
    decoder.num_channels, decoder.vocab_size = 9, 1028
    decoder.eos_token_id, decoder.pad_token_id, decoder.bos_token_id = 1024, 1025, 1026
    config.delay_pattern = [0, 8, 9, 10, 11, 12, 13, 14, 15]
    config.encoder_config.vocab_size = 256  # bytes
    _save_random(transformers.DiaForConditionalGeneration, config, folder)
    codec_config = transformers.DacConfig(
        encoder_hidden_size=4, decoder_hidden_size=16, downsampling_ratios=[2, 2], sampling_rate=800
    )
    codec = _save_random(transformers.DacModel, codec_config, folder / "codec")
    features = transformers.DacFeatureExtractor(sampling_rate=800, hop_length=4)
    transformers.DiaProcessor(features, transformers.DiaTokenizer(), codec).save_pretrained(folder)


class HiggsCodec(transformers.DacModel):
    """A codec in place of that of Higgs Audio, which needs torchaudio."""

    def decode(self, codes: torch.Tensor) -> Any:
        """The sound of codes [B, C, T]."""
        return super().decode(audio_codes=codes)


def higgs_sound_model() -> SoundModel:
    """Higgs Audio V2 with its processor; its special tokens are added to the tokenizer."""
    tokenizer, ids = _with_tokens(_HIGGS_TOKENS)
    config = copy.deepcopy(codebook_subject("higgs").model.config)
    for name in ("audio_token", "audio_bos_token", "audio_delay_token"):
        setattr(config, f"{name}_id", ids[name])
    torch.manual_seed(0)
    network = transformers.HiggsAudioV2ForConditionalGeneration(config).eval()
    codec_config = transformers.DacConfig(
        encoder_hidden_size=4,
        decoder_hidden_size=16,
        downsampling_ratios=[2, 2],
        n_codebooks=config.num_codebooks,
        codebook_size=64,
    )
    codec_config.sample_rate = 800
    processor = transformers.HiggsAudioV2Processor(
        transformers.DacFeatureExtractor(sampling_rate=800, hop_length=4),
        tokenizer,
        None,
        chat_template=_TEXTS + _HIGGS_TOKENS["audio_bos_token"],
        audio_stream_bos_id=config.audio_stream_bos_id,
        audio_stream_eos_id=config.audio_stream_eos_id,
    )
    processor.audio_tokenizer = HiggsCodec(codec_config).eval()
    return SoundModel("higgs", network, processor)


def pocket(folder: Path) -> None:
    """Pocket TTS with a processor and a codec."""
    _save_latent_model(transformers.PocketTTSForConditionalGeneration, folder)


def gradium(folder: Path) -> None:
    """Gradium Phonon TTS with the processor and the codec of Pocket TTS."""
    _save_latent_model(transformers.GradiumPhononTTSForConditionalGeneration, folder)


def _save_latent_model(model_class: Any, folder: Path) -> None:
    """Save a model whose steps give latents, with its processor and codec."""
    tokenizer, ids = _with_tokens(_POCKET_TOKENS)
    entry = Entry("text-to-audio", model_class.config_class.model_type, model_class.__name__)
    config = copy.deepcopy(subject_of(entry).model.config)
    for name, number in ids.items():
        setattr(config, f"{name}_id", number)
    _save_random(model_class, config, folder)
    codec_config = transformers.PocketTTSAudioTokenizerConfig(
        sampling_rate=800,
        hidden_size=32,
        num_filters=4,
        upsampling_ratios=[2, 2],
        upsample_groups=32,
        num_hidden_layers=1,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=4,
        latent_stride=2,
        latent_dim=config.latent_dim,
    )
    codec = _save_random(transformers.PocketTTSAudioTokenizerModel, codec_config, folder / "codec")
    features = transformers.PocketTTSFeatureExtractor(sampling_rate=800, frame_size=8, pad_to_multiple_of=8)
    template = _TEXTS + _POCKET_TOKENS["audio_bos_token"]
    processor = transformers.PocketTTSProcessor(features, tokenizer, codec, chat_template=template)
    processor.save_pretrained(folder)


FOLDERS = {
    "musicgen": musicgen,
    "musicgen stereo": stereo_musicgen,
    "melody": melody,
    "csm": csm,
    "dia": dia,
    "pocket": pocket,
    "gradium": gradium,
}


def _save_random(model_class: Any, config: Any, folder: Path) -> Any:
    """Save a random model, which then has the folder as its name."""
    torch.manual_seed(0)
    model = model_class(config).eval()
    for name, values in model.named_buffers():
        if name.endswith(("codebook.embed", "codebook.embed_sum")):  # new ones are 0: all codes sound alike
            values.normal_()
    model.save_pretrained(folder)
    return model_class.from_pretrained(folder)


def _with_tokens(tokens: dict[str, str]) -> tuple[Any, dict[str, int]]:
    """A tokenizer with special tokens by their names, and their ids."""
    tokenizer = wordpiece.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens.values())})
    tokenizer._set_model_specific_special_tokens(tokens)
    return tokenizer, {name: tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()}
