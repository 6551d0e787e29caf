"""Side by side in one run: Descant's generate(), transformers' own, and the bare loop below both."""
