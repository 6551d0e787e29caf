"""Guidance: model wrappers that change the next-token distribution."""
