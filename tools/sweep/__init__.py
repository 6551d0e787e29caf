"""The sweep: every generative architecture of transformers, tiny and random, compared with Descant."""
