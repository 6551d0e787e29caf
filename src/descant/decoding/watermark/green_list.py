"""Detection scheme of the green list watermark, and the documented detector."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from descant.core.interfaces import Array
from descant.decoding.watermark.padding import PaddingTokens
from descant.decoding.watermark.schemes import WatermarkingConfig, as_watermarking_config
from descant.decoding.watermark.schemes.green_list import GreenList, get_green_list
from descant.decoding.watermark.schemes.keys import warn_if_public
from descant.decoding.watermark.scores import TokenScores
from descant.decoding.watermark.statistics import binomial_tail, proportion_interval
from descant.errors import InputError

__all__ = ["GreenListScheme", "WatermarkDetector", "WatermarkDetectorOutput", "config_vocab_size"]

# If only the bias decides, a bias of d turns a green share g into e^d g / (1 - g + e^d g) of the text; where
# the model is certain, the share stays g. Of 300 texts by SmolLM2-135M with a bias of 2, the least free one
# was free at 36 % of its tokens, and half of them at 65 % or more. Less than a quarter is taken as no
# watermark.
MIN_FREE_SHARE: Final = 0.25
ROUNDING_SLACK: Final = 1e-6


class GreenListScheme:
    """One key of the green list: a token's value is 1 if it is green.

    Without the key, a token is green with probability `num_green / V`, independently between seeds. Tokens
    of one seed are drawn without replacement, which only makes the test conservative. Equal inputs are scored
    once: lefthash depends on the last token and the token, whatever the `context_width`. A seed of 0, as
    after token 0, gives the same list for all keys and is not scored. With a negative bias, red tokens count.
    """

    name = WatermarkingConfig.scheme
    nonce: int | None = None

    def __init__(self, settings: WatermarkingConfig, vocabulary: int) -> None:
        self.settings = settings
        self._green_list = get_green_list(settings, vocabulary)
        share = self._green_list.num_green / vocabulary
        self.null_mean = share if settings.bias >= 0 else 1.0 - share
        self.null_std = math.sqrt(share * (1.0 - share))
        self.context_size = self.prompt_reach = self._green_list.context_size
        odds = math.exp(min(abs(settings.bias), 100.0))
        biased_share = odds * self.null_mean / (1.0 - self.null_mean + odds * self.null_mean)
        self.min_marked_mean = self.null_mean + MIN_FREE_SHARE * (biased_share - self.null_mean)

    def score_tokens(self, ids: Array) -> TokenScores:
        """Score the tokens [L] that have a context and a new input."""
        ids = np.asarray(ids, dtype=np.int64)
        scored = np.zeros(len(ids), dtype=np.bool_)
        values = np.zeros(len(ids))
        first, seeds = _context_seeds(self._green_list, ids, self.context_size)
        if not len(seeds):
            return TokenScores(scored, values)
        inputs = (seeds.astype(np.uint64) << np.uint64(32)) | (ids[first:] & 0xFFFFFFFF).astype(np.uint64)
        is_new = np.zeros(len(inputs), dtype=np.bool_)
        is_new[np.unique(inputs, return_index=True)[1]] = True
        known = (ids[first:] >= 0) & (ids[first:] < self._green_list.vocab_size)
        scored[first:] = is_new & known & (seeds != 0)
        positions = np.flatnonzero(scored)
        green = self._green_list.is_green(seeds[positions - first], ids[positions])
        values[positions] = green if self.settings.bias >= 0 else ~green
        return TokenScores(scored, values)

    def p_value(self, count: int, total: float) -> float:
        """Binomial probability of `total` or more green tokens among `count`."""
        return binomial_tail(count, math.ceil(total - ROUNDING_SLACK), self.null_mean)

    def confidence_interval(self, values: Array) -> tuple[float, float]:
        """Exact 95 % interval of the share of green tokens."""
        return proportion_interval(len(values), round(float(values.sum())))


def _context_seeds(green_list: GreenList, ids: Array, width: int) -> tuple[int, Array]:
    """Return the first position with a context, and the seeds from there on [L - first]."""
    if len(ids) <= width:
        return len(ids), np.zeros(0, dtype=np.uint32)
    windows = np.lib.stride_tricks.sliding_window_view(ids, width + 1)
    return width, green_list.seeds(windows[:, :width], windows[:, width:])[:, 0]


@dataclass
class WatermarkDetectorOutput:
    """Result of the documented detector, one array [N] per field."""

    num_tokens_scored: Array | None = None
    num_green_tokens: Array | None = None
    green_fraction: Array | None = None
    z_score: Array | None = None
    p_value: Array | None = None
    prediction: Array | None = None
    confidence: Array | None = None


class WatermarkDetector:
    """The documented green list detector: counts green tokens and returns their z-score.

    It needs the settings the text was marked with. `device` has no effect: the lists are the same on every
    device. The p-value is exact (binomial). With `ignore_repeated_ngrams`, each sequence of `context_width`
    tokens and the next one counts once; otherwise repeats count every time, and a repetitive unmarked text
    may appear marked. Padding on either side is not text: the config's pad token, else its end tokens.
    Up to `max_cache_size` green lists are cached between calls.
    """

    def __init__(
        self,
        model_config: Any,
        device: str | torch.device,
        watermarking_config: WatermarkingConfig | Mapping[str, Any],
        ignore_repeated_ngrams: bool = False,
        max_cache_size: int = 128,
    ) -> None:
        torch.device(device)
        if type(max_cache_size) is not int or max_cache_size < 0:
            raise InputError("max_cache_size", "must be an integer >= 0", max_cache_size)
        settings = as_watermarking_config(_to_mapping(watermarking_config))
        if not isinstance(settings, WatermarkingConfig):
            raise InputError("watermarking_config", "must be the settings of a green list", settings)
        warn_if_public(settings)
        self.settings = replace(settings)  # the user may update the given one
        self.ignore_repeated_ngrams = ignore_repeated_ngrams
        self.bos_token_id = _start_token_id(model_config)
        self._padding = PaddingTokens.of(model_config)
        self._green_list = GreenList(settings, _required_vocab_size(model_config), max_cache_size)
        # Length of an n-gram: the context that must precede a scored token, and the token.
        self._ngram_size = settings.context_width + (settings.seeding_scheme == "lefthash")

    def __call__(
        self, input_ids: Tensor, z_threshold: float = 3.0, return_dict: bool = False
    ) -> WatermarkDetectorOutput | Array:
        """Whether each text [N, L] is marked [N]; padding and a leading start token are ignored.

        A padded text without a whole n-gram has no score: its z-score is NaN and it is not marked.
        """
        ids = torch.as_tensor(input_ids).cpu().numpy()
        if ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer) or not len(ids):
            raise InputError("input_ids", "must be token ids [batch, length]", input_ids)
        rows = list(ids.astype(np.int64))
        texts = [row[slice(*self._padding.text_span(row))] for row in rows]
        texts = [text[int(len(text) > 0 and text[0] == self.bos_token_id) :] for text in texts]
        width = ids.shape[1] - int(any(len(row) > 0 and row[0] == self.bos_token_id for row in rows))
        if width <= self.settings.context_width:
            must = f"must have more than {self.settings.context_width} tokens per text, the context width"
            raise InputError("input_ids", must, input_ids, "a leading start token does not count")
        scored, hits = self._count_green(texts)
        share = self.settings.greenlist_ratio
        with np.errstate(invalid="ignore"):  # 0 / 0 where nothing is scored
            z_score = (hits - share * scored) / np.sqrt(scored * share * (1.0 - share))
            green_fraction = hits / scored
        prediction: Array = z_score > z_threshold
        if not return_dict:
            return prediction
        green_prob = self._green_list.num_green / self._green_list.vocab_size
        counts = zip(scored.tolist(), hits.tolist(), strict=True)
        p_value = np.array([binomial_tail(int(count), int(green), green_prob) for count, green in counts])
        return WatermarkDetectorOutput(
            num_tokens_scored=scored,
            num_green_tokens=hits,
            green_fraction=green_fraction,
            z_score=z_score,
            p_value=p_value,
            prediction=prediction,
            confidence=1.0 - p_value,
        )

    def _count_green(self, texts: list[Array]) -> tuple[Array, Array]:
        """Return the number of scored tokens and of green ones per text [N]."""
        size = self._ngram_size
        ngrams = [
            np.lib.stride_tricks.sliding_window_view(text, size)
            if len(text) >= size
            else np.zeros((0, size), dtype=np.int64)
            for text in texts
        ]
        if self.ignore_repeated_ngrams:
            ngrams = [np.unique(windows, axis=0) for windows in ngrams]
        scored = np.array([len(windows) for windows in ngrams])
        flat = np.concatenate(ngrams)
        seeds = self._green_list.seeds(flat[:, :-1], flat[:, -1:])[:, 0]
        green = self._green_list.is_green(seeds, flat[:, -1])
        totals = np.concatenate(([0.0], np.cumsum(green, dtype=np.float64)))
        stops = np.cumsum(scored)
        return scored.astype(np.float64), totals[stops] - totals[stops - scored]


def _to_mapping(settings: Any) -> Any:
    """Convert settings of another library to a dict, if they have `to_dict`."""
    if isinstance(settings, WatermarkingConfig | Mapping):
        return settings
    if not callable(to_dict := getattr(settings, "to_dict", None)):
        raise InputError("watermarking_config", "must be a WatermarkingConfig or a dict", settings)
    return to_dict()


def config_vocab_size(config: Any) -> int | None:
    """Vocabulary size in a model config, None if it has none."""
    if callable(get_text_config := getattr(config, "get_text_config", None)):
        config = get_text_config()
    size = getattr(config, "vocab_size", None)
    return size if isinstance(size, int) and not isinstance(size, bool) else None


def _required_vocab_size(config: Any) -> int:
    size = config_vocab_size(config)
    if size is None:
        raise InputError("model_config", "must have a `vocab_size`", config)
    return size


def _start_token_id(config: Any) -> int | None:
    """The token that starts every text of the model, if there is one."""
    name = "decoder_start_token_id" if getattr(config, "is_encoder_decoder", False) else "bos_token_id"
    token: int | None = getattr(config, name, None)
    return token
