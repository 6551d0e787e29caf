"""A run of `descant generate --input --output` killed again and again: `python jsonl_runs.py FOLDER KILLS`.

Each child continues what the killed one before it left. The program prints how many rows the file had after
each kill, and whether it is the file of a run that nobody killed, byte for byte.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from descant.cli.jsonl import InputLines, JsonlJob, open_jsonl_file
from descant.models.loading.tiny_llama import toy

LONGEST = 0.1  # seconds that a run lives after its first row
PATIENCE = 60.0


def run(model: Any, tokenizer: Any, source: Path, target: Path) -> int:
    """Run or continue the job."""
    job = JsonlJob(model, tokenizer, {"max_new_tokens": 8}, None, False)
    with source.open("rb") as file, open_jsonl_file(str(target), False) as output:
        return job.run(InputLines.from_file(file), output, 4)


def wait_for_growth(target: Path, rows: int) -> None:
    """Wait until a file has more rows."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if target.exists() and target.read_bytes().count(b"\n") > rows:
            return
        time.sleep(0.005)


def main(folder: Path, kills: int) -> None:
    """Kill and continue, then compare."""
    torch.set_num_threads(1)
    import wordpiece

    tokenizer = wordpiece.tokenizer()
    model = toy(vocab_size=len(tokenizer))
    source, whole, target = (folder / name for name in ("in.jsonl", "whole.jsonl", "out.jsonl"))
    lines = [
        {"prompt": "stop the end", "id": number, "seed": number, "do_sample": True}
        for number in range(12 * kills)
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code = run(model, tokenizer, source, whole)
    draw, rows, killed, torn = random.Random(), [], 0, 0
    for _ in range(kills):
        child = os.fork()
        if child == 0:
            os._exit(run(model, tokenizer, source, target))
        wait_for_growth(target, sum(rows[-1:]))
        time.sleep(draw.uniform(0, LONGEST))
        os.kill(child, signal.SIGKILL)
        killed += os.WIFSIGNALED(os.waitpid(child, 0)[1])
        data = target.read_bytes() if target.exists() else b""
        torn += not whole.read_bytes().startswith(data)
        rows.append(data.count(b"\n"))
    last = run(model, tokenizer, source, target)
    same = target.read_bytes() == whole.read_bytes()
    print(json.dumps({"codes": [code, last], "rows": rows, "killed": killed, "torn": torn, "same": same}))


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[2] / "support"))
    main(Path(sys.argv[1]), int(sys.argv[2]))
