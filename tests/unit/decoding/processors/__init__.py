"""Processors by hand: against the reference, against slow and obvious code, and given what is wrong."""
