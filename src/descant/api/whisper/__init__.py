"""Whisper: short-form and long-form transcription."""
