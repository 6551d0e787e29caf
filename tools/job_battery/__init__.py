"""Batteries of jobs: kills at random moments, and a comparison with runs that were not disturbed."""
