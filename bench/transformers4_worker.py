"""A process that runs another version of transformers, for a race with it: JSON lines in, CPU seconds out.

Started by `bench.methods` with that version's Python; it must not import descant.
"""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    """Answer each line `{"ids": [[...]], "arguments": {...}}` with its CPU time and tokens."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
    print(json.dumps({"transformers": transformers.__version__}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        ids = torch.tensor(asked["ids"])
        begin = time.process_time()
        out = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **asked["arguments"])
        took = time.process_time() - begin
        print(json.dumps({"seconds": took, "tokens": out[:, ids.shape[1] :].tolist()}), flush=True)


if __name__ == "__main__":
    main()
