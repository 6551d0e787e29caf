"""Blocks of slots: the pool of a paged cache, and the slots that rows write."""
