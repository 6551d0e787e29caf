"""The reference: transformers 4.52.4 in a venv and a process of its own, asked over a pipe."""
