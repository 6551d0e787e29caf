"""Faster forwards of the same values: compiled layers, prepacked weights, packed rows."""
