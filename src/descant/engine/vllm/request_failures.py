"""Errors of requests on their way from vLLM's worker to the engine that has sent them."""

from __future__ import annotations

from typing import Final

from descant.errors import DescantError

__all__ = ["FAILURES", "REQUEST_ID_KEY"]

REQUEST_ID_KEY: Final = "descant_request"  # of `SamplingParams.extra_args`: the name of such a request

# By name, where vLLM runs in the process of the engine.
FAILURES: Final[dict[str, DescantError]] = {}
