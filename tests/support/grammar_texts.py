"""Texts of a grammar without a model: each token is drawn from those that are permitted."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from descant.config.generation_config import FIELDS
from descant.decoding.grammars.backend import CompiledGrammar, MatcherPool, fill_masks
from descant.decoding.grammars.compiler import compile_grammar

BACKENDS = ("llguidance", "xgrammar")


def compiled(tokenizer: Any, backend: str = "auto", **spec: Any) -> CompiledGrammar:
    """The compiled grammar of a spec."""
    return compile_grammar(FIELDS["grammar"].parse({**spec, "backend": backend}), tokenizer)


def masks(pool: MatcherPool, texts: list[list[int]]) -> np.ndarray:
    """Which tokens may follow each text [N, V]."""
    packed = np.empty((len(texts), pool.grammar.backend.mask_width), np.uint32)
    fill_masks([pool] * len(texts), [np.array(text, dtype=np.int64) for text in texts], packed)
    bits = np.unpackbits(packed.view(np.uint8), axis=1, bitorder="little")
    return bits[:, : len(pool.grammar.backend.vocabulary.tokens)].astype(bool)


def random_text(pool: MatcherPool, rng: random.Random, end: int, limit: int = 400) -> tuple[bytes, str]:
    """A text of the language, and why it ended: "end", "length", or "dead" where nothing may follow."""
    vocabulary, ids = pool.grammar.backend.vocabulary.tokens, []
    for _ in range(limit):
        permitted = np.flatnonzero(masks(pool, [ids])[0])
        if not len(permitted):
            return b"".join(vocabulary[token] for token in ids), "dead"
        token = int(permitted[rng.randrange(len(permitted))])
        if token == end or (end in permitted and rng.random() < 0.3):
            return b"".join(vocabulary[token] for token in ids), "end"
        ids.append(token)
    return b"".join(vocabulary[token] for token in ids), "length"
