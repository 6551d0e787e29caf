"""Error rates of the watermark detectors on real text, by edit and by decoding method."""
