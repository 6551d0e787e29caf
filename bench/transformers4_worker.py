"""A process that runs another version of transformers: JSON lines in, CPU seconds out.

Started by `bench.methods` with that version's Python; it must not import descant.
"""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    """Reply to each line `{"ids": [[...]], "arguments": {...}}` with CPU time and tokens."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
    print(json.dumps({"transformers": transformers.__version__}), flush=True)
    for line in sys.stdin:
        call = json.loads(line)
        ids = torch.tensor(call["ids"])
        begin = time.process_time()
        out = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **call["arguments"])
        seconds = time.process_time() - begin
        print(json.dumps({"seconds": seconds, "tokens": out[:, ids.shape[1] :].tolist()}), flush=True)


if __name__ == "__main__":
    main()
