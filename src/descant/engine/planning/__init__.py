"""From a config to a plan: strategy, processors, drafter, wrappers and cache."""
