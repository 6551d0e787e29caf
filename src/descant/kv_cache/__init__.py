"""KV caches, recurrent state, the prefix cache, and attention over shared prefixes."""
