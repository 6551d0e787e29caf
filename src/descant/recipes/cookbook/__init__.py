"""Recipes that ship with Descant, used by name: `generate(..., recipe="bayes-risk")`."""
