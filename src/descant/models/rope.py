"""How a rotary model turns its keys: what moves a key that was read at one position on to another."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from descant.core.interfaces import KVSpan
from descant.models.devices import input_device
from descant.models.forward_view import SelfAttentionView
from descant.models.traits import traits_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["RopeShift", "rope_from_config", "rope_of_model"]

_rope_by_model: WeakKeyDictionary[PreTrainedModel, Sequence[RopeShift | None] | None] = WeakKeyDictionary()

# How far a key that is turned by the right rule may be off, by its own length: rounded, it is by thousandths,
# and by a wrong rule by tenths.
_TOLERANCE = 0.05

# Their frequencies hang on the length of what is read, so that a key has no one turn.
_DYNAMIC_ROPE_TYPES = ("dynamic", "longrope")

# Kinds of model that weigh their keys after they have turned them, of which no config tells.
_POST_ROPE_NORM_MODELS = frozenset({"hunyuan_v1_dense", "hunyuan_v1_moe"})


@dataclass(frozen=True, eq=False)
class RopeShift:
    """A rotation of keys or queries (Su et al. 2021): pairs of numbers turn, each at a speed of its own."""

    inv_freq: Tensor  # [P] radians a position
    interleaved: bool = False  # a pair are neighbours; else they lie half of what turns apart
    rotates_last_dims: bool = False  # what turns are the last numbers of a head, else the first

    def __call__(self, keys: Tensor, shift: Tensor) -> Tensor:
        """Keys [N, H, S, D] moved on by so many positions [N]."""
        size = 2 * len(self.inv_freq)
        first = keys.shape[-1] - size if self.rotates_last_dims else 0
        part = keys[..., first : first + size]
        # In double: a far position times a speed needs more digits than a single number has.
        exact = torch.float32 if keys.device.type == "mps" else torch.float64
        angle = shift.to(exact)[:, None, None, None] * self.inv_freq.to(keys.device, exact)
        cos, sin = angle.cos().float(), angle.sin().float()
        one, two = (part[..., 0::2], part[..., 1::2]) if self.interleaved else part.chunk(2, -1)
        one, two = one * cos - two * sin, two * cos + one * sin
        turned = torch.stack((one, two), -1).flatten(-2) if self.interleaved else torch.cat((one, two), -1)
        if size == keys.shape[-1]:
            return turned.to(keys.dtype)
        return torch.cat((keys[..., :first], turned.to(keys.dtype), keys[..., first + size :]), -1)


# -------------------------------------------------------------------- of a model
def rope_of_model(model: PreTrainedModel) -> RopeShift | Sequence[RopeShift | None] | None:
    """The rotation of a model's keys; for each layer where they differ, None for one that has none.

    None where a model's positions are not rotary, or not only, or stretch with the length. It is found by
    trial, once a model: two tokens are read at two positions, each by itself, and whatever turns the keys of
    the one into those of the other, in every layer, is it.
    """
    if model not in _rope_by_model:
        _rope_by_model[model] = _detect_rope(model)
    return _collapse_layers(_rope_by_model[model])


def _detect_rope(model: PreTrainedModel) -> Sequence[RopeShift | None] | None:
    facts = traits_of(model)
    text = model.config.get_text_config(decoder=True)
    if (
        facts.cache_type != "kv"
        or facts.prepares_own_inputs
        or not facts.supports_position_ids
        or _has_dynamic_rope(text)
    ):
        return None
    turns = [
        RopeShift(speeds * way, paired, last)
        for speeds, way, paired, last in product(
            _candidate_inv_freqs(model, text), (1, -1), (False, True), (False, True)
        )
    ]
    if not turns:
        return None
    shift = min(97, (facts.max_positions or facts.context_length or 128) - 1)
    heard = _record_keys(model, shift)
    found: list[RopeShift | None] = []
    for layer in sorted(heard):
        here, there = heard[layer]
        fits = [turn for turn in turns if _is_match(turn, here, there, shift)]
        if not fits and _relative_error(here, there) > _TOLERANCE:
            return None
        found.append(fits[0] if fits else None)
    return found if any(turn is not None for turn in found) else None


def _candidate_inv_freqs(model: PreTrainedModel, text: Any) -> list[Tensor]:
    """All that may be the speeds of its pairs."""
    found: list[Tensor] = []
    for name, table in model.named_buffers():
        if name.endswith("inv_freq") and "original" not in name and table.ndim == 1:
            found.append(table.detach().float().cpu())
    if isinstance(size := getattr(text, "rotary_dim", None), int):
        found.append(_default_inv_freq(size, 10000.0))
    distinct: list[Tensor] = []
    for one in found:
        if not any(torch.equal(one, other) for other in distinct):
            distinct.append(one)
    return distinct


class _KeyRecorder:
    """In the place of a cache: listens to the keys of every layer and remembers nothing before them."""

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}

    def update(self, layer: int, key: Tensor, value: Tensor, span: KVSpan) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        self.keys[layer] = key.detach().float().cpu()
        return key, value

    def visible_slots(self, layer: int, span: KVSpan) -> None:
        pass


@torch.no_grad()
def _record_keys(model: PreTrainedModel, shift: int) -> dict[int, tuple[Tensor, Tensor]]:
    """By layer the keys of two tokens [2, H, 1, D] at the first position, and so many positions on."""
    device, size = input_device(model), traits_of(model).vocab_size
    tokens = torch.tensor([[size // 2], [size // 3]] * 2, device=device)
    places = torch.tensor([[0], [0], [shift], [shift]], device=device)
    ear: Any = _KeyRecorder()
    view = SelfAttentionView(ear, KVSpan(None, 0, 1, 1))
    model(input_ids=tokens, position_ids=places, past_key_values=view, use_cache=True)
    return {layer: (keys[:2], keys[2:]) for layer, keys in ear.keys.items()}


def _is_match(turn: RopeShift, here: Tensor, there: Tensor, shift: int) -> bool:
    if 2 * len(turn.inv_freq) > here.shape[-1]:
        return False
    return _relative_error(turn(here, torch.full((len(here),), shift)), there) <= _TOLERANCE


def _relative_error(one: Tensor, two: Tensor) -> float:
    """How far keys are from others, by their length."""
    return float((one - two).norm() / two.norm().clamp(min=1e-9))


# -------------------------------------------------------------------- of a config
def rope_from_config(config: Any) -> RopeShift | Sequence[RopeShift | None] | None:
    """The same as far as a config tells, for want of a model; None also where it does not tell.

    That is where layers are of several kinds, or attention is latent: then a model's own code says which of
    them turn, and what.
    """
    text = config.get_text_config(decoder=True)
    several = len(set(getattr(text, "layer_types", None) or ())) > 1
    if several or hasattr(text, "qk_rope_head_dim") or _has_dynamic_rope(text):
        return None
    first = None if text.model_type in _POST_ROPE_NORM_MODELS else _probe_rotate_half(config, text)
    speeds = None if first is None else _config_inv_freq(text)
    if first is None or speeds is None:
        return None
    turn = RopeShift(speeds if first < 0 else -speeds, abs(first) == 2)
    plain = _no_rope_layers(text)
    return _collapse_layers([None if layer in plain else turn for layer in range(text.num_hidden_layers)])


def _rope_settings(text: Any) -> list[dict[str, Any]]:
    """The settings of its rotations: one, or one for each kind of layer."""
    ropes = getattr(text, "rope_parameters", None) or {}
    nested = [one for one in ropes.values() if isinstance(one, dict)]
    return nested or ([dict(ropes)] if ropes else [])


def _has_dynamic_rope(text: Any) -> bool:
    return any(one.get("rope_type") in _DYNAMIC_ROPE_TYPES for one in _rope_settings(text))


def _config_inv_freq(text: Any) -> Tensor | None:
    """The speeds that a config tells of."""
    ropes = _rope_settings(text)
    if isinstance(size := getattr(text, "rotary_dim", None), int) and not ropes:
        return _default_inv_freq(size, 10000.0)
    if len(ropes) != 1 or "rope_theta" not in ropes[0]:
        return None
    rope, kind = ropes[0], ropes[0].get("rope_type", "default")
    if kind != "default":
        return (
            ROPE_INIT_FUNCTIONS[kind](text, torch.device("cpu"))[0] if kind in ROPE_INIT_FUNCTIONS else None
        )
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    share = rope.get("partial_rotary_factor", getattr(text, "partial_rotary_factor", None))
    return _default_inv_freq(int(head * (1.0 if share is None else share)), float(rope["rope_theta"]))


def _default_inv_freq(size: int, base: float) -> Tensor:
    return 1.0 / base ** (torch.arange(0, size, 2).float() / size)


def _probe_rotate_half(config: Any, text: Any) -> float | None:
    """What the model's own code turns the first of the numbers 1 to 4 to: that with which it makes a pair."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING  # by now there is a model, and all this is loaded

    for kind in (type(config), type(text)):
        listed = MODEL_FOR_CAUSAL_LM_MAPPING.get(kind, None)
        for model in listed if isinstance(listed, tuple | list) else [listed]:
            code = None if model is None else sys.modules.get(model.__module__)
            turns = getattr(code, "rotate_half", None) or getattr(code, "rotate_every_two", None)
            if turns is not None:
                return float(turns(torch.arange(1.0, 5.0).view(1, 1, 1, 4)).flatten()[0])
    return None


def _no_rope_layers(text: Any) -> frozenset[int]:
    """The layers that a config leaves without rotation."""
    turned = getattr(text, "no_rope_layers", None)
    return frozenset(at for at, one in enumerate(turned or ()) if not one)


def _collapse_layers(
    turns: Sequence[RopeShift | None] | None,
) -> RopeShift | Sequence[RopeShift | None] | None:
    """What all layers have, or each one's."""
    if turns and all(turn is turns[0] for turn in turns):
        return turns[0]
    return turns
