"""Caches: what remembers."""
