"""Higgs Audio V2 (Boson AI 2025): speech from a chat prompt, with codebooks a step apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from descant.errors import NotInThisVersion
from descant.models.audio.codebooks.frames import (
    CodebookFamily,
    FrameInputs,
    LoopChanges,
    PreparedLoop,
    StepInputs,
)

__all__ = ["HiggsAudioFamily"]

_DELAY_PROCESSOR: Final = "HiggsAudioV2DelayPatternLogitsProcessor"
_NO_WARPERS: Final = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}


class HiggsAudioFamily(CodebookFamily):
    """A decoder that reads text and sound, and predicts all codebooks of sound in parallel."""

    has_guidance = False
    processors = frozenset({"remove_invalid_values", "temperature", "top_k", "top_p"})

    def __init__(self, model: Any) -> None:
        self.network = model
        config = model.config
        self.num_codebooks = self.num_rows = config.num_codebooks
        self.num_known_codes: int = config.codebook_size
        self._begin: int = config.audio_stream_bos_id
        self._end: int = config.audio_stream_eos_id

    def token_inputs(self, codes: Tensor) -> dict[str, Any]:
        """The codes [N, T, C], as the network takes them."""
        return {"audio_input_ids": codes}

    def embed(self, codes: Tensor) -> Tensor:
        """The embeddings of frames [T, C] -> [T, D]."""
        embedded: Tensor = self.network.model.embed_audio_tokens(codes)
        return embedded

    @property
    def skipped_modules(self) -> Sequence[Any]:
        """The network and the stack of layers."""
        return [self.network, self.network.model]

    def step(self, inputs: StepInputs) -> Tensor:
        """The logits [N, 1, C * V] after one more frame."""
        decoder = self.network.model
        hidden = decoder.embed_audio_tokens(inputs.codes)
        positions = torch.tensor([[inputs.position]], device=hidden.device)
        rotary = decoder.rotary_emb(hidden, positions)
        for layer in decoder.layers:
            hidden = layer(
                hidden,
                attention_mask=None,
                audio_token_mask=None,  # a frame of sound
                position_ids=positions,
                past_key_values=inputs.past,
                position_embeddings=rotary,
            )
        logits: Tensor = self.network.audio_lm_head(decoder.norm(hidden))
        return logits

    def prompt_inputs(self, prompts: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
        """The tokens of the prompts, and the codes of the sound in them."""
        inputs: dict[str, Any] = {
            "input_ids": pad_sequence([one["input_ids"] for one in prompts], batch_first=True)
        }
        sounds = [one["audio_input_ids"] for one in prompts]
        if any(len(sound) for sound in sounds):
            lengths = torch.tensor([len(sound) for sound in sounds], device=sounds[0].device)
            inputs["audio_input_ids"] = pad_sequence(sounds, batch_first=True)
            width = inputs["audio_input_ids"].shape[1]
            inputs["audio_input_ids_mask"] = torch.arange(width, device=lengths.device) < lengths[:, None]
        return inputs

    def frame_inputs(self, loop: PreparedLoop) -> tuple[Tensor, list[FrameInputs]]:
        """A first code of each codebook [B, C, 1], and the prompts."""
        ids, kwargs = loop.inputs.input_ids, loop.inputs.model_kwargs
        mask, sound = kwargs.get("attention_mask"), kwargs.get("audio_input_ids")
        sound_mask = kwargs.get("audio_input_ids_mask")
        frames = []
        for row, tokens in enumerate(ids):
            prompt = {
                "input_ids": tokens if mask is None else tokens[mask[row].bool()],
                "audio_input_ids": ids.new_zeros(0, self.num_codebooks),
            }
            if sound is not None:
                is_known = slice(None) if sound_mask is None else sound_mask[row].bool()
                prompt["audio_input_ids"] = sound[row][is_known]
            length = len(prompt["input_ids"])
            frames.append(FrameInputs({}, self._end, prompt=prompt, prompt_length=length))
        return ids.new_full((len(ids), self.num_codebooks, 1), self._begin), frames

    def loop_changes(self, loop: PreparedLoop, frames: Sequence[FrameInputs]) -> LoopChanges:
        """The delay pattern, the end of all codebooks at once, and sampling that avoids repetition."""
        config, own = loop.inputs.generation_config, loop.inputs.logits_processor
        [delay] = [one for one in own if type(one).__name__ == _DELAY_PROCESSOR]
        processor = _FrameProcessor(delay, self.network.config, loop.inputs.input_ids, frames)
        fields: dict[str, Any] = {"eos_token_id": None, "pad_token_id": self._end}
        window = getattr(config, "ras_win_len", None)
        repeats = getattr(config, "ras_win_max_num_repeat", None)
        if window is not None and repeats is not None:
            if not config.do_sample:
                must = "must be None without `do_sample`: it replaces repeated codes by sampled ones"
                raise NotInThisVersion("ras_win_len", must, window, "set do_sample=True")
            processor.window, processor.max_repeats = window, repeats
            processor.warpers = [one for one in own if one is not delay]
            fields |= _NO_WARPERS
        ends_early = self.network.config.eos_token_id is not None and config.eos_token_id is not None
        criteria = (_AllEnded(self._end, self.num_codebooks),) if ends_early else ()
        return LoopChanges((processor,), criteria, fields)

    def loop_result(self, loop: PreparedLoop, frames: Sequence[FrameInputs], output: Any) -> Any:  # noqa: ARG002
        """The codes [B, T, C] behind those of the prompt, or an output that has them."""
        sequences = output if isinstance(output, Tensor) else output.sequences
        codes = sequences.view(-1, self.num_codebooks, sequences.shape[1])[:, :, 1:].transpose(1, 2)
        given = loop.inputs.model_kwargs.get("audio_input_ids")
        sound = codes if given is None else torch.cat((given, codes), 1)
        if isinstance(output, Tensor):
            return sound
        for name in ("scores", "logits"):
            if output.get(name) is not None:
                shape = (len(codes), self.num_codebooks, -1)
                steps = [step.view(shape) for step in output[name]]
                output[name] = tuple(steps if name == "scores" else [step.flatten(1) for step in steps])
        ids = loop.inputs.input_ids
        tokens = _placeholder_tokens(ids, codes, self.network.config)
        return _with_sound(output, torch.cat((ids, tokens), 1), sound)


def _with_sound(output: Any, sequences: Any, sound: Any) -> Any:
    from transformers.models.higgs_audio_v2.generation_higgs_audio_v2 import HiggsAudioV2GenerationOutput

    values = {name: output.get(name) for name in ("scores", "logits")}
    return HiggsAudioV2GenerationOutput(sequences=sequences, **values, audio_sequences=sound)


def _placeholder_tokens(ids: Tensor, codes: Tensor, config: Any) -> Tensor:
    """The token of each frame [B, T]: sound, sound whose codebooks end one by one, or the end."""
    is_end = codes == config.audio_stream_eos_id
    ends = is_end.any(-1) | (ids[:, -1:] == config.audio_delay_token_id)
    tokens = torch.where(ends.cummax(1).values, config.audio_delay_token_id, config.audio_token_id)
    if config.eos_token_id is not None:
        tokens = torch.where(is_end.all(-1), config.eos_token_id, tokens)
    return tokens


class _FrameProcessor:
    """transformers' delay pattern, then optionally sampling that avoids repetition, for all rows of a call.

    Repetition-aware sampling (Chen et al. 2024, https://arxiv.org/abs/2406.05370) draws a code, and draws
    again from the model's own distribution if that code is repeated. The result is the distribution of the
    code that remains, so that one draw is enough.
    """

    def __init__(self, delay: Any, config: Any, ids: Tensor, frames: Sequence[FrameInputs]) -> None:
        self._delay, self._config, self._ids = delay, config, ids
        self._sounds = [one.prompt["audio_input_ids"] for one in frames if one.prompt is not None]
        self.window = self.max_repeats = 0  # 0: repetition is not avoided
        self.warpers: list[Any] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        count, size = self._config.num_codebooks, scores.shape[-1]
        codes = input_ids.view(-1, count, input_ids.shape[1])[:, :, 1:].transpose(1, 2)  # [B, T, C]
        tokens = torch.cat((self._ids, _placeholder_tokens(self._ids, codes, self._config)), 1)
        delayed: Tensor = self._delay(tokens, scores.view(len(codes), count * size))
        if not self.window:
            return delayed
        for warper in self.warpers:
            delayed = warper(tokens, delayed)
        probs = delayed.softmax(-1)
        repeated = probs * self._is_repeated(codes, size).view_as(probs)
        return (probs - repeated + repeated.sum(-1, keepdim=True) * scores.softmax(-1)).log()

    def _is_repeated(self, codes: Tensor, size: int) -> Tensor:
        """Which codes [B, C, V] are too frequent among the last ones."""
        counts = []
        for sound, new in zip(self._sounds, codes, strict=True):
            recent = torch.cat((sound.to(new.device), new))[-self.window :]  # [W, C]
            found = torch.zeros(new.shape[1], size, device=new.device)
            found.scatter_add_(1, recent.T, torch.ones_like(recent.T, dtype=found.dtype))
            counts.append(found)
        count = torch.stack(counts)
        count[:, :, [self._config.audio_stream_bos_id, self._config.audio_stream_eos_id]] = 0
        return count >= self.max_repeats


class _AllEnded:
    """Ends the rows of a sequence once all of its codebooks are at the end code."""

    def __init__(self, end: int, num_codebooks: int) -> None:
        self._end, self._num_codebooks = end, num_codebooks

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:  # noqa: ARG002
        is_end = (input_ids[:, -1] == self._end).view(-1, self._num_codebooks).all(1)
        return is_end.repeat_interleave(self._num_codebooks)
