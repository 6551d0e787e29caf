"""Errors of requests on their way from vLLM's worker to the engine that has sent them."""

from __future__ import annotations

import logging
from typing import Final

from descant.errors import RowError

REQUEST_ID_KEY: Final = "descant_request"  # of `SamplingParams.extra_args`: the name of such a request
# By name, where vLLM runs in the process of the engine. In a worker's own process nothing takes them.
FAILURES: Final[dict[str, RowError]] = {}

_LOG: Final = logging.getLogger(__name__)
_MAX_FAILURES: Final = 1024


def report_failure(name: str | None, error: RowError) -> None:
    """Report why a request ends early: vLLM has no way to fail a request from inside a step."""
    _LOG.error("a request must have a token to choose; it ends with an end token: %s", error)
    if name is not None:
        while len(FAILURES) >= _MAX_FAILURES:
            FAILURES.pop(next(iter(FAILURES)))
        # Without its cause, whose frames refer to the batch.
        FAILURES[name] = RowError(str(error), error.request)
