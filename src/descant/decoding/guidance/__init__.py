"""Guidance: what wraps models and changes their distribution."""
