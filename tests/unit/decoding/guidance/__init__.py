"""Tests of what wraps models."""
