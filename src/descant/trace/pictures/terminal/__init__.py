"""Pictures of a trace for a terminal."""
