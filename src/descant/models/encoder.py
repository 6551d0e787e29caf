"""The encoder's side of an encoder-decoder model: it reads once a request, whatever it reads."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from descant.core.interfaces import KVSpan, ModelTraits
from descant.errors import InputError
from descant.models.cross_attention_cache import CrossAttentionCache
from descant.models.forward_view import CrossAttentionView, EncoderDecoderView, SelfAttentionView
from descant.models.multimodal import is_per_token
from descant.models.traits import has_override

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Encoder"]

# Given a line each, without a batch dimension, so that lines of different length can be padded.
_PADDABLE_INPUTS = ("input_ids", "inputs_embeds", "attention_mask", "encoder_outputs")

# Kinds of model that add to the encoder's output where it lies.
_MUTATING_MODEL_TYPES = frozenset({"moonshine_streaming"})


class Encoder:
    """Runs the encoder on new requests together, and shows the decoder what it made of them."""

    def __init__(
        self, model: PreTrainedModel, facts: ModelTraits, states: Sequence[str], device: torch.device
    ) -> None:
        self.model: Any = model
        self.traits, self.device = facts, device
        self.last_output: Any = {}  # the encoder's last output, with the states asked for
        self._output_flags = {f"output_{name}": True for name in states}
        self._cross_cache = CrossAttentionCache()
        self._output_class: Any = (
            BaseModelOutput  # the record in which the decoder is shown what the encoder said
        )
        self._forward_params = inspect.signature(model.forward).parameters
        self._has_own_encode = has_override(model, "_maybe_prepare_encoder_kwargs_for_generation")

    def add_requests(self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]]) -> None:
        """Run the encoder on new requests, or take what the user computed."""
        for part in _group_compatible(inputs, len(requests)):
            fed: dict[str, Any] = {}
            lengths: list[int] = []
            for name, all_lines in inputs.items():
                lines = [all_lines[place] for place in part]
                if lines[0] is None:
                    continue
                if _is_paddable(name, lines[0].shape):
                    lengths = lengths or [len(line) for line in lines]
                    fed[name] = _pad_batch(lines, self.device)
                else:
                    fed[name] = _concat_media(lines, self.device)
            if not fed:
                raise InputError(self.traits.main_input_name, "must hold the encoder's input", None)
            states, mask, beside = self._encode_batch(fed, lengths)
            self._cross_cache.add_requests([requests[place] for place in part], states, mask, beside)

    def remove_requests(self, requests: Sequence[int]) -> None:
        """Forget those requests."""
        self._cross_cache.remove_requests(requests)

    def _encode_batch(
        self, fed: dict[str, Any], lengths: Sequence[int]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The encoder's output [B, S, D], the mask that goes with its input [B, T], and what else it says."""
        mask = fed.get("attention_mask")
        states = fed.pop("encoder_outputs", None)
        if mask is None:
            main = (
                states
                if states is not None
                else fed.get(self.traits.main_input_name, next(iter(fed.values())))
            )
            # What is no line of tokens is taken to be all there, as long as its second dimension says.
            mask = (
                _length_mask(lengths, self.device)
                if lengths
                else main.new_ones(main.shape[:2], dtype=torch.long)
            )
            if lengths or "attention_mask" in self._forward_params:
                fed["attention_mask"] = mask
        if states is not None:
            return states, mask, {}
        self.last_output = self._call_encoder(fed)
        self._output_class = type(self.last_output)
        beside = {
            name: value
            for name, value in self.last_output.items()
            if isinstance(value, Tensor) and name != "last_hidden_state" and len(value) == len(mask)
        }
        return self.last_output[0].to(self.device), mask, beside

    def _call_encoder(self, fed: dict[str, Any]) -> Any:
        """What the encoder says, by the model's own way to ask it where it has one."""
        if self._has_own_encode:
            main = fed.pop(self.traits.main_input_name)
            settings = self.model.generation_config
            return self.model._maybe_prepare_encoder_kwargs_for_generation(
                main, fed, self.traits.main_input_name, settings
            )["encoder_outputs"]
        encoder = self.model.get_encoder()
        takes = inspect.signature(encoder.forward).parameters
        wild = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in takes.values())
        fed = {name: value for name, value in fed.items() if wild or name in takes}
        return encoder(**fed, **self._output_flags, return_dict=True)

    def entry_index(self, requests: Tensor) -> Tensor | None:
        """The line of memory that each row reads; None: the first the first, and so on."""
        return self._cross_cache.entry_index(requests)

    def decoder_inputs(self, lines: Tensor | None) -> dict[str, Any]:
        """What the decoder is shown of the encoder, for rows that read those lines."""
        states = self._cross_cache.encoder_states(lines)
        if self.model.config.model_type in _MUTATING_MODEL_TYPES:
            states = states.clone()
        said = {"last_hidden_state": states, **self._cross_cache.other_outputs(lines)}
        shown: dict[str, Any] = {"encoder_outputs": self._output_class(**said)}
        if "attention_mask" in self._forward_params:
            shown["attention_mask"] = self._cross_cache.mask(lines)
        return shown

    def decoder_cache(self, lines: Tensor | None, own: SelfAttentionView, span: KVSpan) -> EncoderDecoderView:
        """The decoder's cache: its own, and what it made of the encoder's output."""
        depth = 0 if isinstance(span.start, int) and span.start == 0 else self._cross_cache.num_layers
        return EncoderDecoderView(own, CrossAttentionView(self._cross_cache, lines, span, depth), depth)


def _is_paddable(name: str, shape: Sequence[int]) -> bool:
    """Whether an input is a line of tokens or of their marks, which can be padded."""
    return name in _PADDABLE_INPUTS or is_per_token(name, len(shape))


def _group_compatible(inputs: Mapping[str, Sequence[Any]], count: int) -> list[list[int]]:
    """The requests in parts that can be read together: they give the same, and only tokens can be padded."""
    parts: dict[object, list[int]] = {}
    for place in range(count):
        given = ((name, lines[place]) for name, lines in inputs.items() if lines[place] is not None)
        shapes = tuple((name, tuple(value.shape)) for name, value in given)
        # Beside media, tokens are not padded either: their encoder may put them in one row with these.
        plain = all(_is_paddable(name, shape) for name, shape in shapes)
        kind = tuple(name for name, _ in shapes) if plain else shapes
        parts.setdefault(kind, []).append(place)
    return list(parts.values())


def _pad_batch(lines: Sequence[Tensor], device: torch.device) -> Tensor:
    """Lines of different length as one block, padded with zeros at the right."""
    return torch.nn.utils.rnn.pad_sequence(list(lines), batch_first=True).to(device)


def _concat_media(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Media one below the other."""
    return torch.cat(list(parts)).to(device)


def _length_mask(lengths: Sequence[int], device: torch.device) -> Tensor:
    """A mask of the first `lengths[i]` places of each line [B, S]."""
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long().to(device)
