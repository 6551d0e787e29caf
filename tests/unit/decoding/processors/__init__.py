"""Processors called by hand: against the reference, against simple code, and with invalid inputs."""
