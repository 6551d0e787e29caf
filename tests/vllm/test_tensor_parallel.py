"""Two processes that share a model, each with the plug-in: the tokens of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.support import pretrained
from tests.vllm.engines import STATEFUL, Case, merged, vllm_tokens

MODEL = "stories15m"  # with an even number of heads
# One core each: vLLM would give each process a NUMA node of its own.
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
PROGRAM = """
import json, sys
from tests.vllm.engines import Engines, vllm_tokens
from tests.vllm.test_tensor_parallel import MODEL, cases
if __name__ == "__main__":
    llm = Engines(lambda _: None)(MODEL, tensor_parallel_size=2)
    print(json.dumps(vllm_tokens(llm, cases())))
"""


def cases():
    """Requests with states, and a greedy one."""
    seeded = [
        Case([1, 9038 + number, 2501], merged(**fields, do_sample=True, seed=number, max_new_tokens=24))
        for number, fields in enumerate(STATEFUL)
    ]
    greedy = Case([1, 9038, 2501, 263], merged(repetition_penalty=1.3, max_new_tokens=24))
    return [*seeded, greedy]


def test_tokens_of_two_processes(engines, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    paths = [str(pretrained.ROOT), str(pretrained.ROOT / "src")]
    done = subprocess.run(
        [sys.executable, program],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == vllm_tokens(engines(MODEL), cases())
