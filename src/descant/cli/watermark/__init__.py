"""`descant watermark`: detect watermarks in texts, create keys, and train detectors."""
