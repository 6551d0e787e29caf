"""Adapters: the only place that imports transformers."""
