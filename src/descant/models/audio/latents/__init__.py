"""Models of sound that decode a vector of numbers in a step."""
