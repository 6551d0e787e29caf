"""Models around models: wrappers of other libraries, adapters, fingerprints of weights."""
