"""Pictures of a trace as SVG files."""
