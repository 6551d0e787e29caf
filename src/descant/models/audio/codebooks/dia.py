"""Dia (Nari Labs 2025): speech from text, with channels that start at delays of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from descant.models.audio.codebooks.frames import (
    CodebookFamily,
    CrossAttentionMask,
    FrameInputs,
    LoopChanges,
    PreparedLoop,
    StepInputs,
)

__all__ = ["DiaFamily"]

# They allow the end token in the first channel only, and force it in the others after their delays.
_END_PROCESSORS: Final = ("DiaEOSChannelFilterLogitsProcessor", "DiaEOSDelayPatternLogitsProcessor")


class DiaFamily(CodebookFamily):
    """A decoder that attends to an encoded text and predicts all channels in parallel."""

    processes_forced = True
    changed_traits: ClassVar[Mapping[str, Any]] = {"needs_equal_lengths": True}

    def __init__(self, model: Any) -> None:
        self.network = model
        config = model.config.decoder_config
        self.num_codebooks = self.num_rows = config.num_channels
        self.num_known_codes: int = config.vocab_size
        self._pad: int = config.pad_token_id
        self._text_mask = CrossAttentionMask()

    def token_inputs(self, codes: Tensor) -> dict[str, Any]:
        """The codes [N, T, C], as the network takes them."""
        return {"decoder_input_ids": codes}

    def embed(self, codes: Tensor) -> Tensor:
        """The embeddings of frames [T, C] -> [T, D]."""
        embedded: Tensor = self.network.model.decoder.embeddings(codes[None])[0]
        return embedded

    @property
    def skipped_modules(self) -> Sequence[Any]:
        """The network, its model, and the stack of layers."""
        return [self.network, self.network.model, self.network.model.decoder]

    def step(self, inputs: StepInputs) -> Tensor:
        """The logits [N, 1, C * V] after one more frame."""
        decoder, states = self.network.model.decoder, inputs.encoder_states
        hidden = decoder.embeddings(inputs.codes)
        positions = torch.tensor([[inputs.position]], device=hidden.device)
        rotary = decoder.rotary_emb(hidden, position_ids=positions)
        assert states is not None
        assert inputs.encoder_mask is not None
        mask = self._text_mask.of(decoder.config, hidden, states, inputs.encoder_mask)
        for layer in decoder.layers:
            hidden = layer(
                hidden,
                rotary,
                None,
                states,
                encoder_attention_mask=mask,
                past_key_values=inputs.past,
                position_ids=positions,
            )
        logits: Tensor = self.network.logits_dense(decoder.norm(hidden))
        return logits

    def guide(self, cond: Tensor, uncond: Tensor, scales: Tensor, frames: Sequence[FrameInputs]) -> Tensor:
        """The conditional logits [N, C, V] of the `top_k` codes that guided logits prefer."""
        guided = cond + (cond - uncond) * scales[:, None, None]
        for row, one in enumerate(frames):
            top_k = one.options.get("top_k")
            if top_k is not None:
                best = guided[row].topk(top_k, dim=-1).indices
                is_dropped = torch.ones_like(guided[row], dtype=torch.bool).scatter(-1, best, False)
                guided[row] = cond[row].masked_fill(is_dropped, -torch.inf)
        return guided

    def frame_inputs(self, loop: PreparedLoop) -> tuple[Tensor, list[FrameInputs]]:
        """The first codes of each sequence [B, C, L] and its encoded text."""
        kwargs, config = loop.inputs.model_kwargs, loop.inputs.generation_config
        codes = self.first_codes(loop)
        delayed = kwargs["decoder_delay_mask"].transpose(1, 2)
        forced = torch.where(delayed == self._pad, -1, delayed).cpu()
        frames = []
        for own, (text, *uncond) in zip(forced, self.encoded_texts(loop, len(codes)), strict=True):
            frames.append(
                FrameInputs(
                    text,
                    int(config._pad_token_tensor),
                    own,
                    guidance_scale=float(config.guidance_scale or 1.0),
                    uncond_inputs=uncond[0] if uncond else None,
                    options={"top_k": config.top_k},
                )
            )
        return codes, frames

    def loop_changes(self, loop: PreparedLoop, frames: Sequence[FrameInputs]) -> LoopChanges:  # noqa: ARG002
        """The processors of the end token, and the temperature, which is at least 1."""
        own = [one for one in loop.inputs.logits_processor if type(one).__name__ in _END_PROCESSORS]
        config = loop.inputs.generation_config
        temperature = config.temperature
        fields = {} if temperature is None else {"temperature": float(temperature)}
        return LoopChanges(tuple(own), fields=fields if config.do_sample else {})
