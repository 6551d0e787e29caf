"""The documented stopping criteria, called as `(input_ids, scores)`, and one for regular expressions."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from descant.errors import InputError
from descant.tokenization.stop_strings import StopStringMatcher, normalize_stop_strings
from descant.tokenization.token_bytes import TokenBytes

__all__ = [
    "EosTokenCriteria",
    "MaxLengthCriteria",
    "MaxTimeCriteria",
    "StopRegexCriteria",
    "StopStringCriteria",
    "StoppingCriteria",
    "StoppingCriteriaList",
]

Array = np.ndarray[Any, np.dtype[Any]]


class StoppingCriteria:
    """The base of all criteria: a subclass defines `__call__`."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Which of the rows [N, L] are to end, bool [N] on their device; padding is in front."""
        raise NotImplementedError(f"{type(self).__name__} must define `__call__`")


class StoppingCriteriaList(list[Any]):
    """Criteria any of which ends a row; one may answer a bool for all rows or a bool for each."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Which of the rows [N, L] any criterion ends, bool [N]."""
        ended = _full_mask(input_ids, False)
        for criterion in self:
            verdict = criterion(input_ids, scores, **kwargs)
            given = torch.tensor(verdict) if isinstance(verdict, bool) else verdict
            alike = isinstance(given, Tensor) and given.dtype == torch.bool
            if not alike or given.shape not in (torch.Size([]), ended.shape):
                must = f"must answer a bool, or a tensor of {len(input_ids)} bools"
                raise InputError(type(criterion).__name__, must, verdict)
            ended = ended | given.to(input_ids.device)
        return ended

    @property
    def max_length(self) -> int | None:
        """That of the first `MaxLengthCriteria`, if there is one."""
        return next((one.max_length for one in self if isinstance(one, MaxLengthCriteria)), None)


class MaxLengthCriteria(StoppingCriteria):
    """Ends rows of at least `max_length` tokens, those of the prompt included on decoder-only models.

    `max_position_embeddings` is the length the model was made for: it is an error to allow more.
    """

    def __init__(self, max_length: int, max_position_embeddings: int | None = None) -> None:
        self.max_length = _check_count("max_length", max_length)
        if max_position_embeddings is not None and max_length > max_position_embeddings:
            must = f"must be <= `max_position_embeddings` = {max_position_embeddings}"
            do = "leave `max_position_embeddings` out to let the model go beyond it"
            raise InputError("max_length", must, max_length, do)
        self.max_position_embeddings = max_position_embeddings

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:  # noqa: ARG002
        """Whether the rows [N, L] are long enough, the same for all [N]."""
        return _full_mask(input_ids, input_ids.shape[1] >= self.max_length)


class MaxTimeCriteria(StoppingCriteria):
    """Ends all rows once `max_time` seconds have passed since `initial_timestamp`, by default now.

    Both are told by `time.time()`.
    """

    def __init__(self, max_time: float, initial_timestamp: float | None = None) -> None:
        self.max_time = _check_seconds("max_time", max_time)
        self.initial_timestamp = time.time() if initial_timestamp is None else initial_timestamp

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:  # noqa: ARG002
        """Whether the time is over, the same for all rows [N]."""
        return _full_mask(input_ids, time.time() - self.initial_timestamp > self.max_time)


class EosTokenCriteria(StoppingCriteria):
    """Ends rows whose last token is `eos_token_id`, or one of several."""

    def __init__(self, eos_token_id: int | Sequence[int] | Tensor) -> None:
        try:
            ids = torch.as_tensor(eos_token_id).reshape(-1)
        except (TypeError, ValueError, RuntimeError):
            ids = torch.zeros(0)
        if not len(ids) or ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
            raise InputError("eos_token_id", "must be a token id or a list of them", eos_token_id)
        self.eos_token_id = ids.long()

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:  # noqa: ARG002
        """Which rows [N, L] end in it [N]."""
        if input_ids.shape[1] == 0:
            return _full_mask(input_ids, False)
        return torch.isin(input_ids[:, -1], self.eos_token_id.to(input_ids.device))


class StopStringCriteria(StoppingCriteria):
    """Ends rows in whose last token a stop string ends, wherever it began.

    Strings are compared as UTF-8, byte by byte, so it does not matter how tokens cut them or their
    characters. Tokens of padding in front of a row are no text.
    """

    def __init__(self, tokenizer: Any, stop_strings: str | Iterable[str]) -> None:
        self.stop_strings = normalize_stop_strings(stop_strings)
        self.matcher = StopStringMatcher.from_tokenizer(tokenizer, self.stop_strings)
        self._pad_token_id = _get_pad_token_id(tokenizer)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:  # noqa: ARG002
        """Which rows [N, L] have just completed a stop string [N]."""
        ids = _mask_left_padding(input_ids.cpu().numpy(), self._pad_token_id)
        return torch.from_numpy(self.matcher.ends_with_match(ids)).to(input_ids.device)


class StopRegexCriteria(StoppingCriteria):
    """Ends rows whose text after the first `prompt_length` tokens matches a regular expression anywhere.

    A character whose last bytes have not come yet is not there yet.
    """

    def __init__(self, tokenizer: Any, pattern: str | re.Pattern[str], prompt_length: int = 0) -> None:
        try:
            self.pattern = re.compile(pattern)
        except (re.error, TypeError) as error:
            raise InputError("pattern", f"must be a regular expression ({error})", pattern) from error
        self.prompt_length = _check_count("prompt_length", prompt_length)
        self._token_bytes = TokenBytes.from_tokenizer(tokenizer)
        self._pad_token_id = _get_pad_token_id(tokenizer)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:  # noqa: ARG002
        """Which rows [N, L] match [N]."""
        ids = _mask_left_padding(input_ids.cpu().numpy(), self._pad_token_id)[:, self.prompt_length :]
        found = [self.pattern.search(self._token_bytes.text(row)) is not None for row in ids.tolist()]
        return torch.tensor(found, dtype=torch.bool, device=input_ids.device)


def _full_mask(input_ids: Tensor, verdict: bool) -> Tensor:
    return torch.full((len(input_ids),), verdict, dtype=torch.bool, device=input_ids.device)


def _check_count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InputError(name, "must be an integer >= 0", value)
    return value


def _check_seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise InputError(name, "must be a number of seconds >= 0", value)
    return value


def _get_pad_token_id(tokenizer: Any) -> int | None:
    pad = getattr(tokenizer, "pad_token_id", None)
    return pad if isinstance(pad, int) else None


def _mask_left_padding(ids: Array, pad: int | None) -> Array:
    """The ids [N, L] with -1 for the run of padding that begins a row; its last token is never padding."""
    if pad is None or not (ids[:, :1] == pad).any():
        return ids
    leading = np.logical_and.accumulate(ids[:, :-1] == pad, axis=1)
    ids = ids.copy()
    ids[:, :-1][leading] = -1
    return ids
