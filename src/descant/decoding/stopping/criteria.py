"""The documented stopping criteria `(input_ids, scores)`, and one for regular expressions."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from descant.core.interfaces import Array
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
    "validate_stopping_criteria",
]


class StoppingCriteria:
    """Base class of stopping criteria; a subclass defines `__call__`."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Return which rows [N, L], padded on the left, end: bool [N] on their device."""
        raise NotImplementedError(f"{type(self).__name__} must define `__call__`")


class StoppingCriteriaList(list[Any]):
    """Criteria any of which ends a row; each returns a bool for all rows or one per row."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Return which rows [N, L] any criterion ends, bool [N]."""
        ended = _full_mask(input_ids, False)
        for criterion in self:
            verdict = criterion(input_ids, scores, **kwargs)
            mask = torch.tensor(verdict) if isinstance(verdict, bool) else verdict
            is_mask = isinstance(mask, Tensor) and mask.dtype == torch.bool
            if not is_mask or mask.shape not in (torch.Size([]), ended.shape):
                must = f"must return a bool, or a bool tensor with one entry per row ({len(input_ids)})"
                raise InputError(type(criterion).__name__, must, verdict)
            ended = ended | mask.to(input_ids.device)
        return ended

    @property
    def max_length(self) -> int | None:
        """The `max_length` of the first `MaxLengthCriteria`, if there is one."""
        return next(
            (criterion.max_length for criterion in self if isinstance(criterion, MaxLengthCriteria)), None
        )


class MaxLengthCriteria(StoppingCriteria):
    """Ends rows of at least `max_length` tokens, prompt included on decoder-only models.

    `max_position_embeddings` is the model's maximum length. Rows that reach it and do not end give one
    warning, as transformers 4.52 documents it: some models read longer rows, and some fail.
    """

    def __init__(self, max_length: int, max_position_embeddings: int | None = None) -> None:
        self.max_length = _check_count("max_length", max_length)
        if max_position_embeddings is not None:
            _check_count("max_position_embeddings", max_position_embeddings)
        self.max_position_embeddings = max_position_embeddings
        self._has_warned = False

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:  # noqa: ARG002
        """Return whether the rows [N, L] are long enough, the same for all [N]."""
        length, limit = input_ids.shape[1], self.max_position_embeddings
        is_done = length >= self.max_length
        if limit is not None and length >= limit and not is_done and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"rows of {length} tokens have reached the {limit} positions of the model and go on to "
                f"`max_length` = {self.max_length}: longer rows may raise an error or lose quality",
                stacklevel=2,
            )
        return _full_mask(input_ids, is_done)


class MaxTimeCriteria(StoppingCriteria):
    """Ends all rows `max_time` seconds after `initial_timestamp`, by default the time of construction.

    Both use `time.time()`. `initial_time` is the documented name of the same argument.
    """

    def __init__(
        self, max_time: float, initial_timestamp: float | None = None, *, initial_time: float | None = None
    ) -> None:
        self.max_time = _check_seconds("max_time", max_time)
        if initial_timestamp is not None and initial_time is not None:
            must = "must not be given with `initial_timestamp`, which is the same argument"
            raise InputError("initial_time", must, initial_time, "leave it out")
        initial_timestamp = initial_time if initial_timestamp is None else initial_timestamp
        self.initial_timestamp = time.time() if initial_timestamp is None else initial_timestamp

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:  # noqa: ARG002
        """Return whether the time is over, the same for all rows [N]."""
        return _full_mask(input_ids, time.time() - self.initial_timestamp > self.max_time)


class EosTokenCriteria(StoppingCriteria):
    """Ends rows whose last token is `eos_token_id`, or one of them."""

    def __init__(self, eos_token_id: int | Sequence[int] | Tensor) -> None:
        try:
            ids = torch.as_tensor(eos_token_id).reshape(-1)
        except (TypeError, ValueError, RuntimeError):
            ids = torch.zeros(0)
        if not len(ids) or ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
            raise InputError("eos_token_id", "must be a token id or a list of them", eos_token_id)
        self.eos_token_id = ids.long()

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:  # noqa: ARG002
        """Return which rows [N, L] end with such a token [N]."""
        if input_ids.shape[1] == 0:
            return _full_mask(input_ids, False)
        return torch.isin(input_ids[:, -1], self.eos_token_id.to(input_ids.device))


class StopStringCriteria(StoppingCriteria):
    """Ends rows whose last token completes a stop string, wherever it started.

    Strings are compared as UTF-8 bytes, independently of token boundaries. Leading padding is no text.
    """

    def __init__(self, tokenizer: Any, stop_strings: str | Iterable[str]) -> None:
        self.stop_strings = normalize_stop_strings(stop_strings)
        self.matcher = StopStringMatcher.from_tokenizer(tokenizer, self.stop_strings)
        self._pad_token_id = _get_pad_token_id(tokenizer)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:  # noqa: ARG002
        """Return which rows [N, L] have just completed a stop string [N]."""
        ids = _mask_left_padding(input_ids.cpu().numpy(), self._pad_token_id)
        return torch.from_numpy(self.matcher.ends_with_match(ids)).to(input_ids.device)


class StopRegexCriteria(StoppingCriteria):
    """Ends rows whose text after the first `prompt_length` tokens matches a regular expression.

    Incomplete UTF-8 characters at the end are ignored.
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
        """Return which rows [N, L] match [N]."""
        ids = _mask_left_padding(input_ids.cpu().numpy(), self._pad_token_id)[:, self.prompt_length :]
        matches = [self.pattern.search(self._token_bytes.text(row)) is not None for row in ids.tolist()]
        return torch.tensor(matches, dtype=torch.bool, device=input_ids.device)


def validate_stopping_criteria(
    stopping_criteria: StoppingCriteriaList, max_length: int
) -> StoppingCriteriaList:
    """A copy of the list with a `MaxLengthCriteria`, added if it has none; warns if its length is another."""
    checked = deepcopy(stopping_criteria)
    own = checked.max_length
    if own is None:
        checked.append(MaxLengthCriteria(max_length=max_length))
    elif own != max_length:
        text = f"`max_length` differs: {own} in the stopping criteria, {max_length} as the argument"
        warnings.warn(text, UserWarning, stacklevel=2)
    return checked


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
    pad_token_id = getattr(tokenizer, "pad_token_id", None)
    return pad_token_id if isinstance(pad_token_id, int) else None


def _mask_left_padding(ids: Array, pad_token_id: int | None) -> Array:
    """Replace the leading padding of each row [N, L] by -1; the last token is never padding."""
    if pad_token_id is None or not (ids[:, :1] == pad_token_id).any():
        return ids
    leading = np.logical_and.accumulate(ids[:, :-1] == pad_token_id, axis=1)
    ids = ids.copy()
    ids[:, :-1][leading] = -1
    return ids
