"""What requests give besides tokens: media, marks for each token, and where their positions went."""

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
    """What one request gives."""

    media: dict[str, Any] = field(default_factory=dict)  # fed with the prompt, once
    per_token: dict[str, Tensor] = field(
        default_factory=dict
    )  # one entry for each token of the prompt [L, ...]
    step_kwargs: dict[str, Any] | None = None  # what the model wants at every forward; None: not yet known
    position_delta: Tensor | None = None  # [k] how far its positions run ahead of its tokens, where they do


class RequestInputsMap:
    """What the running requests give, by number."""

    def __init__(self) -> None:
        self._by_request: dict[int, RequestInputs] = {}

    def __len__(self) -> int:
        return len(self._by_request)

    def __getitem__(self, request: int) -> RequestInputs | None:
        return self._by_request.get(request)

    def add_requests(
        self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]], device: torch.device
    ) -> None:
        """Take what new requests give: marks go with the tokens, media with the prompt."""
        for place, request in enumerate(requests):
            extra = RequestInputs()
            for name, lines in inputs.items():
                value = lines[place]
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
        """Forget those requests."""
        for request in requests:
            self._by_request.pop(request, None)

    def drop_media(self, requests: Sequence[int]) -> None:
        """Let go of media that have been fed, and will not be again."""
        for request in requests:
            if (extra := self._by_request.get(request)) is not None:
                extra.media = {}

    def set_position_delta(self, request: int, ahead: Tensor) -> None:
        """Note how far a request's positions run ahead [k]."""
        self._by_request.setdefault(request, RequestInputs()).position_delta = ahead

    def position_deltas(self, requests: Sequence[int]) -> Tensor | None:
        """How far the positions of rows run ahead [k, N], where any was noted."""
        found = [
            extra.position_delta if (extra := self._by_request.get(one)) is not None else None
            for one in requests
        ]
        known = [one for one in found if one is not None]
        if not known:
            return None
        return torch.stack([torch.zeros_like(known[0]) if one is None else one for one in found], 1)

    def batch_keys(self, fresh: set[int], asks: bool) -> dict[int, object]:
        """The requests that share a forward only with those that give the same, by what that is.

        `asks` says that the model chooses by itself which of it it wants again.
        """
        kinds: dict[int, object] = {}
        for request, extra in self._by_request.items():
            if request in fresh:
                if extra.media or (asks and extra.per_token):
                    kinds[request] = request
                elif extra.per_token:
                    kinds[request] = tuple(sorted(extra.per_token))
            elif asks and (
                extra.step_kwargs or (extra.step_kwargs is None and (extra.media or extra.per_token))
            ):
                kinds[request] = request
            elif "token_type_ids" in extra.per_token:
                kinds[request] = "token_type_ids"
        return kinds
