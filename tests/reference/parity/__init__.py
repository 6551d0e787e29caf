"""Live parity with the oracle, token for token, on tiny models of every architecture and on stories15m."""
