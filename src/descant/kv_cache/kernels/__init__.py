"""Attention kernels for decode steps and packed rows."""
