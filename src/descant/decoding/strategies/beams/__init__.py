"""Beams: searches that keep several hypotheses of a request side by side."""
