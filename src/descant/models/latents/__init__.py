"""Models that predict a continuous latent in a step in place of a token."""
