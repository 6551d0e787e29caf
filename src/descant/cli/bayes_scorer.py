"""Posterior of a trained Bayesian watermark detector."""

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
    """The probability that a text is watermarked, given a prior of 1/2, and the detector's threshold."""

    value: float
    threshold: float | None

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        marked = None if self.threshold is None else self.value > self.threshold
        return {"posterior": self.value, "threshold": self.threshold, "marked": marked}

    def __str__(self) -> str:
        if self.threshold is None:
            return f"posterior {self.value:.4f}"
        return f"posterior {self.value:.4f} (1 % of unmarked texts are above {self.threshold:.4f})"


class BayesianScorer:
    """A trained detector with its key."""

    def __init__(self, folder: str, keys: Mapping[str, BaseWatermarkingConfig]) -> None:
        from descant.models.bayesian_detector import load_detector  # slow to import

        self.model = load_detector(folder)
        trained = self.model.config.key_fingerprint
        matching = [
            settings
            for settings in keys.values()
            if isinstance(settings, SynthIDTextWatermarkingConfig)
            and trained in (None, fingerprint(settings))
        ]
        if len(matching) != 1:
            requirement = "must be the detector of one of the keys" + (f", {trained}" if trained else "")
            given_keys = [
                f"{name} ({settings.scheme}, {fingerprint(settings)})" for name, settings in keys.items()
            ]
            raise InputError("bayes", requirement, given_keys, "give that key with --key")
        [self.settings] = matching
        depth = len(self.settings.keys)
        if depth != self.model.watermarking_depth:
            requirement = f"must be a detector of {depth} rounds, as the key has"
            raise InputError("bayes", requirement, self.model.watermarking_depth)

    def posterior(self, detection: Detection) -> Posterior:
        """The posterior of a detected text, without its prompt."""
        tournament = get_tournament(self.settings)
        ids = torch.tensor([detection.ids[len(detection.ids) - detection.tokens :]], dtype=torch.long)
        if ids.shape[1] > tournament.context_size:
            contexts = tournament.context_hashes(ids[:, :-1])
            mask = ~repetition_mask(contexts, self.settings.context_history_size)
            g_values = tournament.g_values(contexts, ids[:, tournament.context_size :])
        else:  # too short: the prior remains
            g_values, mask = torch.zeros(1, 0, tournament.depth), torch.zeros(1, 0, dtype=torch.bool)
        with torch.no_grad():
            probability = torch.sigmoid(self.model.log_odds(g_values, mask))
        return Posterior(float(probability), self.model.config.threshold)
