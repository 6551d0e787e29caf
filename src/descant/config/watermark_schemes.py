"""The watermarking schemes that a user can name."""

from __future__ import annotations

from typing import Final

__all__ = ["SCHEMES"]

SCHEMES: Final = ("green", "selfhash", "synthid", "gumbel")
