"""Inputs and outputs of a forward of a transformers model."""
