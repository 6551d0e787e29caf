"""One generation on several processes."""
