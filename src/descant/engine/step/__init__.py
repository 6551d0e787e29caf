"""One step of every method, its strategy groups and its faults."""
