"""Rotary position embeddings: detects how a model rotates keys, to move cached keys to other positions."""

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
from descant.models.distributed import input_device
from descant.models.forward.encoder import SelfAttentionView
from descant.models.forward.traits import has_dynamic_rope, traits_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_rope_by_model: WeakKeyDictionary[PreTrainedModel, Sequence[RopeShift | None] | None] = WeakKeyDictionary()

# Relative error up to which a rotation counts as a match: the right one is off by thousandths (rounding), a
# wrong one by tenths.
_TOLERANCE = 0.05

# Model types that scale keys after the rotation, which their configs do not declare.
_POST_ROPE_NORM_MODELS = frozenset({"hunyuan_v1_dense", "hunyuan_v1_moe"})


@dataclass(frozen=True, eq=False)
class RopeShift:
    """A rotation of keys or queries by a number of positions (Su et al. 2021, RoPE)."""

    inv_freq: Tensor  # [P] radians per position
    interleaved: bool = False  # pairs are adjacent dimensions; else half of the rotated dimensions apart
    rotates_last_dims: bool = False  # the last dimensions of a head are rotated, else the first

    def __call__(self, keys: Tensor, shift: Tensor) -> Tensor:
        """Keys [N, H, S, D] rotated by `shift` positions [N]."""
        size = 2 * len(self.inv_freq)
        first = keys.shape[-1] - size if self.rotates_last_dims else 0
        part = keys[..., first : first + size]
        # Float64: the angle of a far position needs more precision than float32 has.
        angle_dtype = torch.float32 if keys.device.type == "mps" else torch.float64
        angle = shift.to(angle_dtype)[:, None, None, None] * self.inv_freq.to(keys.device, angle_dtype)
        wide = torch.promote_types(keys.dtype, torch.float32)
        cos, sin = angle.cos().to(wide), angle.sin().to(wide)
        x, y = (part[..., 0::2], part[..., 1::2]) if self.interleaved else part.chunk(2, -1)
        x, y = x * cos - y * sin, y * cos + x * sin
        rotated = torch.stack((x, y), -1).flatten(-2) if self.interleaved else torch.cat((x, y), -1)
        if size == keys.shape[-1]:
            return rotated.to(keys.dtype)
        return torch.cat((keys[..., :first], rotated.to(keys.dtype), keys[..., first + size :]), -1)


# -------------------------------------------------------------------- from a model
def rope_of_model(model: PreTrainedModel) -> RopeShift | Sequence[RopeShift | None] | None:
    """The rotation of a model's keys, or one per layer if they differ (None for layers without one).

    None if positions are not rotary, not only rotary, or depend on the length. Detected once per model: two
    tokens are fed at two positions, and the candidate that maps the keys of one position to those of the
    other in every layer is the rotation.
    """
    if model not in _rope_by_model:
        _rope_by_model[model] = _detect_rope(model)
    return _collapse_layers(_rope_by_model[model])


def _detect_rope(model: PreTrainedModel) -> Sequence[RopeShift | None] | None:
    traits = traits_of(model)
    text = model.config.get_text_config(decoder=True)
    if (
        traits.cache_type != "kv"
        or traits.prepares_own_inputs
        or not traits.supports_position_ids
        or has_dynamic_rope(text)
    ):
        return None
    candidates = [
        RopeShift(inv_freq * sign, interleaved, last_dims)
        for inv_freq, sign, interleaved, last_dims in product(
            _candidate_inv_freqs(model, text), (1, -1), (False, True), (False, True)
        )
    ]
    if not candidates:
        return None
    shift = min(97, (traits.max_positions or traits.context_length or 128) - 1)
    recorded = _record_keys(model, shift)
    rotations: list[RopeShift | None] = []
    for layer in sorted(recorded):
        keys, shifted_keys = recorded[layer]
        matches = [rotation for rotation in candidates if _is_match(rotation, keys, shifted_keys, shift)]
        if not matches and _relative_error(keys, shifted_keys) > _TOLERANCE:
            return None
        rotations.append(matches[0] if matches else None)
    return rotations if any(rotation is not None for rotation in rotations) else None


def _candidate_inv_freqs(model: PreTrainedModel, text: Any) -> list[Tensor]:
    """The possible inverse frequencies: the buffers of the model and the default for `rotary_dim`."""
    candidates: list[Tensor] = []
    for name, table in model.named_buffers():
        if name.endswith("inv_freq") and "original" not in name and table.ndim == 1:
            candidates.append(table.detach().float().cpu())
    if isinstance(size := getattr(text, "rotary_dim", None), int):
        candidates.append(_default_inv_freq(size, 10000.0))
    distinct: list[Tensor] = []
    for inv_freq in candidates:
        if not any(torch.equal(inv_freq, other) for other in distinct):
            distinct.append(inv_freq)
    return distinct


class _KeyRecorder:
    """Records the keys of every layer in place of a cache; holds no past."""

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}

    def update(self, layer: int, key: Tensor, value: Tensor, span: KVSpan) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        self.keys[layer] = key.detach().float().cpu()
        return key, value

    def visible_slots(self, layer: int, span: KVSpan) -> None:
        pass


@torch.no_grad()
def _record_keys(model: PreTrainedModel, shift: int) -> dict[int, tuple[Tensor, Tensor]]:
    """By layer, the keys of two tokens [2, H, 1, D] at position 0 and at position `shift`."""
    device, size = input_device(model), traits_of(model).vocab_size
    tokens = torch.tensor([[size // 2], [size // 3]] * 2, device=device)
    positions = torch.tensor([[0], [0], [shift], [shift]], device=device)
    recorder: Any = _KeyRecorder()
    view = SelfAttentionView(recorder, KVSpan(None, 0, 1, 1))
    model(input_ids=tokens, position_ids=positions, past_key_values=view, use_cache=True)
    return {layer: (keys[:2], keys[2:]) for layer, keys in recorder.keys.items()}


def _is_match(rotation: RopeShift, keys: Tensor, shifted_keys: Tensor, shift: int) -> bool:
    if 2 * len(rotation.inv_freq) > keys.shape[-1]:
        return False
    return _relative_error(rotation(keys, torch.full((len(keys),), shift)), shifted_keys) <= _TOLERANCE


def _relative_error(keys: Tensor, expected: Tensor) -> float:
    """The distance between keys, relative to the norm of the expected ones."""
    return float((keys - expected).norm() / expected.norm().clamp(min=1e-9))


def rope_of_running_model() -> RopeShift | Sequence[RopeShift | None] | None:
    """The rotation of the model whose forward is running in this thread; None also if there is none.

    Models of transformers 5 do not tell a cache how they rotate keys. They are found on the call stack.
    """
    # Imported here: slow to load, and loaded already if a model is running.
    from transformers import PreTrainedModel

    models: list[PreTrainedModel] = []
    frame = sys._getframe(1).f_back
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, PreTrainedModel) and owner not in models:
            models.append(owner)
        frame = frame.f_back
    for model in models:
        rotation = rope_from_config(model.config)
        if rotation is not None:
            return rotation
    # The outermost model is the one that the caller runs; its code says what the config does not.
    return rope_of_model(models[-1]) if models else None


# -------------------------------------------------------------------- from a config
def rope_from_config(config: Any) -> RopeShift | Sequence[RopeShift | None] | None:
    """The rotation as far as a config declares it; None also if it does not.

    With several layer types or latent attention only the code of the model determines which layers and
    dimensions are rotated.
    """
    text = config.get_text_config(decoder=True)
    has_several_types = len(set(getattr(text, "layer_types", None) or ())) > 1
    if has_several_types or hasattr(text, "qk_rope_head_dim") or has_dynamic_rope(text):
        return None
    partner = None if text.model_type in _POST_ROPE_NORM_MODELS else _probe_rotate_half(config, text)
    inv_freq = None if partner is None else _config_inv_freq(text)
    if partner is None or inv_freq is None:
        return None
    rotation = RopeShift(inv_freq if partner < 0 else -inv_freq, abs(partner) == 2)
    skipped = _no_rope_layers(text)
    return _collapse_layers(
        [None if layer in skipped else rotation for layer in range(text.num_hidden_layers)]
    )


def _rope_settings(text: Any) -> list[dict[str, Any]]:
    """The RoPE settings of a config: one, or one per layer type."""
    settings = getattr(text, "rope_parameters", None) or {}
    nested = [value for value in settings.values() if isinstance(value, dict)]
    return nested or ([dict(settings)] if settings else [])


def _config_inv_freq(text: Any) -> Tensor | None:
    """The inverse frequencies that a config declares."""
    settings = _rope_settings(text)
    if isinstance(size := getattr(text, "rotary_dim", None), int) and not settings:
        return _default_inv_freq(size, 10000.0)
    if len(settings) != 1 or "rope_theta" not in settings[0]:
        return None
    rope, rope_type = settings[0], settings[0].get("rope_type", "default")
    if rope_type != "default":
        init = ROPE_INIT_FUNCTIONS.get(rope_type)
        return None if init is None else init(text, torch.device("cpu"))[0]
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    factor = rope.get("partial_rotary_factor", getattr(text, "partial_rotary_factor", None))
    return _default_inv_freq(int(head_dim * (1.0 if factor is None else factor)), float(rope["rope_theta"]))


def _default_inv_freq(size: int, base: float) -> Tensor:
    return 1.0 / base ** (torch.arange(0, size, 2).float() / size)


def _probe_rotate_half(config: Any, text: Any) -> float | None:
    """The first output of the model's `rotate_half` for (1, 2, 3, 4): the partner of dimension 1, signed."""
    # Imported here: slow to load, and loaded already if there is a model.
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    for config_class in (type(config), type(text)):
        mapped = MODEL_FOR_CAUSAL_LM_MAPPING.get(config_class, None)
        for model_class in mapped if isinstance(mapped, tuple | list) else [mapped]:
            module = None if model_class is None else sys.modules.get(model_class.__module__)
            rotate = getattr(module, "rotate_half", None) or getattr(module, "rotate_every_two", None)
            if rotate is not None:
                return float(rotate(torch.arange(1.0, 5.0).view(1, 1, 1, 4)).flatten()[0])
    return None


def _no_rope_layers(text: Any) -> frozenset[int]:
    """The layers without rotation; the config's `no_rope_layers` has 0 for these."""
    has_rope = getattr(text, "no_rope_layers", None)
    return frozenset(layer for layer, flag in enumerate(has_rope or ()) if not flag)


def _collapse_layers(
    rotations: Sequence[RopeShift | None] | None,
) -> RopeShift | Sequence[RopeShift | None] | None:
    """One rotation if all layers share it, else one per layer."""
    if rotations and all(rotation is rotations[0] for rotation in rotations):
        return rotations[0]
    return rotations
