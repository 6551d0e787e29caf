"""The page of the guide on vLLM: its blocks run, and print what the page shows."""

from __future__ import annotations

import os
import subprocess
import sys

from tools.docs import doc_blocks


def test_the_page_runs():
    pages = [str(path) for path in doc_blocks.sources() if doc_blocks.needs_vllm(path)]
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [sys.executable, "tools/docs/doc_blocks.py", "run", *pages]
    found = subprocess.run(command, cwd=doc_blocks.ROOT, env=env, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-3000:]
    assert pages
