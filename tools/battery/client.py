"""A client that keeps its connection, and the tokens of a streamed answer."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from typing import Any

from tests.support.http_client import Answer, stream

__all__ = ["COMPLETIONS", "Client", "answered_tokens", "streamed_tokens"]

COMPLETIONS = "/v1/completions"


class Client:
    """One connection, made again when the server closes it."""

    def __init__(self, port: int, key: str | None = None, timeout: float = 120) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"

    def send(self, method: str, path: str, body: Any = None) -> Answer:
        """The answer to a request."""
        data = None if body is None else json.dumps(body).encode()
        for attempt in range(2):
            try:
                self._connection.request(method, path, data, self._headers)
                response = self._connection.getresponse()
                headers = {name.lower(): value for name, value in response.getheaders()}
                return Answer(response.status, headers, response.read())
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
                self._connection.close()
                if attempt:
                    raise
        raise AssertionError

    def complete(self, body: Any) -> Answer:
        """The answer to a request for completions."""
        return self.send("POST", COMPLETIONS, body)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def __del__(self) -> None:
        self.close()


def answered_tokens(answer: Answer) -> list[list[int]]:
    """The tokens of each choice of an answer."""
    return [choice["token_ids"] for choice in answer.json["choices"]]


def streamed_tokens(
    port: int, body: Any, *, is_cut: Callable[[int], bool] = lambda _: False
) -> list[list[int]] | None:
    """The tokens of each choice of a stream; None: it was cut, `is_cut` of the number of events."""
    tokens: dict[int, list[int]] = {}
    events = stream(port, COMPLETIONS, {**body, "stream": True})
    is_done = False
    for count, event in enumerate(events, 1):
        if is_cut(count):
            events.close()  # type: ignore[attr-defined]
            return None
        if event == "[DONE]":
            is_done = True
        elif "error" in event:
            raise RuntimeError(str(event))
        else:
            for choice in event["choices"]:
                tokens.setdefault(choice["index"], []).extend(choice["token_ids"])
    if not is_done:
        raise ConnectionError("the stream ended early")
    return [tokens[index] for index in sorted(tokens)]
