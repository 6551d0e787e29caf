"""`python -m bench.jobs`: what a job costs beside its engine, by row and by the number of rows.

`cost` compares the CPU time of a job with that of the same requests in an engine. `parts` has what a job adds
to a row, part by part. `rows` runs a million tiny rows through an engine that answers at once: what is left
is the time and the memory of the job itself. `checkpoint` compares the memory of a resume with that of Ray
Data's CheckpointConfig, in an interpreter that has Ray. `vllm` compares jobs with vLLM's batch runner.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

os.environ["OMP_NUM_THREADS"] = "1"  # of the workers too; before torch is imported, which reads it then

from bench import job_checkpoint, job_cost, job_rows, job_vllm

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> None:
    """Run a benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(required=True)
    cost = commands.add_parser("cost", help="a job over its engine")
    job_cost.add_cost_options(cost)
    cost.set_defaults(run=job_cost.run_cost)
    parts = commands.add_parser("parts", help="what a job adds to a row")
    job_cost.add_cost_options(parts)
    parts.set_defaults(run=job_cost.run_parts)
    rows = commands.add_parser("rows", help="many rows, an engine that answers at once")
    job_rows.add_rows_options(rows)
    rows.set_defaults(run=job_rows.run_rows)
    checkpoint = commands.add_parser("checkpoint", help="the memory of a resume, beside Ray Data's")
    job_checkpoint.add_checkpoint_options(checkpoint)
    checkpoint.set_defaults(run=job_checkpoint.run_checkpoint)
    vllm = commands.add_parser("vllm", help="jobs beside vLLM's batch runner")
    job_vllm.add_vllm_options(vllm)
    vllm.set_defaults(run=job_vllm.run_vllm)
    args = parser.parse_args(argv)
    args.run(args)


if __name__ == "__main__":
    main()
