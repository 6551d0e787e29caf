"""Models from files: weights, GGUF, sound models."""
