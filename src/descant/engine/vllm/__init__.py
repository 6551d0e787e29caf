"""vLLM under Descant: a plug-in that chooses vLLM's tokens, and an engine that runs requests on it."""
