"""Temperatures that are found for each line."""

from __future__ import annotations

import torch
from torch import Tensor

from descant.core.context import Context
from descant.decoding.processors.base import LogitsProcessor, check_number
from descant.errors import InputError

__all__ = ["DynamicTemperatureLogitsWarper"]

MIN_TEMPERATURE = 1e-6  # below it a quotient could overflow, and only the best has a chance anyway


class DynamicTemperatureLogitsWarper(LogitsProcessor):
    """Divides the scores by a temperature that grows with their entropy (dynamic temperature, by kalomaze).

    From `temperature - dynamic_temperature_range`, but not below 0, where one token is certain, to
    `temperature + dynamic_temperature_range` where all that are possible are equally likely, by the share
    of the largest entropy to the power of `dynamic_temperature_exponent`. It stands in the place of the
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
        """The scores scaled; a single candidate stays as it is."""
        middle, reach = context.param("temperature"), context.param("dynamic_temperature_range")
        low, high = (middle - reach).clamp(min=0.0), middle + reach
        count = (scores > -torch.inf).sum(-1, keepdim=True)
        entropy = torch.special.entr(scores.softmax(-1)).sum(-1, keepdim=True)
        share = (entropy / count.clamp(min=2).log()).clamp(0.0, 1.0)
        heat = low + (high - low) * share ** context.param("dynamic_temperature_exponent")

        best = scores.amax(-1, keepdim=True)
        frozen = scores.masked_fill(scores < best, -torch.inf)
        scaled = torch.where(heat < MIN_TEMPERATURE, frozen, scores / heat)
        return torch.where(count > 1, scaled, scores)
