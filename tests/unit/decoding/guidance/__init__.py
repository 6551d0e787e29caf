"""Tests of model wrappers."""
