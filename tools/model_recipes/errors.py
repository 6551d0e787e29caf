"""The one error a model build raises on purpose."""


class ModelError(Exception):
    """A build that cannot go on; the text says what failed, what was got and what to do."""
