"""Requests over HTTP: the server, what every request passes, keys and limits, errors, logs and metrics."""
