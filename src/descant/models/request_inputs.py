"""Inputs of requests besides tokens: media, per-token inputs and position offsets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from descant.models.multimodal import is_per_token

__all__ = ["RequestInputs", "RequestInputsMap"]


@dataclass
class RequestInputs:
    """The inputs of one request besides its tokens."""

    media: dict[str, Any] = field(default_factory=dict)  # fed once, with the prompt
    per_token: dict[str, Tensor] = field(default_factory=dict)  # [L, ...] each, one entry per prompt token
    step_kwargs: dict[str, Any] | None = None  # inputs of every later forward; None: not yet known
    # What the model made of them in the last forward, and its first and last position; None: nothing.
    update: tuple[int | None, int, dict[str, Any]] | None = None
    position_delta: Tensor | None = None  # [k] offset of its positions from its token count, if it has any


class RequestInputsMap:
    """The RequestInputs of the running requests, by request number."""

    def __init__(self) -> None:
        self._by_request: dict[int, RequestInputs] = {}

    def __len__(self) -> int:
        return len(self._by_request)

    def __getitem__(self, request: int) -> RequestInputs | None:
        return self._by_request.get(request)

    def add_requests(
        self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]], device: torch.device
    ) -> None:
        """Store the inputs of new requests, per-token inputs and media apart."""
        for index, request in enumerate(requests):
            extra = RequestInputs()
            for name, values in inputs.items():
                value = values[index]
                if value is None:
                    continue
                value = value.to(device) if isinstance(value, Tensor) else value
                if isinstance(value, Tensor) and is_per_token(name, value.ndim):
                    extra.per_token[name] = value
                else:
                    extra.media[name] = value
            if extra.media or extra.per_token:
                self._by_request[request] = extra

    def remove_requests(self, requests: Sequence[int]) -> None:
        """Drop the inputs of finished requests."""
        for request in requests:
            self._by_request.pop(request, None)

    def drop_media(self, requests: Sequence[int]) -> None:
        """Drop media that have been fed and are not needed again."""
        for request in requests:
            if (extra := self._by_request.get(request)) is not None:
                extra.media = {}

    def set_position_delta(self, request: int, delta: Tensor) -> None:
        """Set the position offset of a request [k]."""
        self._by_request.setdefault(request, RequestInputs()).position_delta = delta

    def position_deltas(self, requests: Sequence[int]) -> Tensor | None:
        """The position offsets of rows [k, N], zero if a request has none; None if no request has any."""
        deltas = [
            extra.position_delta if (extra := self._by_request.get(request)) is not None else None
            for request in requests
        ]
        known = [delta for delta in deltas if delta is not None]
        if not known:
            return None
        return torch.stack([torch.zeros_like(known[0]) if delta is None else delta for delta in deltas], 1)

    def batch_keys(self, fresh: set[int], prepares_own_inputs: bool) -> dict[int, object]:
        """Keys of the requests that share a forward only with requests of the same key.

        `fresh` are the requests before their first forward; a model with `prepares_own_inputs` may use the
        inputs of a request again in later forwards.
        """
        keys: dict[int, object] = {}
        for request, extra in self._by_request.items():
            if request in fresh:
                if extra.media or (prepares_own_inputs and extra.per_token):
                    keys[request] = request
                elif extra.per_token:
                    keys[request] = tuple(sorted(extra.per_token))
            elif prepares_own_inputs and (
                extra.step_kwargs or (extra.step_kwargs is None and (extra.media or extra.per_token))
            ):
                keys[request] = request
            elif "token_type_ids" in extra.per_token:
                keys[request] = "token_type_ids"
        return keys
