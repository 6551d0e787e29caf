"""`bench.engines`: sides that run the same requests, and vLLM in a process of its own."""

from __future__ import annotations

import sys

import pytest
import torch

from bench import engines
from descant.testing import toy

REQUESTS = [([5, 6, 7, 8], 3), ([9, 4], 5)]

_WORKER = """#!{python}
import json, sys
print(json.dumps({{"version": "0"}}), flush=True)
for line in sys.stdin:
    tokens = [[1] * new for _, new in json.loads(line)["requests"]]
    print(json.dumps({{"seconds": 0.5, "tokens": tokens}}), flush=True)
"""


@torch.no_grad()
def test_sides_have_the_same_tokens():
    model = toy()
    sides = {"fast": engines.session_side(model), "transformers": engines.transformers_side(model)}
    runs = engines.measure(sides, REQUESTS, 2)
    assert [len(one) for one in runs.values()] == [2, 2]
    assert [len(tokens) for tokens in runs["fast"][0].tokens] == [3, 5]
    lines = engines.report("both", runs)
    assert lines[0].startswith("| both | fast | 1.00 | ")
    assert all(line.endswith(" 2 of 2 |") for line in lines)


def test_vllm_answers_from_its_own_process(tmp_path):
    python = tmp_path / "python"
    python.write_text(_WORKER.format(python=sys.executable))
    python.chmod(0o755)
    vllm = engines.VLLMProcess(str(python), "models/smollm2", "float32")
    try:
        assert vllm.version == "0"
        assert vllm(REQUESTS) == engines.Run(0.5, [[1] * 3, [1] * 5])
    finally:
        vllm.close()
    with pytest.raises(RuntimeError, match="the vLLM process ended"):
        engines.VLLMProcess("/bin/true", "models/smollm2", "float32")
