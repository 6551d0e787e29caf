"""Recipes: third-party decoding methods, loaded only with explicit trust and pinned by hash."""
