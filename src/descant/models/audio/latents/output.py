"""The output of a call that generates latents, as the model's own generate() returns it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.models.pocket_tts.generation_pocket_tts import PocketTTSGenerateOutput

from descant.models.audio.latents.sequence import LatentSequence
from descant.models.compat.custom_generate import LoopInputs

__all__ = ["audio_latents", "latent_output"]


def audio_latents(model: Any, sequence: LatentSequence) -> Tensor:
    """The latents of a sequence [T, D] in the space of the audio tokenizer."""
    if not sequence.latents:
        return model.model.bos_latent.new_zeros(0, model.config.latent_dim)  # type: ignore[no-any-return]
    return model.denormalize_latents(torch.stack(sequence.latents))  # type: ignore[no-any-return]


def latent_output(model: Any, prepared: LoopInputs, sequences: Sequence[LatentSequence]) -> Any:
    """A list of the latents of each row [T, D], or the output object if the config asks for it."""
    config, ids = prepared.generation_config, prepared.input_ids
    latents = [audio_latents(model, one) for one in sequences]
    if not config.return_dict_in_generate:
        return latents
    counts = torch.tensor([len(one) for one in latents])
    mask = (torch.arange(int(counts.max())) < counts[:, None]).long().to(ids.device)
    frames = ids.new_full((len(ids), mask.shape[1]), model.config.audio_latent_token_id)
    logits = _step_logits(sequences, mask.shape[1], ids.device)
    return PocketTTSGenerateOutput(
        sequences=torch.cat((ids, frames), 1),  # type: ignore[arg-type]
        scores=logits if config.output_scores else None,  # type: ignore[arg-type]
        logits=logits if config.output_logits else None,  # type: ignore[arg-type]
        audio_latents=torch.nn.utils.rnn.pad_sequence(latents, batch_first=True),
        audio_latents_mask=mask,  # type: ignore[arg-type]
    )


def _step_logits(
    sequences: Sequence[LatentSequence], num_frames: int, device: torch.device
) -> tuple[Tensor, ...]:
    """The end-of-speech logits of each frame [B]; 0 for rows that have ended."""
    steps = torch.zeros(num_frames, len(sequences))
    for row, one in enumerate(sequences):
        steps[: len(one.eos_logits), row] = torch.tensor(one.eos_logits)
    return tuple(steps.to(device))
