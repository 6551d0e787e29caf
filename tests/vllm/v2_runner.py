"""vLLM's V2 model runner on a CPU: a plug-in of pytest, `-p tests.vllm.v2_runner`.

The kernels of the runner are Triton's, which Triton's interpreter runs (`tools/vllm_env.py --interpreter`).
vLLM looks for a backend of Triton for CPUs, which no release of Triton has: a name is enough, since nothing
is compiled.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ.update(TRITON_INTERPRET="1", VLLM_USE_V2_MODEL_RUNNER="1", CUDA_VISIBLE_DEVICES="")
sys.path.insert(0, str(Path(sys.prefix) / "interpreter"))

from triton.backends import backends

driver = SimpleNamespace(is_active=lambda: True)
backends["cpu"] = SimpleNamespace(driver=driver, compiler=None)
