"""Stores of keys, values and states, each with the interface `KVCache`."""
