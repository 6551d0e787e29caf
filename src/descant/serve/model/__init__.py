"""A served model: its prompts, the parameters of requests, and their runs."""
