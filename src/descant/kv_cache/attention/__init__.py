"""Reads of a store by attention: packed rows, shared prefixes, attention scores."""
