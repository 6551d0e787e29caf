"""A plain HTTP client on sockets of its own, for what client libraries hide."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

__all__ = ["Answer", "request", "stream"]


class Answer(NamedTuple):
    """A response."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def request(
    port: int,
    method: str,
    path: str,
    body: Any = None,
    *,
    key: str | None = None,
    headers: Mapping[str, str] | None = None,
    timeout: float = 120,
) -> Answer:
    """Send a request; a body that is no bytes is sent as JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        _send(connection, method, path, body, key, headers)
        response = connection.getresponse()
        found = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, found, response.read())
    finally:
        connection.close()


def stream(port: int, path: str, body: Any, *, key: str | None = None, timeout: float = 120) -> Iterator[Any]:
    """The events of a streamed response, as JSON values; closing the iterator closes the connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        _send(connection, "POST", path, body, key, None)
        with connection.getresponse() as response:  # it may hold the socket on its own
            if response.status != 200:
                raise RuntimeError(f"{response.status}: {response.read()[:500]!r}")
            for line in response:
                if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                    yield json.loads(line[6:])
                elif line.startswith(b"data: [DONE]"):
                    yield "[DONE]"
    finally:
        connection.close()


def _send(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: Any,
    key: str | None,
    headers: Mapping[str, str] | None,
) -> None:
    sent = {} if body is None else {"Content-Type": "application/json"}
    if key is not None:
        sent["Authorization"] = f"Bearer {key}"
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, path, data, {**sent, **(headers or {})})
