"""Traces: record every step of a run, replay it without the model, draw it."""
