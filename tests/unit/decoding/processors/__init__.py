"""Processors by hand: against the oracle, against slow and obvious code, and given what is wrong."""
