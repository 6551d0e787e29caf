"""Decoding strategies: how a step chooses the next tokens of each row."""
