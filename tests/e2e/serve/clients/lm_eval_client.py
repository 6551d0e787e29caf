"""lm-eval by the server and by its own backend; prints every request's results as JSON.

Arguments: the server's address, the model's folder, the folder of the tasks.
"""

import json
import sys

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

url, folder, tasks = sys.argv[1:]
BACKENDS = {
    "local-completions": {
        "model": "smol-draft",
        "base_url": f"{url}/v1/completions",
        "tokenizer_backend": "huggingface",
        "tokenizer": folder,
        "num_concurrent": 2,
        "max_retries": 1,
    },
    "hf": {"pretrained": folder, "dtype": "float32", "device": "cpu"},
}


def run(backend: str) -> dict[str, object]:
    """The responses of a backend, by task, and its scores."""
    result = simple_evaluate(
        model=backend,
        model_args=BACKENDS[backend],
        tasks=["endings", "continuations"],
        task_manager=TaskManager(include_path=tasks, include_defaults=False),
        bootstrap_iters=0,
        batch_size=1,
        log_samples=True,
    )
    responses = {
        name: [sample["resps"] for sample in sorted(samples, key=lambda one: one["doc_id"])]
        for name, samples in result["samples"].items()
    }
    return {"responses": responses, "scores": result["results"]}


print(json.dumps({backend: run(backend) for backend in BACKENDS}, default=str))
