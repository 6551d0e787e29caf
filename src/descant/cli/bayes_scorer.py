"""What a trained Bayesian detector says of a text, beside the test that needs no training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from descant.decoding.watermark.detection import Detection
from descant.decoding.watermark.schemes import BaseWatermarkingConfig, SynthIDTextWatermarkingConfig
from descant.decoding.watermark.schemes.keys import fingerprint
from descant.decoding.watermark.schemes.synthid import get_tournament, repetition_mask
from descant.errors import InputError

__all__ = ["BayesianScorer", "Posterior"]


@dataclass(frozen=True)
class Posterior:
    """How likely a text is marked, if half of all texts were, and what few unmarked texts exceed."""

    value: float
    threshold: float | None

    def to_dict(self) -> dict[str, Any]:
        """As JSON knows it."""
        marked = None if self.threshold is None else self.value > self.threshold
        return {"posterior": self.value, "threshold": self.threshold, "marked": marked}

    def __str__(self) -> str:
        if self.threshold is None:
            return f"posterior {self.value:.4f}"
        return f"posterior {self.value:.4f} (1 % of unmarked texts are above {self.threshold:.4f})"


class BayesianScorer:
    """A trained detector, and the key among those given that it was trained for."""

    def __init__(self, folder: str, keys: Mapping[str, BaseWatermarkingConfig]) -> None:
        from descant.models.bayesian_detector import load_detector  # slow to load, and few commands need it

        self.model = load_detector(folder)
        trained = self.model.config.key_fingerprint
        fit = [
            one
            for one in keys.values()
            if isinstance(one, SynthIDTextWatermarkingConfig) and trained in (None, fingerprint(one))
        ]
        if len(fit) != 1:
            must = "must be the detector of one of the keys" + (f", {trained}" if trained else "")
            got = [f"{name} ({one.scheme}, {fingerprint(one)})" for name, one in keys.items()]
            raise InputError("bayes", must, got, "give that key with --key")
        [self.settings] = fit
        depth = len(self.settings.keys)
        if depth != self.model.watermarking_depth:
            must = f"must be a detector of {depth} rounds, as the key has"
            raise InputError("bayes", must, self.model.watermarking_depth)

    def posterior(self, detection: Detection) -> Posterior:
        """The answer about a text in the reading of its detection, the prompt left out."""
        asked = get_tournament(self.settings)
        ids = torch.tensor([detection.ids[len(detection.ids) - detection.tokens :]], dtype=torch.long)
        if ids.shape[1] > asked.context_size:
            contexts = asked.context_hashes(ids[:, :-1])
            mask = ~repetition_mask(contexts, self.settings.context_history_size)
            coins = asked.g_values(contexts, ids[:, asked.context_size :])
        else:  # nothing to see: the prior remains
            coins, mask = torch.zeros(1, 0, asked.depth), torch.zeros(1, 0, dtype=torch.bool)
        with torch.no_grad():
            found = torch.sigmoid(self.model.log_odds(coins, mask))
        return Posterior(float(found), self.model.config.threshold)
