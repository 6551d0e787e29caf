"""The two layouts of rotary position embeddings."""

import numpy as np


def half_split_rotary(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection from interleaved rotary pairs to transformers' halves.  # [H*D, E]"""
    rows, width = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, width)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, width))
