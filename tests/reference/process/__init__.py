"""The reference: transformers 4.52.4 in its own venv and process, called over a pipe."""
