"""Caches of recurrent models: `RecurrentCache` and the documented `MambaCache`."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer
from transformers.cache_utils import DynamicCache as TransformersDynamicCache

from descant.errors import InputError
from descant.kv_cache.stores.recurrent_state import RecurrentStateCache, take_state_rows


class RecurrentCache(TransformersCache):
    """Wrapper of a transformers cache whose layers keep more than keys and values.

    It shares the layers of the wrapped cache. `commit_store` returns the state of all rows as one store.
    """

    def __init__(self, state: TransformersCache, lengths: Tensor | None = None) -> None:
        # The base constructor would create layers; here those of the state are used.
        self.offloading = False
        self.layer_class_to_replicate = None
        self.read_only = False
        self._attach_state(state, lengths)

    def _attach_state(self, state: TransformersCache, lengths: Tensor | None) -> None:
        self._state = state
        self._num_seen = 0  # positions read; used if no layer counts them
        self._lengths = lengths
        self.layers: list[Any] = state.layers

    def _num_rows(self) -> int:
        """The number of rows, from the first tensor that has any."""
        for layer in self.layers:
            states = [getattr(layer, "keys", None)]
            for name in ("recurrent_states", "conv_states"):
                states = [*getattr(layer, name, {}).values(), *states]
            tensor = next((state for state in states if isinstance(state, Tensor) and state.ndim), None)
            if tensor is not None:
                return tensor.shape[0]
        return 0

    def _seq_length(self) -> int:
        """The number of positions read."""
        lengths = [int(layer.get_seq_length()) for layer in self.layers if isinstance(layer, CacheLayerMixin)]
        return max(lengths, default=self._num_seen)

    @property
    def lengths(self) -> Tensor:
        """The number of positions each row has read [R] (host)."""
        if self._lengths is not None and len(self._lengths) == self._num_rows():
            return self._lengths
        return torch.full((self._num_rows(),), self._seq_length())

    def commit_store(self) -> RecurrentStateCache:
        """A new store with the state of every row, not copied: use its `select` for an independent one."""
        rows = self._num_rows()
        store = RecurrentStateCache()
        store.extend(rows)
        if rows:
            store.write_state(torch.arange(rows), self._state)
        store.commit(None, self.lengths)
        return store

    def set_store(self, store: RecurrentStateCache) -> None:
        """Take over the state of a store whose rows share one state."""
        parts = store.row_batches()
        if len(parts) != 1 or len(parts[0]) != len(store):
            raise InputError("store", "must hold one state for all rows", store.lengths.tolist())
        self._attach_state(store.read_state(torch.arange(len(store))), store.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return sum(tensor.nbytes for layer in self.layers for tensor in _collect_tensors(vars(layer)))

    def copy(self) -> Self:
        """A writable copy that shares no state with this cache."""
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        rows = self._num_rows()
        other._attach_state(take_state_rows(self._state, range(rows), rows), self.lengths)
        other._num_seen, other.read_only = self._seq_length(), False
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.copy()

    # No layer of a recurrent model counts positions, so they are counted in these two methods, whose names
    # transformers prescribes. A forward reads the state of layer 0 exactly once, which counts one position.
    # If it feeds several tokens, or is the first, it then calls `update_conv_state`, which adds the rest.
    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """A layer's convolution state [R, C, K], None before the first forward; counts one position."""
        if layer_idx == 0 and state_idx == 0:
            self._num_seen, self._lengths = self._seq_length() + 1, None
        return super().get_conv_state(layer_idx, state_idx)

    def update_conv_state(self, conv_states: Any, layer_idx: Any, state_idx: Any = 0, **given: Any) -> Tensor:
        """Write a forward's convolution inputs [R, C, T] and count them; returns the state."""
        if layer_idx == 0 and state_idx == 0:
            self._num_seen += conv_states.shape[-1] - 1
        return super().update_conv_state(conv_states, layer_idx, state_idx, **given)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class MambaCache(RecurrentCache):
    """The convolution and state-space states of a Mamba model.

    Models of transformers 5 take it as `cache_params`.
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
            raise InputError(
                "config", "must be the config of a Mamba model", type(config).__name__, "use DynamicCache"
            )
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
        """The number of rows, or the maximum before the first forward."""
        return self._num_rows() or self.max_batch_size

    @property
    def conv_states(self) -> Tensor:
        """A copy of the convolution states [layers, R, intermediate, kernel]."""
        shape = self.batch_size, self.intermediate_size, self.conv_kernel_size
        return torch.stack([self._state_or_zeros(layer.conv_states[0], shape) for layer in self.layers])

    @property
    def ssm_states(self) -> Tensor:
        """A copy of the state-space states [layers, R, intermediate, state]."""
        shape = self.batch_size, self.intermediate_size, self.ssm_state_size
        return torch.stack([self._state_or_zeros(layer.recurrent_states[0], shape) for layer in self.layers])

    def _state_or_zeros(self, state: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device) if state is None else state

    def update_conv_state(self, conv_states: Any, layer_idx: Any, state_idx: Any = 0, **given: Any) -> Tensor:
        """Write a layer's convolution state, with the arguments of transformers 5 or of transformers 4.

        transformers 4 passes `(layer_idx, new_conv_state, cache_position)`: the state is rolled by one
        column, then the new columns [R, C, T] are written at their positions, clamped to the last column.
        """
        if isinstance(conv_states, Tensor):
            return super().update_conv_state(conv_states, layer_idx, state_idx, **given)
        layer, new = self.layers[conv_states], given.pop("new_conv_state", layer_idx)
        columns = given.pop("cache_position", state_idx).clamp(0, self.conv_kernel_size - 1)
        state = self._state_or_zeros(
            layer.conv_states[0], (len(new), self.intermediate_size, self.conv_kernel_size)
        )
        state = state.roll(-1, -1).to(new.device)
        state[:, :, columns.to(new.device)] = new.to(state.dtype)
        if not layer.is_conv_states_initialized[0]:
            layer.lazy_initialization(conv_states=state)
        layer.conv_states[0].copy_(state)
        layer.has_previous_state[0] = True
        written: Tensor = layer.conv_states[0]
        return written

    def update_ssm_state(self, layer_idx: int, new_ssm_state: Tensor) -> Tensor:
        """Write a layer's state-space state [R, intermediate, state]."""
        return self.update_recurrent_state(new_ssm_state, layer_idx)

    def reset(self) -> None:
        """Clear all states."""
        super().reset()  # type: ignore[no-untyped-call]
        self._num_seen, self._lengths = 0, None


def _collect_tensors(value: Any) -> list[Tensor]:
    """All tensors in nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in parts for tensor in _collect_tensors(part)]
