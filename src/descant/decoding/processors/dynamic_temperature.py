"""Dynamic temperature: a temperature computed from the entropy of each row."""

from __future__ import annotations

import torch
from torch import Tensor

from descant.core.context import Context
from descant.decoding.processors.base import LogitsProcessor, check_number
from descant.errors import InputError

__all__ = ["DynamicTemperatureLogitsWarper"]

MIN_TEMPERATURE = 1e-6  # below it the division could overflow, so only the best token is kept


class DynamicTemperatureLogitsWarper(LogitsProcessor):
    """Divides the scores by a temperature that grows with their entropy (dynamic temperature, by kalomaze).

    The temperature is `temperature - dynamic_temperature_range`, at least 0, if one token is certain, and
    `temperature + dynamic_temperature_range` if all unmasked tokens are equally likely. In between it grows
    with the share of the maximum entropy, raised to `dynamic_temperature_exponent`. It replaces the fixed
    temperature. Origin: llama.cpp, pull request 4972.
    """

    config_fields = ("temperature", "dynamic_temperature_range", "dynamic_temperature_exponent")

    def __init__(
        self,
        temperature: float,
        dynamic_temperature_range: float,
        dynamic_temperature_exponent: float = 1.0,
    ) -> None:
        if check_number("temperature", temperature, 0.0) <= 0:
            raise InputError(
                "temperature", "must be > 0", temperature, "for greedy search use do_sample=False"
            )
        self.temperature = float(temperature)
        self.dynamic_temperature_range = float(
            check_number("dynamic_temperature_range", dynamic_temperature_range, 0.0)
        )
        self.dynamic_temperature_exponent = float(
            check_number("dynamic_temperature_exponent", dynamic_temperature_exponent, 0.0)
        )

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Scale the scores; a row with a single candidate is unchanged."""
        center, half_range = context.param("temperature"), context.param("dynamic_temperature_range")
        low, high = (center - half_range).clamp(min=0.0), center + half_range
        count = (scores > -torch.inf).sum(-1, keepdim=True)
        entropy = torch.special.entr(scores.softmax(-1)).sum(-1, keepdim=True)
        share = (entropy / count.clamp(min=2).log()).clamp(0.0, 1.0)
        temperature = low + (high - low) * share ** context.param("dynamic_temperature_exponent")

        best = scores.amax(-1, keepdim=True)
        greedy = scores.masked_fill(scores < best, -torch.inf)
        scaled = torch.where(temperature < MIN_TEMPERATURE, greedy, scores / temperature)
        return torch.where(count > 1, scaled, scores)
