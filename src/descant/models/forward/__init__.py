"""What a forward of a transformers model is fed with, and what it returns."""
