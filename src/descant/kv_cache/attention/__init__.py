"""What attention reads of a store: packed rows, shared prefixes, attention scores."""
