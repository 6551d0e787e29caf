"""The variables of Ray's processes in batteries and tests."""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["ray_environment"]


def ray_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of nodes and of the processes that connect to them."""
    return {
        **os.environ,
        "RAY_AUTH_MODE": "disabled",  # it would write a token into the home folder
        "RAY_USAGE_STATS_ENABLED": "0",
        # What other processes use of the memory is no reason to kill a worker.
        "RAY_memory_monitor_refresh_ms": "0",
        # Several nodes on one machine may need several objects of shared memory.
        "RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE": "1",
        **(extra or {}),
    }
