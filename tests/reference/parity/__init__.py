"""Live parity with the reference, token for token, on tiny models of every architecture and on stories15m."""
