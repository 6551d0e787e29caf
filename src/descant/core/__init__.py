"""The table of rows, the records of a step, the interfaces, and counter-based random numbers."""
