"""Two replicas under Ray Serve: one is killed under load, then all end; prints what was seen as JSON.

Arguments: the model's folder and a folder for Ray's files.
"""

import http.client
import json
import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait

import ray
from ray import serve

from descant.serve.ray_app import RayArguments, build_app

BODY = {"model": "smol-draft", "prompt": "Once upon a time", "temperature": 0, "ignore_eos": True}


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


PORT = free_port()


class Stream:
    """One streamed completion, read in a thread of its own."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.status, self.process = 0, 0
        self.is_done = False
        self.error: str | None = None
        self.began = threading.Event()

    def read(self) -> "Stream":
        """Read to the end."""
        connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=120)
        body = json.dumps({**BODY, "max_tokens": self.num_tokens, "stream": True})
        try:
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            self.status = response.status
            self.process = int(response.getheader("x-served-by", ".0").rpartition(".")[2])
            for line in response:
                self.began.set()
                self.is_done = self.is_done or line.startswith(b"data: [DONE]")
                if line.startswith(b'data: {"error"'):
                    self.error = json.loads(line.removeprefix(b"data: "))["error"]["code"]
        except (http.client.HTTPException, OSError):
            pass  # a stream that was cut off
        finally:
            self.began.set()
            connection.close()
        return self


def start_streams(pool: ThreadPoolExecutor, count: int, num_tokens: int) -> tuple[list[Stream], list]:
    """Streams that have all begun, and their ends."""
    streams = [Stream(num_tokens) for _ in range(count)]
    ends = [pool.submit(one.read) for one in streams]
    for one in streams:
        one.began.wait()
    return streams, ends


def processes(pool: ThreadPoolExecutor) -> set[int]:
    """The replicas that answer."""
    ends = [pool.submit(Stream(2).read) for _ in range(4)]
    return {end.result().process for end in ends} - {0}


def wait_for_replicas(pool: ThreadPoolExecutor, killed: int = 0) -> set[int]:
    """Send requests until two replicas have answered, other than one that was killed."""
    began, found = time.monotonic(), set()
    while len(found) < 2:
        found |= processes(pool) - {killed}
        time.sleep(0.2)
        if time.monotonic() - began > 120:
            raise TimeoutError(f"only {len(found)} replicas answer")
    return found


def kill_one(pool: ThreadPoolExecutor) -> dict[str, object]:
    """Kill a replica while both have streams; other requests come all the time."""
    before = wait_for_replicas(pool)
    streams, ends = start_streams(pool, 8, 250)
    killed = streams[0].process
    began = time.monotonic()
    os.kill(killed, signal.SIGKILL)
    later = [pool.submit(Stream(4).read) for _ in range(12)]
    wait((*ends, *later))
    found = wait_for_replicas(pool, killed)
    return {
        "shares": [sum(one.process == process for one in streams) for process in before],
        "lost_of_killed": [not one.is_done for one in streams if one.process == killed],
        "errors_of_killed": [one.error for one in streams if one.process == killed],
        "lost_of_other": [not one.is_done for one in streams if one.process != killed],
        "later": [end.result().is_done for end in later],
        "is_replaced": bool(found - before),
        "seconds": round(time.monotonic() - began, 1),
    }


def drain(pool: ThreadPoolExecutor) -> list[bool]:
    """Whether streams that run end well when the application is deleted."""
    streams, ends = start_streams(pool, 4, 150)
    serve.delete("descant")
    wait(ends)
    return [one.is_done for one in streams]


def main() -> None:
    """Start Ray and Ray Serve, and run both parts."""
    folder, files = sys.argv[1:]
    began = time.monotonic()
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        _temp_dir=files,
        log_to_driver=False,
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": PORT})
        # As `serve run` gives them: texts.
        arguments = {"model": folder, "num_replicas": "2", "num_cpus": "0.5", "kv_memory": "0.25"}
        options = RayArguments.model_validate({**arguments, "allow_anonymous": "true"})
        serve.run(build_app(options), name="descant")
        found = {"start_seconds": round(time.monotonic() - began, 1)}
        with ThreadPoolExecutor(32) as pool:
            found["kill"] = kill_one(pool)
            found["drained"] = drain(pool)
    finally:
        serve.shutdown()
        ray.shutdown()
    print(json.dumps(found))


main()
