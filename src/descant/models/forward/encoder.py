"""The encoder of an encoder-decoder model, run once per request."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from descant.core.interfaces import KVSpan, ModelTraits
from descant.errors import InputError
from descant.models.forward.inputs import is_per_token
from descant.models.forward.traits import has_override
from descant.models.forward.view import (
    CrossAttentionCache,
    CrossAttentionView,
    EncoderDecoderView,
    SelfAttentionView,
)
from descant.models.wrapping.peft_adapters import PeftAdapters

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Encoder"]

# Inputs without a batch dimension, which are padded to a common length.
_PADDABLE_INPUTS = ("input_ids", "inputs_embeds", "attention_mask", "encoder_outputs")

# Model types that modify the encoder output in place.
_MUTATING_MODEL_TYPES = frozenset({"moonshine_streaming"})


class Encoder:
    """Runs the encoder on new requests in batches and provides the decoder's inputs."""

    def __init__(
        self,
        model: PreTrainedModel,
        traits: ModelTraits,
        states: Sequence[str],
        device: torch.device,
        adapters: PeftAdapters,
    ) -> None:
        self.model: Any = model
        self.traits, self.device, self._adapters = traits, device, adapters
        self.last_output: Any = {}  # with the requested states
        self.keeps_finished = False  # whether outputs outlive their requests, for `cross_attention`
        self._output_flags = {f"output_{name}": True for name in states}
        self._cross_cache = CrossAttentionCache()
        self._output_class: Any = BaseModelOutput  # class of `encoder_outputs` for the decoder
        self._forward_params = inspect.signature(model.forward).parameters
        self._has_own_encode = has_override(model, "_maybe_prepare_encoder_kwargs_for_generation")

    def add_requests(self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]]) -> None:
        """Run the encoder on new requests, or store the outputs that the user passed."""
        batches = [
            (part, self._collate_part(inputs, part)) for part in _group_compatible(inputs, len(requests))
        ]
        if not all(fed for _, (fed, _) in batches):  # before any encoder runs
            raise InputError(self.traits.main_input_name, "must hold the encoder's input", None)
        for part, (fed, lengths) in batches:
            numbers = [requests[index] for index in part]
            with self._adapters.applied(numbers):
                states, mask, others = self._encode_batch(fed, lengths)
            self._cross_cache.add_requests(numbers, states, mask, others)

    def _collate_part(
        self, inputs: Mapping[str, Sequence[Any]], part: Sequence[int]
    ) -> tuple[dict[str, Any], list[int]]:
        """The inputs of the requests `part` as batches by name, and their lengths where they are padded."""
        fed: dict[str, Any] = {}
        lengths: list[int] = []
        for name, all_values in inputs.items():
            values = [all_values[index] for index in part]
            if values[0] is None:
                continue
            if _is_paddable(name, values[0].shape):
                lengths = lengths or [len(value) for value in values]
                fed[name] = torch.nn.utils.rnn.pad_sequence(values, batch_first=True).to(self.device)
            else:
                fed[name] = torch.cat(values).to(self.device)
        return fed, lengths

    def remove_requests(self, requests: Sequence[int]) -> None:
        """Drop the outputs of finished requests."""
        if not self.keeps_finished:
            self._cross_cache.remove_requests(requests)

    def cross_attention(self, requests: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each layer's keys and values [R, H, S, D], as rows of the requests [R] (host) read them."""
        cross, entries = self._cross_cache, self._cross_cache.entry_index(requests)
        return [
            (cross.keys(layer, entries), cross.values(layer, entries)) for layer in range(cross.num_layers)
        ]

    def _encode_batch(
        self, fed: dict[str, Any], lengths: Sequence[int]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The encoder states [B, S, D], the mask of its input [B, T], and its further outputs."""
        mask = fed.get("attention_mask")
        states = fed.pop("encoder_outputs", None)
        if mask is None:
            main = (
                states
                if states is not None
                else fed.get(self.traits.main_input_name, next(iter(fed.values())))
            )
            # Inputs other than tokens count as unpadded; their length is the second dimension.
            mask = main.new_ones(main.shape[:2], dtype=torch.long)
            if lengths:
                fits = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
                mask = fits.long().to(self.device)
            if lengths or "attention_mask" in self._forward_params:
                fed["attention_mask"] = mask
        if states is not None:
            return states, mask, {}
        self.last_output = self._call_encoder(fed)
        self._output_class = type(self.last_output)
        others = {
            name: value
            for name, value in self.last_output.items()
            if isinstance(value, Tensor) and name != "last_hidden_state" and len(value) == len(mask)
        }
        return self.last_output[0].to(self.device), mask, others

    def _call_encoder(self, fed: dict[str, Any]) -> Any:
        """The encoder's output, by the model's own method to prepare it if it has one."""
        if self._has_own_encode:
            main = fed.pop(self.traits.main_input_name)
            settings = self.model.generation_config
            return self.model._maybe_prepare_encoder_kwargs_for_generation(
                main, fed, self.traits.main_input_name, settings
            )["encoder_outputs"]
        encoder = self.model.get_encoder()
        params = inspect.signature(encoder.forward).parameters
        takes_any = any(param.kind is inspect.Parameter.VAR_KEYWORD for param in params.values())
        fed = {name: value for name, value in fed.items() if takes_any or name in params}
        return encoder(**fed, **self._output_flags, return_dict=True)

    def entry_index(self, requests: Tensor) -> Tensor | None:
        """The cross-attention entry of each row; None if row `i` reads entry `i`."""
        return self._cross_cache.entry_index(requests)

    def decoder_inputs(self, entries: Tensor | None) -> dict[str, Any]:
        """The encoder outputs and mask that the decoder takes, for rows that read these entries."""
        states = self._cross_cache.encoder_states(entries)
        if self.model.config.model_type in _MUTATING_MODEL_TYPES:
            states = states.clone()
        outputs = {"last_hidden_state": states, **self._cross_cache.other_outputs(entries)}
        inputs: dict[str, Any] = {"encoder_outputs": self._output_class(**outputs)}
        if "attention_mask" in self._forward_params:
            inputs["attention_mask"] = self._cross_cache.mask(entries)
        return inputs

    def states_and_mask(self, entries: Tensor | None) -> tuple[Tensor, Tensor]:
        """The encoder states [N, S, D] and the mask [N, S] of rows that read these entries."""
        return self._cross_cache.encoder_states(entries), self._cross_cache.mask(entries)

    def decoder_cache(
        self, entries: Tensor | None, own: SelfAttentionView, span: KVSpan
    ) -> EncoderDecoderView:
        """The decoder's cache: self-attention and cross-attention."""
        is_first = isinstance(span.start, int) and span.start == 0  # no keys and values of the encoder yet
        num_layers = 0 if is_first else self._cross_cache.num_layers
        cross = CrossAttentionView(self._cross_cache, entries, span, num_layers)
        return EncoderDecoderView(own, cross, num_layers)


def _is_paddable(name: str, shape: Sequence[int]) -> bool:
    """Whether an input has one entry per token and can be padded."""
    return name in _PADDABLE_INPUTS or is_per_token(name, len(shape))


def _group_compatible(inputs: Mapping[str, Sequence[Any]], count: int) -> list[list[int]]:
    """Groups of requests to encode together: they have the same inputs, and only tokens need padding."""
    groups: dict[object, list[int]] = {}
    for index in range(count):
        given = ((name, values[index]) for name, values in inputs.items() if values[index] is not None)
        shapes = tuple((name, tuple(value.shape)) for name, value in given)
        # With media, tokens are not padded either: the encoder may concatenate them with the media.
        only_paddable = all(_is_paddable(name, shape) for name, shape in shapes)
        key = tuple(name for name, _ in shapes) if only_paddable else shapes
        groups.setdefault(key, []).append(index)
    return list(groups.values())
