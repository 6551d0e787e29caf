"""The log of a server: one line for each request, without prompts and keys."""

from __future__ import annotations

import json
import sys
import time
import traceback
from typing import Any, Final, TextIO

from descant.serve.exchange import Exchange

__all__ = ["AccessLog"]

_QUIET_PATHS: Final = frozenset({"/health", "/ready", "/metrics"})


class AccessLog:
    """Writes the log to a text stream: as JSON, or for people."""

    def __init__(self, stream: TextIO | None = None, *, is_json: bool = True) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._format = json.dumps if is_json else _text_line

    def event(self, name: str, **values: Any) -> None:
        """Write an event of the server itself."""
        self._write({"event": name, **values})

    def write(self, method: str, path: str, exchange: Exchange, seconds: float) -> None:
        """Write what became of a request; probes are left out unless they fail."""
        if path in _QUIET_PATHS and exchange.status == 200:
            return
        entry: dict[str, Any] = {
            "event": "request",
            "id": exchange.id,
            "key": None if exchange.key is None else exchange.key.name,
            "method": method,
            "path": path,
            "status": exchange.status,
            "seconds": round(seconds, 4),
        }
        if exchange.num_prompt_tokens:
            entry |= {"prompt_tokens": exchange.num_prompt_tokens, "output_tokens": exchange.num_new_tokens}
        if exchange.finish_reasons:
            entry["finish"] = exchange.finish_reasons[:8]
        if exchange.error_code is not None:
            entry["error"] = exchange.error_code
        if exchange.is_disconnected:
            entry["disconnected"] = True
        if exchange.prompt is not None:
            entry["prompt"] = exchange.prompt
        if exchange.failure is not None:
            # Where it happened; the text of an error may quote a prompt.
            frames = traceback.extract_tb(exchange.failure.__traceback__)[-8:]
            entry["failure"] = type(exchange.failure).__name__
            entry["frames"] = [f"{frame.name}:{frame.lineno}" for frame in frames]
        self._write(entry)

    def _write(self, entry: dict[str, Any]) -> None:
        self._stream.write(self._format({"time": round(time.time(), 3), **entry}) + "\n")
        self._stream.flush()


def _text_line(entry: dict[str, Any]) -> str:
    """An entry for people; a text with spaces is written as JSON, so that it cannot look like other lines."""
    rest = dict(entry)
    clock, event = time.strftime("%H:%M:%S", time.localtime(rest.pop("time"))), rest.pop("event")
    if event == "ready":
        lines = [f"Serving {_shown(rest['model'])}"]
        for url in rest["urls"]:
            lines += [f"  API:  {url}/v1", *([f"  Page: {url}/"] if rest["page"] else [])]
        return "\n".join([*lines, "Ctrl-C ends it after the requests that run, a second one at once."])
    words = [clock, event]
    if event == "request":
        del rest["id"]
        words = [clock, *(str(rest.pop(name)) for name in ("method", "path", "status"))]
        words.append(f"{rest.pop('seconds'):.2f}s")
    return " ".join([*words, *(f"{name}={_shown(one)}" for name, one in rest.items() if one is not None)])


def _shown(value: Any) -> str:
    is_plain = isinstance(value, str) and value.isprintable() and " " not in value
    return value if is_plain else json.dumps(value)
