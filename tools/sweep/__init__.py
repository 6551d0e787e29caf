"""The sweep: every generative architecture of transformers, tiny and random, decoded by both."""
