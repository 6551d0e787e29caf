"""Strategies: what changes the choice."""
