"""Bytes that are no HTTP, or that come slowly and never end: the server still answers, and holds nothing."""

from __future__ import annotations

import json
import random
import socket
import time
from collections import Counter

from tests.support.http_client import request
from tools.battery.client import COMPLETIONS
from tools.battery.outcome import Outcome, Size
from tools.battery.subject import completion, running_server

__all__ = ["FULL", "SMALL", "run"]

FULL, SMALL = Size(5000), Size(150)  # broken requests
BODY = json.dumps(completion(max_tokens=2, temperature=0)).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
HAND_MADE = (
    b"", b"\r\n" * 100, b"\x00" * 1000, b"GET", b"GET / HTTP/9.9\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 2_000_000 + b"\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: a\r\n" * 50_000 + b"\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: a\r\n b\r\n\r\n",
    HEAD + b"Content-Length: -1\r\n\r\n" + BODY,
    HEAD + b"Content-Length: 99999999999999999999999\r\n\r\n" + BODY,
    HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n" + BODY,
    HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    HEAD + b"Content-Length: 1000000000\r\n\r\n" + BODY,
    CHUNKED + b"%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n",
    CHUNKED + b"FFFFFFFFFFFFFFFFFF\r\n" + BODY, CHUNKED + b"zz\r\n" + BODY, CHUNKED + b"-5\r\n" + BODY,
    CHUNKED + b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n",
    CHUNKED + b"5;ext=" + b"x" * 100_000 + b"\r\nhello\r\n0\r\n\r\n",
    CHUNKED + b"0\r\nTrailer: x\r\n\r\n", CHUNKED + (b"100000\r\n" + b" " * 2**20 + b"\r\n") * 6,
    WHOLE * 20, WHOLE + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200,
    b"GET /%ff%00%2e%2e/..//etc/passwd?x=%zz#a HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET http://evil.example/health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"TRACE / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /health HTTP/1.1\r\n\r\n", b"GET /health HTTP/1.0\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nUpgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n",
    HEAD + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY,
    HEAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY,
    HEAD + b"Authorization: " + b"\xff" * 300 + b"\r\nContent-Length: 2\r\n\r\n{}",
    HEAD + b"X-Request-Id: a\x00b\r\nContent-Length: 2\r\n\r\n{}",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x55" * 500,
)  # fmt: skip


def run(size: Size) -> Outcome:
    """Send them all, then see whether the server still answers."""
    outcome, rng = Outcome(), random.Random(2)
    # A short limit, so that what never ends is seen to end.
    with running_server("--kv-memory", "0.05", "--max-receive-seconds", "3") as server:
        expected = request(server.port, "POST", COMPLETIONS, json.loads(BODY)).json["choices"]
        memory = rss(server.process.pid)
        slow = [_open_slowly(server.port, number) for number in range(min(200, size.count))]
        statuses: Counter[str] = Counter()
        for data in [*HAND_MADE, *(_mutated(rng) for _ in range(size.count))]:
            statuses[_send(server.port, data, rng)] += 1
            if sum(statuses.values()) % 50 == 0:
                outcome.check(request(server.port, "GET", "/health", timeout=10).status == 200, "not healthy")
        answer = request(server.port, "POST", COMPLETIONS, json.loads(BODY))
        outcome.check(answer.status == 200 and answer.json["choices"] == expected, f"{answer}")
        outcome.check(not any(status.startswith("5") for status in statuses), f"{statuses}")
        outcome.check(_are_all_closed(slow, 30), "connections whose request never ends stay open")
        failed = [entry for entry in server.entries if "failure" in entry]
        outcome.check(not failed and not server.lines, f"log: {failed[:2]} {''.join(server.lines)[-2500:]}")
        growth = (rss(server.process.pid) - memory) / 2**20
        outcome.check(growth < 150, f"the server has grown by {growth:.0f} MB")
        outcome.check(server.terminate(30) == 0, "the exit code is not 0")
        outcome.figures = {
            "broken": sum(statuses.values()),
            "slow": len(slow),
            "statuses": dict(sorted(statuses.items())),
            "growth_mb": growth,
        }
    return outcome


def rss(pid: int) -> int:
    """The bytes of memory that a process has."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * 4096


def _mutated(rng: random.Random) -> bytes:
    """A request with some bytes changed, left out, or doubled."""
    data = bytearray(rng.choice((WHOLE, WHOLE, CHUNKED + b"%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n")))
    for _ in range(rng.randint(1, 6)):
        at, kind = rng.randrange(len(data)), rng.randrange(4)
        if kind == 0:
            data[at] = rng.randrange(256)
        elif kind == 1:
            del data[at : at + rng.randint(1, 20)]
        elif kind == 2:
            data[at:at] = data[at : at + rng.randint(1, 40)]
        else:
            data[at:at] = rng.randbytes(rng.randint(1, 8))
        data = data or bytearray(b"x")
    return bytes(data)


def _send(port: int, data: bytes, rng: random.Random) -> str:
    """Send bytes, in one piece or some; returns the status of the answer, or "closed" or "silent"."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.settimeout(0.5)
        try:
            cut = rng.randrange(len(data) + 1) if rng.random() < 0.3 else len(data)
            connection.sendall(data[:cut])
            connection.sendall(data[cut:])
            connection.shutdown(socket.SHUT_WR)
            found = connection.recv(4096)
        except TimeoutError:
            return "silent"
        except OSError:
            return "closed"
    return found[9:12].decode("latin-1") if found.startswith(b"HTTP/1.1 ") else "closed"


def _open_slowly(port: int, number: int) -> socket.socket:
    """A connection with part of a request, which never comes to its end."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=10)
    parts = (b"", b"POST /v1/compl", HEAD, HEAD + b"Content-Length: 500\r\n\r\n{", CHUNKED + b"1\r\n{\r\n")
    connection.sendall(parts[number % len(parts)])
    return connection


def _are_all_closed(connections: list[socket.socket], seconds: float) -> bool:
    """Whether the server ends all connections within some seconds."""
    end = time.monotonic() + seconds
    for connection in connections:
        connection.settimeout(max(0.1, end - time.monotonic()))
        try:
            while connection.recv(4096):
                pass
        except TimeoutError:
            return False
        except OSError:
            pass
        connection.close()
    return True
