"""Logits processors and warpers, one module per family."""
