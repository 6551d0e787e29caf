"""Token text: token bytes, stop strings, banned phrases, token healing, detokenization, display."""
