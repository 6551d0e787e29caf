"""What a user calls: generate, stream, prefill, estimate, with their inputs, outputs and streamers."""
