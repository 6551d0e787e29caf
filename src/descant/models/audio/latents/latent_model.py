"""`LatentModel`: a model that predicts a continuous latent in a step, behind the Model interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from descant.core.interfaces import RowCache
from descant.core.records import ForwardOutput, Proposal
from descant.core.rows import Rows
from descant.errors import InputError, UnsupportedModel
from descant.models.audio.latents.sequence import LATENT_INPUT, LatentSequence, draw_noise
from descant.models.forward.batches import ForwardBatch
from descant.models.forward.inputs import fed_tokens
from descant.models.forward.traits import has_dynamic_rope, traits_of
from descant.models.transformers_model import TransformersModel
from descant.models.wrapping.peft_adapters import ADAPTER_NAME_KEY
from descant.models.wrapping.wrapped_model import decoding_base

if TYPE_CHECKING:
    from transformers import PreTrainedModel


__all__ = ["END_TOKEN", "LatentModel", "is_latent_model"]

# The token of a last frame; that of all others is 0.
END_TOKEN: Final = 1

# The decoding loop and its end.
_LOOP_METHODS = ("_sample", "_get_stopping_criteria")


def is_latent_model(model: Any) -> bool:
    """Whether a model decodes latents by the loop of Pocket TTS, which no class of its own replaces."""
    return decoding_base(type(model), ("PocketTTSGenerationMixin",), _LOOP_METHODS) is not None


class LatentModel(TransformersModel):
    """A model whose steps give one latent [D] for a row, with a logit for the end of speech.

    A token of a row says whether its frame is the last. The latents are in the `LatentSequence` of each
    request, by position: a forward feeds the latent of the previous frame, and stores that of the next.
    """

    def __init__(self, model: PreTrainedModel, states: Sequence[str] = ()) -> None:
        traits = replace(
            traits_of(model),
            vocab_size=2,
            prepares_own_inputs=False,
            needs_equal_lengths=has_dynamic_rope(model.config),
            input_names=frozenset({LATENT_INPUT}),
            positioned_inputs=frozenset({LATENT_INPUT}),
        )
        super().__init__(model, states, traits)
        self._packed.off_reason = "the model predicts latents, not tokens"
        self._config: Any = model.config
        self._sequences: dict[int, LatentSequence] = {}

    def add_requests(self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]]) -> None:
        """Register requests, each with its `LatentSequence`."""
        sequences = inputs.get(LATENT_INPUT, [None] * len(requests))
        for one in sequences:
            if not isinstance(one, LatentSequence):
                do = "make the requests by descant.sound_request"
                raise InputError(LATENT_INPUT, "must be the latent sequence of the request", one, do)
            if any(one is other for other in self._sequences.values()):
                must = "must not be that of another running request"
                raise InputError(LATENT_INPUT, must, one, "make a request for each sequence")
        others = [name for name in inputs if name not in (LATENT_INPUT, ADAPTER_NAME_KEY)]
        if others:
            do = "pass the inputs to `latent_requests`"
            raise InputError(others[0], f"must not be given beside `{LATENT_INPUT}`", inputs[others[0]], do)
        super().add_requests(
            requests, {name: values for name, values in inputs.items() if name != LATENT_INPUT}
        )
        self._sequences.update(zip(requests, sequences, strict=True))

    def remove_requests(self, requests: Sequence[int]) -> None:
        """Drop finished requests."""
        super().remove_requests(requests)
        for request in requests:
            self._sequences.pop(request, None)

    def forward(
        self, rows: Rows, proposal: Proposal, cache: RowCache, with_logits: bool = True, chunks: Any = ()
    ) -> ForwardOutput:
        """Feed each row's pending positions; store its next latent, and return whether it is the last."""
        if proposal.drafts is not None or bool(rows.slot.any()):
            name = type(self.model).__name__
            raise UnsupportedModel(f"{name} predicts latents: beams, several rows and drafts are for tokens")
        return super().forward(rows, proposal, cache, with_logits, chunks)

    def _token_inputs(self, rows: Rows, proposal: Proposal, batch: ForwardBatch) -> dict[str, Any]:
        """The fed ids [N, T], and the latents of voice and audio positions in their order."""
        request = rows.request if batch.rows is None else rows.request[batch.rows]
        sequences = [self._sequences[number] for number in request.tolist()]
        starts, stops = batch.cached_length, _fed_stops(batch)
        prompt_length = torch.tensor([len(one.prompt) for one in sequences])
        positions = starts[:, None] + torch.arange(batch.width)
        is_fed = positions < stops[:, None]
        is_latent = is_fed & (positions >= prompt_length[:, None])
        ids = fed_tokens(rows, proposal, batch)
        ids = ids.masked_fill(is_latent.to(ids.device), self._config.audio_latent_token_id)
        # A placeholder in the padding would take the latent of another position.
        ids = ids.masked_fill(~is_fed.to(ids.device), self._config.pad_token_id or 0)
        inputs: dict[str, Any] = {"input_ids": ids}
        spans = list(zip(sequences, starts.tolist(), stops.tolist(), strict=True))
        # A prompt with a voice is read at once, from its first position.
        voices = [one.voice for one, start, _ in spans if one.voice is not None and start == 0]
        if any(len(voice) for voice in voices):
            inputs["audio_prompt_latents"] = torch.cat(voices).to(self.device)
        latents = [latent for one, start, stop in spans for latent in one.fed_latents(start, stop)]
        if latents:
            inputs["audio_latents"] = torch.stack(latents)[None]
        return inputs

    def _run_compiled(self, inputs: dict[str, Any], cache: RowCache, batch: ForwardBatch) -> Tensor | None:  # noqa: ARG002
        """None: a compiled step feeds tokens only."""
        return None

    def _call_model(self, inputs: dict[str, Any], batch: ForwardBatch, request: Tensor) -> Any:
        """Call the model and store the next latents; the logits [N, T, 2] say whether a frame is the last."""
        output = super()._call_model(inputs, batch, request)
        device, stops = output.logits.device, _fed_stops(batch)
        sequences = [self._sequences[number] for number in request.tolist()]
        frames = [stop - len(one.prompt) for one, stop in zip(sequences, stops.tolist(), strict=True)]
        lines = torch.arange(batch.num_rows, device=device)
        last = (stops - batch.cached_length - 1).to(device)
        latents = self._sample_latents(sequences, frames, output.last_hidden_state[lines, last])
        eos_logits = output.logits[lines, last, 0].float().tolist()
        is_last = [
            one.write(frame, latent, logit)
            for one, frame, latent, logit in zip(sequences, frames, latents, eos_logits, strict=True)
        ]
        choice = torch.nn.functional.one_hot(torch.tensor(is_last).long(), num_classes=2).float().to(device)
        output.logits = choice[:, None].expand(-1, batch.width, -1)
        return output

    def _sample_latents(
        self, sequences: Sequence[LatentSequence], frames: Sequence[int], states: Tensor
    ) -> list[Tensor]:
        """The next latent [D] of each row, by its last hidden state [N, H]."""
        noise = draw_noise(sequences, frames, self._config.latent_dim, states)
        flow_steps = [one.num_flow_steps for one in sequences]
        latents: list[Tensor] = [noise[0]] * len(sequences)
        for count in dict.fromkeys(flow_steps):
            index = [row for row, steps in enumerate(flow_steps) if steps == count]
            sampled = self.model.sample_latent(states[index], noise[index], count)  # type: ignore[operator]
            for row, latent in zip(index, sampled, strict=True):
                latents[row] = latent
        return latents


def _fed_stops(batch: ForwardBatch) -> Tensor:
    """The position after the last fed one of each row [N] (host)."""
    return batch.cached_length + (batch.fed_length if batch.width > 1 else 1)
