"""Recipes: other people's decoding methods, loaded only when trusted, and run by the one loop."""
