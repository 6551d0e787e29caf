"""The face of transformers 4 around a model: its caches, outputs, configs and custom loops."""
