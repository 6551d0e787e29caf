"""Traces: what every step of a run saw and chose, kept, replayed and drawn."""
