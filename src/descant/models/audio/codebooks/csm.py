"""CSM (Sesame 2025): conversational speech, whose codebooks are predicted one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from descant.core.records import Proposal
from descant.core.rows import Rows, index_rows
from descant.errors import NotInThisVersion
from descant.models.audio.codebooks.frames import (
    SAMPLING_PROCESSORS,
    CodebookFamily,
    FrameInputs,
    LoopChanges,
    PreparedLoop,
    row_seed,
)
from descant.models.forward.batches import ForwardBatch
from descant.models.forward.traits import traits_of
from descant.models.transformers_model import TransformersModel

__all__ = ["CsmFamily", "DepthModel"]


class CsmFamily(CodebookFamily):
    """A backbone that predicts the first code of a frame, and a depth decoder for the others."""

    num_rows = 1
    reads_hidden = True
    has_guidance = False
    processors = SAMPLING_PROCESSORS

    def __init__(self, model: Any) -> None:
        self.network = model
        self.num_codebooks: int = model.config.num_codebooks
        self.num_known_codes: int = model.config.vocab_size

    def token_inputs(self, codes: Tensor) -> dict[str, Any]:
        """The frames [N, T, C], as the backbone takes them."""
        return {"input_ids": codes}

    def embed(self, codes: Tensor) -> Tensor:
        """The embeddings of frames [T, C] -> [T, D]."""
        embedded: Tensor = self.network.backbone_model.embed_tokens(codes[None])[0]
        return embedded

    def prompt_inputs(self, prompts: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
        """The embeddings of text and sound."""
        return {"inputs_embeds": pad_sequence([one["inputs_embeds"] for one in prompts], batch_first=True)}

    def frame_inputs(self, loop: PreparedLoop) -> tuple[Tensor, list[FrameInputs]]:
        """A first code [B, 1, 1], and the prompts."""
        ids, kwargs = loop.inputs.input_ids, loop.inputs.model_kwargs
        if ids.ndim != 2 or kwargs.get("inputs_embeds") is not None:
            must = "must be None for this model, whose prompts are text and sound"
            raise NotInThisVersion("inputs_embeds", must, "embeddings", "pass input_ids and input_values")
        embeds = self.network._merge_input_ids_with_input_values(
            ids, kwargs.get("input_values"), kwargs.get("input_values_cutoffs")
        )["inputs_embeds"]
        mask, pad = kwargs.get("attention_mask"), self.network.config.codebook_pad_token_id
        frames = []
        for row, embedded in enumerate(embeds):
            prompt = {"inputs_embeds": embedded if mask is None else embedded[mask[row].bool()]}
            length = len(prompt["inputs_embeds"])
            frames.append(FrameInputs({}, pad, prompt=prompt, prompt_length=length))
        return ids.new_zeros(len(ids), 1, 1), frames

    def loop_changes(self, loop: PreparedLoop, frames: Sequence[FrameInputs]) -> LoopChanges:
        """The depth decoder runs where a step checks its end: after the first code is chosen."""
        end = self.network.config.codebook_eos_token_id
        depth = _DepthDecoder(loop.model.depth_decoder, frames, end)
        fields = {"eos_token_id": None, "pad_token_id": self.network.config.codebook_pad_token_id}
        return LoopChanges((), (depth,), fields)

    def loop_result(self, loop: PreparedLoop, frames: Sequence[FrameInputs], output: Any) -> Any:  # noqa: ARG002
        """The frames [B, T, C], or an output that has them."""
        sequences = output if isinstance(output, Tensor) else output.sequences
        first = sequences[:, 1:]
        codes = first.new_full((*first.shape, self.num_codebooks), self.network.config.codebook_pad_token_id)
        for row, one in enumerate(frames):
            more = torch.stack(one.state.more_codes[: first.shape[1]])
            codes[row, : len(more), 0] = first[row, : len(more)]
            codes[row, : len(more), 1:] = more.to(codes.device)
        if isinstance(output, Tensor):
            return codes
        output.sequences = codes
        return output


class DepthModel(TransformersModel):
    """The depth decoder of one step: request `i` continues the frame of hidden state `i`."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, traits=replace(traits_of(model), prepares_own_inputs=False))
        self._packed.off_reason = "the first position holds a hidden state"
        self.hidden: Tensor | None = None  # [B, D]

    def _token_inputs(self, rows: Rows, proposal: Proposal, batch: ForwardBatch) -> dict[str, Any]:
        """The fed codes, and the hidden states in place of the first one."""
        inputs = {**super()._token_inputs(rows, proposal, batch), "logits_to_keep": 1}
        if batch.start == 0:
            assert self.hidden is not None
            request = rows.request if batch.rows is None else rows.request[batch.rows]
            inputs["backbone_last_hidden_state"] = index_rows(self.hidden, request)
        return inputs


class _DepthDecoder:
    """Decodes the other codes of each frame once its first is chosen; ends rows whose frame is the end.

    It is called as a stopping criterion with all rows of a call, ended ones included.
    """

    def __init__(self, model: Any, frames: Sequence[FrameInputs], end: int) -> None:
        self._model, self._config = DepthModel(model), model.generation_config
        self._frames, self._end = frames, end
        self._last_frame: list[int | None] = [None] * len(frames)  # of sequences that have ended

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:  # noqa: ARG002
        states = [one.state for one in self._frames]
        hidden = torch.stack([one.hidden for one in states if one.hidden is not None])
        first = input_ids[:, -1:].to(hidden.device)
        # A place before the first code stands for the hidden state.
        prompts = torch.nn.functional.pad(first, (1, 0))
        frame = input_ids.shape[1] - 2  # the first code of all stands for the prompt
        decode, seeds = states[0].decode, None
        assert decode is not None
        if states[0].seed is not None:  # the same sequence has the same codes, alone and in a batch
            seeds = [row_seed(one.seed or 0, 1 + frame) for one in states]
        self._model.hidden = hidden
        codes = decode(self._model, self._config, prompts, seeds)[:, 1:]  # [B, C]
        is_end = (codes[:, :-1] == self._end).all(1)
        for row, one in enumerate(states):
            last = self._last_frame[row]
            if last is None or last >= frame:  # a step that was interrupted is made again
                one.more_codes[frame:] = [codes[row, 1:]]
                self._last_frame[row] = frame if bool(is_end[row]) else None
        return is_end.to(input_ids.device)
