"""`python -m bench.jobs vllm PYTHON`: jobs and vLLM's own batch runner on the same rows, by CPU time.

Each side is a command that runs to its end, for all rows and for a few; the difference is the time without
the start. vLLM's batch runner takes conversations only, so the rows are user messages on all sides. Requests
may not end before their length. PYTHON is an interpreter with vLLM (tools/vllm_env.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from bench.job_sides import cost_job, rows_of_words, write_rows
from descant.config.generation_config import GenerationConfig
from descant.jobs import Job
from descant.jobs.description import encode_job

__all__ = ["add_vllm_options", "run_vllm"]

_ROOT = Path(__file__).resolve().parents[1]
_FEW = 2
_MESSAGE = "Tell a story of {text}."
_PROGRAM = """
import json, sys
from descant.jobs import Job
from descant.jobs.description import job_values
if __name__ == "__main__":
    result = Job(**job_values(json.loads(sys.argv[1]))).run()
    print(json.dumps({"tokens": result.tokens}))
"""
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


class CommandResult(NamedTuple):
    """CPU seconds of a command and of all processes it has waited for, and the tokens it has generated."""

    seconds: float
    tokens: int


Command = Callable[[Path, int], CommandResult]


def add_vllm_options(parser: argparse.ArgumentParser) -> None:
    """The options of `vllm`."""
    parser.add_argument("python", help="an interpreter with vLLM")
    parser.add_argument("--model", default="models/smollm2")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--in-flight", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)


def run_vllm(args: argparse.Namespace) -> None:
    """Print the times of all sides, and those of the jobs over vLLM's batch runner."""
    sides: dict[str, Command] = {
        "vLLM's batch runner": lambda folder, rows: _run_batch(args, folder, rows),
        "job on vLLM": lambda folder, rows: _run_job(args, args.python, "vllm", folder, rows),
        "job": lambda folder, rows: _run_job(args, sys.executable, "descant", folder, rows),
    }
    names = list(sides)
    found: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(args.repeats):
        turn = repeat % len(names)
        for name in names[turn:] + names[:turn]:
            start, whole = (_run_in_folder(sides[name], rows) for rows in (_FEW, args.rows))
            found[name].append((whole.seconds - start.seconds) / (whole.tokens - start.tokens))
            print(
                f"  repeat {repeat}: {name:20} {1e3 * found[name][-1]:7.2f} ms of CPU time a token, "
                f"{whole.tokens} tokens; start {start.seconds:6.1f} s",
                flush=True,
            )
    base = found[names[0]]
    for name in names[1:]:
        ratios = [own / other for own, other in zip(found[name], base, strict=True)]
        print(
            f"{name} / {names[0]}: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        )


def _run_in_folder(side: Command, rows: int) -> CommandResult:
    with tempfile.TemporaryDirectory() as folder:
        return side(Path(folder), rows)


def _run_batch(args: argparse.Namespace, folder: Path, rows: int) -> CommandResult:
    model = str(Path(args.model).resolve())
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": model,
                "messages": [{"role": "user", "content": _MESSAGE.format(**row)}],
                "max_completion_tokens": args.new_tokens,
                "min_tokens": args.new_tokens,
                "temperature": 0,
            },
        }
        for number, row in enumerate(rows_of_words(rows))
    ]
    source, output = folder / "requests.jsonl", folder / "answers.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    # The command `vllm` does not start where the package has another name, as that for CPUs.
    command = [args.python, "-m", "vllm.entrypoints.openai.run_batch", "-i", str(source), "-o", str(output)]
    command += ["--model", model, "--dtype", "float32", "--max-model-len", "2048"]
    command += ["--max-num-seqs", str(args.in_flight)]
    seconds, _ = _cpu_seconds(command, {"PYTHONPATH": ""})
    answers = [json.loads(line)["response"]["body"] for line in output.read_text().splitlines()]
    return CommandResult(seconds, sum(one["usage"]["completion_tokens"] for one in answers))


def _run_job(args: argparse.Namespace, python: str, engine: str, folder: Path, rows: int) -> CommandResult:
    job = cost_job(
        str(Path(args.model).resolve()),
        write_rows(folder, rows_of_words(rows)),
        args.new_tokens,
        args.in_flight,
    )
    config = GenerationConfig(max_new_tokens=args.new_tokens, min_new_tokens=args.new_tokens)
    job = dataclasses.replace(job, template=_MESSAGE, chat=True, generation_config=config, engine=engine)
    seconds, output = _cpu_seconds(
        [python, "-c", _PROGRAM, _encoded(job)], {"PYTHONPATH": str(_ROOT / "src")}
    )
    return CommandResult(seconds, json.loads(output.splitlines()[-1])["tokens"])


def _encoded(job: Job) -> str:
    return json.dumps(encode_job(job))


def _cpu_seconds(command: list[str], environment: dict[str, str]) -> tuple[float, bytes]:
    """The CPU seconds of a command, and what it prints."""
    env = {**os.environ, **_ENVIRONMENT, **environment}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, env=env)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            sys.exit(f"{command[:3]} has ended with exit code {process.returncode}")
        output.seek(0)
        return usage.ru_utime + usage.ru_stime, output.read()
