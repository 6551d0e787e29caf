"""What requests give besides tokens: media, marks for each token, and where their positions went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from descant.models.multimodal import is_mark

__all__ = ["Extra", "Extras"]


@dataclass
class Extra:
    """What one request gives."""

    media: dict[str, Any] = field(default_factory=dict)  # fed with the prompt, once
    marks: dict[str, Tensor] = field(default_factory=dict)  # one entry for each token of the prompt [L, ...]
    lasting: dict[str, Any] | None = None  # what the model wants at every forward; None: not yet known
    ahead: Tensor | None = None  # [k] how far its positions run ahead of its tokens, where they do


class Extras:
    """What the running requests give, by number."""

    def __init__(self) -> None:
        self._kept: dict[int, Extra] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, request: int) -> Extra | None:
        return self._kept.get(request)

    def open(
        self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]], device: torch.device
    ) -> None:
        """Take what new requests give: marks go with the tokens, media with the prompt."""
        for place, request in enumerate(requests):
            extra = Extra()
            for name, lines in inputs.items():
                value = lines[place]
                if value is None:
                    continue
                value = value.to(device) if isinstance(value, Tensor) else value
                if isinstance(value, Tensor) and is_mark(name, value.ndim):
                    extra.marks[name] = value
                else:
                    extra.media[name] = value
            if extra.media or extra.marks:
                self._kept[request] = extra

    def close(self, requests: Sequence[int]) -> None:
        """Forget those requests."""
        for request in requests:
            self._kept.pop(request, None)

    def fed(self, requests: Sequence[int]) -> None:
        """Let go of media that have been fed, and will not be again."""
        for request in requests:
            if (extra := self._kept.get(request)) is not None:
                extra.media = {}

    def placed(self, request: int, ahead: Tensor) -> None:
        """Note how far a request's positions run ahead [k]."""
        self._kept.setdefault(request, Extra()).ahead = ahead

    def ahead(self, requests: Sequence[int]) -> Tensor | None:
        """How far the positions of rows run ahead [k, N], where any was noted."""
        found = [extra.ahead if (extra := self._kept.get(one)) is not None else None for one in requests]
        known = [one for one in found if one is not None]
        if not known:
            return None
        return torch.stack([torch.zeros_like(known[0]) if one is None else one for one in found], 1)

    def apart(self, fresh: set[int], asks: bool) -> dict[int, object]:
        """The requests that share a forward only with those that give the same, by what that is.

        `asks` says that the model chooses by itself which of it it wants again.
        """
        kinds: dict[int, object] = {}
        for request, extra in self._kept.items():
            if request in fresh:
                if extra.media or (asks and extra.marks):
                    kinds[request] = request
                elif extra.marks:
                    kinds[request] = tuple(sorted(extra.marks))
            elif asks and (extra.lasting or (extra.lasting is None and (extra.media or extra.marks))):
                kinds[request] = request
            elif "token_type_ids" in extra.marks:
                kinds[request] = "token_type_ids"
        return kinds
