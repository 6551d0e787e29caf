"""The server under Ray Serve: replicas that are replaced, and an end that loses nothing."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from tests.support.client_programs import ROOT, ClientEnvironment

PROGRAM = Path(__file__).parent / "clients" / "ray_program.py"


def test_a_killed_replica_loses_its_own_requests_and_is_replaced(model_folder, tmp_path):
    programs = ClientEnvironment(tmp_path)
    # Ray has sockets in it, whose paths must be short.
    files = tempfile.mkdtemp(prefix="ray")
    try:
        # What other tests use of the memory is no reason to kill a replica.
        env = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0"}
        env["PYTHONPATH"] = str(ROOT / "src")
        env["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"] = "descant.serve.ray_proxy.middlewares"
        printed = programs.run("python", PROGRAM, model_folder, files, env=env, timeout=500)
    finally:
        shutil.rmtree(files, ignore_errors=True)
    found = json.loads(printed.splitlines()[-1])
    kill = found["kill"]
    assert sum(kill["shares"]) == 8
    assert min(kill["shares"]) >= 1
    assert all(kill["lost_of_killed"])
    assert set(kill["errors_of_killed"]) == {"replica_died"}
    assert not any(kill["lost_of_other"])
    assert kill["later"] == [True] * 12
    assert kill["is_replaced"]
    assert found["drained"] == [True] * 4
