"""Worked recipes, each a page: to use by name, `generate(..., recipe="bayes-risk")`, and to learn from."""
