"""The CPU time of processes: of those that run, of those that have ended, and of their threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

from bench.process_time import ProcessWatch, process_family, thread_seconds

BUSY = "import time\nwhile time.process_time() < {}: pass\n"


def burn(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_a_watch_keeps_what_it_has_seen_of_a_process_that_has_ended():
    with ProcessWatch(os.getpid(), pause=0.05) as watch:
        began = watch.seconds()
        command = [sys.executable, "-c", BUSY.format(0.6) + "input()"]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
            while watch.seconds() - began < 0.5:
                assert child.poll() is None
                time.sleep(0.05)
            assert child.pid in list(process_family(os.getpid()))
            child.kill()
        assert watch.seconds() - began >= 0.5
        assert child.pid not in list(process_family(os.getpid()))
        assert watch.own_seconds() < watch.seconds()


def test_threads_are_counted_one_by_one():
    names: list[str] = []

    def work() -> None:
        names.append(str(threading.get_native_id()))
        burn(0.3)
        ready.set()
        ended.wait()

    ready, ended = threading.Event(), threading.Event()
    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()
    found = thread_seconds(os.getpid())
    ended.set()
    thread.join()
    assert 0.2 < found[names[0]] < 1
    assert found.keys() <= thread_seconds(os.getpid(), descendants=True).keys() | {names[0]}
