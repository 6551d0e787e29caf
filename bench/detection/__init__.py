"""How often the detectors are right: error rates, robustness and rows, on real text."""
