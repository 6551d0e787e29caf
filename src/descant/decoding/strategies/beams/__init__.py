"""Beam search: several hypotheses per request."""
