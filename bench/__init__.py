"""Benchmarks: Descant's generate(), transformers' own and a baseline loop, in one run."""
