"""The laws, run on everything that exists."""
