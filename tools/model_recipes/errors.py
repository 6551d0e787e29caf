"""The one error a model build raises on purpose."""


class ModelError(Exception):
    """A build that cannot continue; the text says what failed, what was found and what to do."""
