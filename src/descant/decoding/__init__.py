"""Decoding methods: processors, strategies, drafters, guidance, constraints, stopping, watermarks."""
