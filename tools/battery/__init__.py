"""Attacks on the server: `python -m tools.battery NAME` prints a line of figures, and fails with 1."""
