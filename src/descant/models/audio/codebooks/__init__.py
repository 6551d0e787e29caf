"""Models of sound that decode a frame of codes in a step."""
