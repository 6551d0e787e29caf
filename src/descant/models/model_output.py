"""The base class of output objects: transformers' ModelOutput, so that `isinstance` holds."""

from __future__ import annotations

from transformers.utils.generic import ModelOutput

__all__ = ["ModelOutput"]
