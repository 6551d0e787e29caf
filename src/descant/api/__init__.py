"""The calls of a user: generate, stream, prefill, estimate, with their inputs, outputs and streamers."""
