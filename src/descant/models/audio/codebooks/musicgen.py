"""MusicGen and MusicGen Melody (Copet et al. 2023, https://arxiv.org/abs/2306.05284)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from descant.errors import NotInThisVersion
from descant.models.audio.codebooks.frames import (
    CodebookFamily,
    CrossAttentionMask,
    FrameInputs,
    PreparedLoop,
    StepInputs,
)

__all__ = ["MelodyFamily", "MusicgenFamily"]


class _DecoderFamily(CodebookFamily):
    """A decoder of codebooks a step apart, each with a table of embeddings and a head."""

    # Its positions count from the first one that is cached.
    changed_traits: ClassVar[Mapping[str, Any]] = {
        "needs_equal_lengths": True,
        "supports_logits_to_keep": False,
    }

    def __init__(self, model: Any) -> None:
        self.network = model
        self.decoder: Any = getattr(model, "decoder", model)  # with the heads
        config = self.decoder.config
        self.num_codebooks = self.num_rows = config.num_codebooks
        self.has_guidance = self.decoder is not model  # of a text, which the decoder alone does not read
        self._tables = list(self.decoder.model.decoder.embed_tokens)
        self._heads = list(self.decoder.lm_heads)
        self.num_known_codes: int = self._tables[0].num_embeddings

    def embed(self, codes: Tensor) -> Tensor:
        """The sum of the embeddings of a frame's codes [T, C] -> [T, D]."""
        return torch.stack([table(codes[:, index]) for index, table in enumerate(self._tables)]).sum(0)

    @property
    def skipped_modules(self) -> Sequence[Any]:
        """The network, its decoder, and the stack of layers."""
        return [self.network, self.decoder, self.decoder.model, self.decoder.model.decoder]

    def embed_frame(self, codes: Tensor) -> Tensor:
        """The embeddings of one frame of each row [N, 1, C] -> [N, 1, D]."""
        first, *others = codes.unbind(-1)
        embedded: Tensor = self._tables[0](first)
        for table, code in zip(self._tables[1:], others, strict=True):
            embedded = embedded + table(code)
        return embedded

    def position_embedding(self, position: int) -> Tensor | None:
        """The embedding of a position [D]; None: the table is shorter."""
        table = self.decoder.model.decoder.embed_positions.weights
        return table[position] if position < table.shape[0] else None

    def head_logits(self, hidden: Tensor) -> Tensor:
        """The logits of all heads [N, 1, C * V] for hidden states [N, 1, D]."""
        hidden = self.decoder.model.decoder.layer_norm(hidden)
        return torch.cat([head(hidden) for head in self._heads], -1)

    def flat(self, codes: Tensor) -> Tensor:
        """Codes [N, T, C] with a row for each codebook [N * C, T]."""
        return codes.transpose(1, 2).reshape(-1, codes.shape[1])

    def split(self, loop: PreparedLoop) -> tuple[Tensor, list[dict[str, Any]]]:
        """The first codes [B, C, L], and the fields that a sequence of either model has."""
        prepared = loop.inputs
        kwargs = prepared.model_kwargs
        for name in ("decoder_attention_mask", "encoder_attention_mask"):
            if kwargs.get(name) is not None and not bool(kwargs[name].all()):
                must = "must be None or all ones for codebooks, whose prompts are not padded"
                raise NotInThisVersion(name, must, kwargs[name], "leave it out")
        codes = self.first_codes(loop)
        pattern = kwargs.get("decoder_delay_pattern_mask", kwargs.get("delay_pattern_mask"))
        forced = pattern.view(len(codes), self.num_codebooks, -1).cpu()
        scale = kwargs.get("guidance_scale")
        pad = prepared.generation_config._pad_token_tensor
        shared: dict[str, Any] = {
            "pad_token_id": int(forced[0, 0, 0] if pad is None else pad),
            "guidance_scale": float(scale) if scale is not None and scale > 1 else 1.0,
        }
        return codes, [{"forced": one, **shared} for one in forced]


class MusicgenFamily(_DecoderFamily):
    """MusicGen: a decoder that attends to an encoded text, or the decoder alone."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._text_mask = CrossAttentionMask()

    def token_inputs(self, codes: Tensor) -> dict[str, Any]:
        """The codes as ids with a row for each codebook."""
        name = "decoder_input_ids" if self.network is not self.decoder else "input_ids"
        return {name: self.flat(codes)}

    def step(self, inputs: StepInputs) -> Tensor:
        """The logits [N, 1, C * V] after one more frame."""
        codes, past, position, states, mask = inputs
        decoder = self.decoder.model.decoder
        embedded = self.position_embedding(position)
        if embedded is None:  # the module makes a longer table
            embedded = decoder.embed_positions(codes.transpose(1, 2), position)
        hidden = self.embed_frame(codes) + embedded
        made = None
        if states is not None and mask is not None:
            made = self._text_mask.of(decoder.config, hidden, states, mask)
        for layer in decoder.layers:
            # Of the states only their presence counts: the keys and values of the text are cached.
            hidden = layer(
                hidden, None, states, encoder_attention_mask=made, past_key_values=past, use_cache=True
            )
        return self.head_logits(hidden)

    def frame_inputs(self, loop: PreparedLoop) -> tuple[Tensor, list[FrameInputs]]:
        """The first codes of each sequence [B, C, L] and its encoded text."""
        codes, parts = self.split(loop)
        kwargs = loop.inputs.model_kwargs
        if kwargs.get("encoder_hidden_states") is not None:
            must = "must be None for the decoder alone"
            do = "use MusicgenForConditionalGeneration"
            raise NotInThisVersion("encoder_hidden_states", must, type(self.network).__name__, do)
        if self.network is self.decoder:
            return codes, [FrameInputs({}, **part) for part in parts]
        texts = zip(parts, self.encoded_texts(loop, len(parts)), strict=True)
        return codes, [
            FrameInputs(text, **part, uncond_inputs=uncond[0] if uncond else None)
            for part, (text, *uncond) in texts
        ]


class MelodyFamily(_DecoderFamily):
    """MusicGen Melody: a decoder that reads an encoded text and melody before the first frame."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.network = self.decoder

    def token_inputs(self, codes: Tensor) -> dict[str, Any]:
        """The codes as ids with a row for each codebook."""
        return {"input_ids": self.flat(codes)}

    def step(self, inputs: StepInputs) -> Tensor:
        """The logits [N, 1, C * V] after one more frame."""
        decoder = self.decoder.model.decoder
        hidden = self.embed_frame(inputs.codes)
        embedded = self.position_embedding(inputs.position)
        if embedded is None:  # the module makes a longer table
            embedded = decoder.embed_positions(hidden, inputs.position)
        hidden = hidden + embedded
        for layer in decoder.layers:
            hidden = layer(hidden, attention_mask=None, past_key_values=inputs.past, use_cache=True)[0]
        return self.head_logits(hidden)

    def frame_inputs(self, loop: PreparedLoop) -> tuple[Tensor, list[FrameInputs]]:
        """The first codes of each sequence [B, C, L] and what it reads before them."""
        codes, parts = self.split(loop)
        states = loop.inputs.model_kwargs.get("encoder_hidden_states")
        frames = []
        for row, part in enumerate(parts):
            prefixes = () if states is None else states[row :: len(parts)]
            prefix, uncond = (*prefixes, None, None)[:2]
            uncond_inputs: dict[str, Any] | None = None if uncond is None else {}
            frames.append(
                FrameInputs({}, **part, prefix=prefix, uncond_inputs=uncond_inputs, uncond_prefix=uncond)
            )
        return codes, frames
