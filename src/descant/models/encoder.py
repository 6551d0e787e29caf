"""The encoder's side of an encoder-decoder model: it reads once a request, whatever it reads."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from descant.core.interfaces import Facts, Span
from descant.errors import InputError
from descant.models.cross_attention_cache import Memory
from descant.models.forward_view import CrossView, PairView, SelfView
from descant.models.multimodal import is_mark
from descant.models.traits import overrides

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Encoder"]

# Given a line each, without a batch dimension, so that lines of different length can be padded.
_LINES = ("input_ids", "inputs_embeds", "attention_mask", "encoder_outputs")

# Kinds of model that add to the encoder's output where it lies.
_WRITES = frozenset({"moonshine_streaming"})


class Encoder:
    """Runs the encoder on new requests together, and shows the decoder what it made of them."""

    def __init__(
        self, model: PreTrainedModel, facts: Facts, states: Sequence[str], device: torch.device
    ) -> None:
        self.model: Any = model
        self.facts, self.device = facts, device
        self.encoded: Any = {}  # the encoder's last output, with the states asked for
        self._asked = {f"output_{name}": True for name in states}
        self._memory = Memory()
        self._kind: Any = BaseModelOutput  # the record in which the decoder is shown what the encoder said
        self._takes = inspect.signature(model.forward).parameters
        self._own = overrides(model, "_maybe_prepare_encoder_kwargs_for_generation")

    def open(self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]]) -> None:
        """Run the encoder on new requests, or take what the user computed."""
        for part in _alike(inputs, len(requests)):
            fed: dict[str, Any] = {}
            lengths: list[int] = []
            for name, all_lines in inputs.items():
                lines = [all_lines[place] for place in part]
                if lines[0] is None:
                    continue
                if _padded(name, lines[0].shape):
                    lengths = lengths or [len(line) for line in lines]
                    fed[name] = _stacked(lines, self.device)
                else:
                    fed[name] = _joined(lines, self.device)
            if not fed:
                raise InputError(self.facts.main, "must hold the encoder's input", None)
            states, mask, beside = self._read(fed, lengths)
            self._memory.open([requests[place] for place in part], states, mask, beside)

    def close(self, requests: Sequence[int]) -> None:
        """Forget those requests."""
        self._memory.close(requests)

    def _read(self, fed: dict[str, Any], lengths: Sequence[int]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The encoder's output [B, S, D], the mask that goes with its input [B, T], and what else it says."""
        mask = fed.get("attention_mask")
        states = fed.pop("encoder_outputs", None)
        if mask is None:
            main = states if states is not None else fed.get(self.facts.main, next(iter(fed.values())))
            # What is no line of tokens is taken to be all there, as long as its second dimension says.
            mask = (
                _present(lengths, self.device) if lengths else main.new_ones(main.shape[:2], dtype=torch.long)
            )
            if lengths or "attention_mask" in self._takes:
                fed["attention_mask"] = mask
        if states is not None:
            return states, mask, {}
        self.encoded = self._encoded(fed)
        self._kind = type(self.encoded)
        beside = {
            name: value
            for name, value in self.encoded.items()
            if isinstance(value, Tensor) and name != "last_hidden_state" and len(value) == len(mask)
        }
        return self.encoded[0].to(self.device), mask, beside

    def _encoded(self, fed: dict[str, Any]) -> Any:
        """What the encoder says, by the model's own way to ask it where it has one."""
        if self._own:
            main = fed.pop(self.facts.main)
            settings = self.model.generation_config
            return self.model._maybe_prepare_encoder_kwargs_for_generation(
                main, fed, self.facts.main, settings
            )["encoder_outputs"]
        encoder = self.model.get_encoder()
        takes = inspect.signature(encoder.forward).parameters
        wild = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in takes.values())
        fed = {name: value for name, value in fed.items() if wild or name in takes}
        return encoder(**fed, **self._asked, return_dict=True)

    def lines(self, requests: Tensor) -> Tensor | None:
        """The line of memory that each row reads; None: the first the first, and so on."""
        return self._memory.lines(requests)

    def shown(self, lines: Tensor | None) -> dict[str, Any]:
        """What the decoder is shown of the encoder, for rows that read those lines."""
        states = self._memory.states(lines)
        if self.model.config.model_type in _WRITES:
            states = states.clone()
        said = {"last_hidden_state": states, **self._memory.beside(lines)}
        shown: dict[str, Any] = {"encoder_outputs": self._kind(**said)}
        if "attention_mask" in self._takes:
            shown["attention_mask"] = self._memory.mask(lines)
        return shown

    def past(self, lines: Tensor | None, own: SelfView, span: Span) -> PairView:
        """The decoder's cache: its own, and what it made of the encoder's output."""
        depth = 0 if isinstance(span.start, int) and span.start == 0 else self._memory.depth
        return PairView(own, CrossView(self._memory, lines, span, depth), depth)


def _padded(name: str, shape: Sequence[int]) -> bool:
    """Whether an input is a line of tokens or of their marks, which can be padded."""
    return name in _LINES or is_mark(name, len(shape))


def _alike(inputs: Mapping[str, Sequence[Any]], count: int) -> list[list[int]]:
    """The requests in parts that can be read together: they give the same, and only tokens can be padded."""
    parts: dict[object, list[int]] = {}
    for place in range(count):
        given = ((name, lines[place]) for name, lines in inputs.items() if lines[place] is not None)
        shapes = tuple((name, tuple(value.shape)) for name, value in given)
        # Beside media, tokens are not padded either: their encoder may put them in one row with these.
        plain = all(_padded(name, shape) for name, shape in shapes)
        kind = tuple(name for name, _ in shapes) if plain else shapes
        parts.setdefault(kind, []).append(place)
    return list(parts.values())


def _stacked(lines: Sequence[Tensor], device: torch.device) -> Tensor:
    """Lines of different length as one block, padded with zeros at the right."""
    return torch.nn.utils.rnn.pad_sequence(list(lines), batch_first=True).to(device)


def _joined(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Media one below the other."""
    return torch.cat(list(parts)).to(device)


def _present(lengths: Sequence[int], device: torch.device) -> Tensor:
    """A mask of the first `lengths[i]` places of each line [B, S]."""
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long().to(device)
