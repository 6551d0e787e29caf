"""The vLLM side of `bench.engines`, in the interpreter that has vLLM: one JSON request and answer a line.

It imports nothing of this project. A request is `{"requests": [[prompt, new tokens], ...]}`, an answer
`{"seconds": CPU seconds, "tokens": [[...], ...]}`. With `"trace": path` in a request
torch's profiler writes a trace of the run to that file, with `"schema"` all answers follow a JSON schema.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from typing import Any

_SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that its CPU time is that of this process
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def _structured(schema: dict[str, Any]) -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    return StructuredOutputsParams(json=schema, disable_any_whitespace=True)


def main(model: str, dtype: str) -> None:
    """Answer requests until the input ends."""
    os.environ.update(_SETTINGS)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM prints to the standard output
    import torch
    import vllm

    engine: Any = vllm.LLM(
        model=model,
        dtype=dtype,
        max_model_len=512,
        max_num_seqs=128,
        enable_prefix_caching=False,  # repeats would be measured without their prompts
        disable_log_stats=True,
    )
    print(json.dumps({"version": vllm.__version__}), file=answers)
    for line in sys.stdin:
        given = json.loads(line)
        requests, trace = given["requests"], given.get("trace")
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        options = {"structured_outputs": _structured(given["schema"])} if "schema" in given else {}
        params = [
            vllm.SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False, **options)
            for _, new in requests
        ]
        with torch.profiler.profile() if trace else contextlib.nullcontext() as profile:
            began = time.process_time()
            outputs = engine.generate(prompts, params, use_tqdm=False)
            seconds = time.process_time() - began
        if profile is not None:
            profile.export_chrome_trace(trace)
        tokens = [list(one.outputs[0].token_ids) for one in outputs]
        print(json.dumps({"seconds": seconds, "tokens": tokens}), file=answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
