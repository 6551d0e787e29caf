"""Drafters for speculative decoding, and their acceptance statistics."""
