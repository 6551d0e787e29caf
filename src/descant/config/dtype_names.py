"""The dtypes of weights that a user can name."""

from __future__ import annotations

from typing import Final

DTYPES: Final = ("auto", "float32", "bfloat16", "float16")
