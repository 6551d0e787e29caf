"""Grammars: which texts a request may generate, on xgrammar or llguidance."""
