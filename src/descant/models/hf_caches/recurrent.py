"""Caches of models that keep a state of their own, with the face of a transformers cache."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer
from transformers.cache_utils import DynamicCache as TransformersDynamicCache

from descant.errors import InputError
from descant.kv_cache.recurrent_state import RecurrentStateCache, take_state_rows

__all__ = ["MambaCache", "RecurrentCache"]


class RecurrentCache(TransformersCache):
    """A cache that transformers made for a model whose layers keep more than keys and values.

    Its layers are the ones of that cache, and `store` holds it for all rows at once.
    """

    def __init__(self, state: TransformersCache, lengths: Tensor | None = None) -> None:
        # The base builds layers of its own; here those of the state are used.
        self.offloading = False
        self.layer_class_to_replicate = None
        self.read_only = False
        self._store = RecurrentStateCache()
        self._attach_state(state, lengths)

    def _attach_state(self, state: TransformersCache, lengths: Tensor | None) -> None:
        self._state = state
        self._num_seen = 0  # positions read, where no layer counts them
        self._lengths = lengths
        self.layers: list[Any] = state.layers

    def _num_rows(self) -> int:
        """How many rows its tensors have."""
        for layer in self.layers:
            held = (getattr(layer, name, {}) for name in ("conv_states", "recurrent_states"))
            states = [*(one for some in held for one in some.values()), getattr(layer, "keys", None)]
            found = next((one for one in states if isinstance(one, Tensor) and one.ndim), None)
            if found is not None:
                return found.shape[0]
        return 0

    def _seq_length(self) -> int:
        """How many positions were read."""
        counted = [int(one.get_seq_length()) for one in self.layers if isinstance(one, CacheLayerMixin)]
        return max(counted, default=self._num_seen)

    @property
    def lengths(self) -> Tensor:
        """How many positions each row has read [R] (host)."""
        if self._lengths is not None and len(self._lengths) == self._num_rows():
            return self._lengths
        return torch.full((self._num_rows(),), self._seq_length())

    @property
    def store(self) -> RecurrentStateCache:
        """A store with the state of every row; it is the very state, so take `select` of it to go on."""
        rows = self._num_rows()
        self._store = RecurrentStateCache()
        self._store.extend(rows)
        if rows:
            self._store.write_state(torch.arange(rows), self._state)
        self._store.commit(None, self.lengths)
        return self._store

    @store.setter
    def store(self, store: RecurrentStateCache) -> None:
        parts = store.row_batches()
        if len(parts) != 1 or len(parts[0]) != len(store):
            raise InputError("store", "must hold states of one kind for all rows", store.lengths.tolist())
        self._attach_state(store.read_state(torch.arange(len(store))), store.lengths)

    @property
    def nbytes(self) -> int:
        """What it takes in memory."""
        return sum(one.nbytes for layer in self.layers for one in _collect_tensors(vars(layer)))

    def copy(self) -> Self:
        """Another cache with the same rows, which can be written to without this one changing."""
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        rows = self._num_rows()
        other._attach_state(take_state_rows(self._state, range(rows), rows), self.lengths)
        other._num_seen, other.read_only = self._seq_length(), False
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.copy()

    # A forward of a recurrent model begins by asking for the first layer's state and, but for a single token
    # after others, goes on to update it: so positions are counted here, since no layer does.
    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """A layer's convolution state [R, C, K], None before the first forward; models ask once a forward."""
        if layer_idx == 0 and state_idx == 0:
            self._num_seen, self._lengths = self._seq_length() + 1, None
        return super().get_conv_state(layer_idx, state_idx)

    def update_conv_state(self, conv_states: Any, layer_idx: Any, state_idx: Any = 0, **given: Any) -> Tensor:
        """Write what a forward fed to a layer's convolution [R, C, T]; the state with it before."""
        if layer_idx == 0 and state_idx == 0:
            self._num_seen += conv_states.shape[-1] - 1
        return super().update_conv_state(conv_states, layer_idx, state_idx, **given)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class MambaCache(RecurrentCache):
    """The convolution and state-space states of a Mamba model, one of each a layer and row.

    A model of transformers 5 takes it as `cache_params`.
    """

    def __init__(
        self,
        config: Any,
        batch_size: int | None = None,
        dtype: torch.dtype = torch.float16,
        device: torch.device | str | None = None,
        *,
        max_batch_size: int | None = None,
    ) -> None:
        rows = max_batch_size if batch_size is None else batch_size
        if rows is None or rows < 1:
            raise InputError("batch_size", "must be >= 1", rows)
        if not hasattr(config, "conv_kernel") or not hasattr(config, "state_size"):
            raise InputError("config", "must be of a Mamba model", type(config).__name__, "use DynamicCache")
        self.max_batch_size = rows
        self.dtype, self.device = dtype, torch.device(device or "cpu")
        self.intermediate_size = int(config.intermediate_size)
        self.ssm_state_size = int(config.state_size)
        self.conv_kernel_size = int(config.conv_kernel)
        state = TransformersDynamicCache.__new__(TransformersDynamicCache)
        layers: list[Any] = [LinearAttentionLayer() for _ in range(config.num_hidden_layers)]
        TransformersCache.__init__(state, layers=layers)
        super().__init__(state)

    @property
    def batch_size(self) -> int:
        """How many rows it is for."""
        return self._num_rows() or self.max_batch_size

    @property
    def conv_states(self) -> Tensor:
        """What each layer's convolution will see again [layers, R, intermediate, kernel], copied."""
        shape = self.batch_size, self.intermediate_size, self.conv_kernel_size
        return torch.stack([self._state_or_zeros(layer.conv_states[0], shape) for layer in self.layers])

    @property
    def ssm_states(self) -> Tensor:
        """What each layer remembers [layers, R, intermediate, state], copied."""
        shape = self.batch_size, self.intermediate_size, self.ssm_state_size
        return torch.stack([self._state_or_zeros(layer.recurrent_states[0], shape) for layer in self.layers])

    def _state_or_zeros(self, state: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device) if state is None else state

    def update_conv_state(self, conv_states: Any, layer_idx: Any, state_idx: Any = 0, **given: Any) -> Tensor:
        """Write to a layer's convolution, as models do or as documented.

        Documented: `(layer_idx, new_conv_state, cache_position)`: the state moves on by one, then the new
        columns [R, C, T] are written at their positions, the last column standing for all beyond.
        """
        if isinstance(conv_states, Tensor):
            return super().update_conv_state(conv_states, layer_idx, state_idx, **given)
        layer, new = self.layers[conv_states], given.pop("new_conv_state", layer_idx)
        at = given.pop("cache_position", state_idx).clamp(0, self.conv_kernel_size - 1)
        state = self._state_or_zeros(
            layer.conv_states[0], (len(new), self.intermediate_size, self.conv_kernel_size)
        )
        state = state.roll(-1, -1).to(new.device)
        state[:, :, at.to(new.device)] = new.to(state.dtype)
        if not layer.is_conv_states_initialized[0]:
            layer.lazy_initialization(conv_states=state)
        layer.conv_states[0].copy_(state)
        layer.has_previous_state[0] = True
        found: Tensor = layer.conv_states[0]
        return found

    def update_ssm_state(self, layer_idx: int, new_ssm_state: Tensor) -> Tensor:
        """Write what a layer remembers [R, intermediate, state]."""
        return self.update_recurrent_state(new_ssm_state, layer_idx)

    def reset(self) -> None:
        """Forget everything."""
        super().reset()  # type: ignore[no-untyped-call]
        self._num_seen, self._lengths = 0, None


def _collect_tensors(held: Any) -> list[Tensor]:
    """All tensors in what a layer holds."""
    if isinstance(held, Tensor):
        return [held]
    if isinstance(held, dict):
        return [one for part in held.values() for one in _collect_tensors(part)]
    return [one for part in held for one in _collect_tensors(part)] if isinstance(held, list | tuple) else []
