"""Models of speech and sound."""
