"""Pictures of a trace: as a page, as SVG and as text for a terminal."""
