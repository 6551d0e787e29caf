"""The real scheduler under a virtual clock: invariants over random schedules, and load sweeps."""
