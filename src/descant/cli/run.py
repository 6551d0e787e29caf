"""`descant run`: a job of a TOML file, each row of its source exactly once."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from descant.cli import terminal
from descant.cli.command import ConfigCommand
from descant.cli.exit_codes import FAILURE, INTERRUPTED, USAGE
from descant.config.dtype_names import DTYPES
from descant.config.generation_config import GenerationConfig
from descant.errors import ConfigError, InputError

if TYPE_CHECKING:
    from descant.jobs import Job

__all__ = ["RunCommand"]

_JOB_OPTIONS = (
    "model",
    "source",
    "sink",
    "dtype",
    "device",
    "shard_rows",
    "sink_format",
    "window",
    "max_in_flight",
    "engine",
    "workers",
    "cpus_per_worker",
)


@dataclass(frozen=True, kw_only=True)
class RunCommand(ConfigCommand):
    """Run every row of a source through a model, and write the results in shards.

    JOB is a TOML file with the fields of `descant.jobs.Job`; options override it. The same command resumes a
    run that was interrupted, and computes only the shards that are missing. The exit code is 1 if rows
    failed: the errors files beside the shards say why.
    """

    needs_torch: ClassVar[bool] = False  # each row has a seed of its own

    job: Annotated[Path, typer.Argument(metavar="JOB", help="The job: a TOML file.")]
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", metavar="", help="Write nothing: show rows, shards, and the time by some rows."
        ),
    ] = False
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="A folder, a GGUF file, or a name on the Hub."),
    ] = None
    source: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="A file of rows; may be repeated.")
    ] = None
    sink: Annotated[str | None, typer.Option(metavar="FOLDER", help="The folder of the shards.")] = None
    dtype: Annotated[
        str | None, typer.Option(help=f"Precision of the weights: {', '.join(DTYPES)} (float32).")
    ] = None
    device: Annotated[str | None, typer.Option(help="Where to run: cpu, cuda, cuda:1, mps, ...")] = None
    shard_rows: Annotated[int | None, typer.Option(min=1, help="Rows of a shard (default: 1000).")] = None
    sink_format: Annotated[str | None, typer.Option(help="Format of the shards: jsonl, parquet (jsonl).")] = (
        None
    )
    window: Annotated[
        int | None, typer.Option(min=1, help="Rows that are sorted by length (default: 1024).")
    ] = None
    max_in_flight: Annotated[
        int | None, typer.Option(min=1, help="Requests in an engine at once (256, on a CPU 64).")
    ] = None
    engine: Annotated[
        str | None, typer.Option(help="descant, vllm, or auto: vLLM for all that it can run (descant).")
    ] = None
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes that load the model, or actors on Ray (default: 1).")
    ] = None
    cpus_per_worker: Annotated[
        int | None, typer.Option(min=1, help="Threads of each worker (default: all together, on Ray 1).")
    ] = None
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Run on a Ray cluster: its address, or local for a new one."),
    ] = None

    def run(self) -> int:
        """Run the job, or estimate its time."""
        from descant.cli.job_progress import JobProgressDisplay
        from descant.jobs import Job

        try:
            in_file = Job.from_toml(self.job)
        except (ConfigError, InputError) as error:
            if error.field == "job":
                raise
            terminal.print_error(f"{self.job}: {error}")  # in the words of the file, not those of options
            return USAGE
        job = self._with_options(in_file)
        if job.dtype != "float32":
            terminal.print_warning(
                f"with dtype {job.dtype} a row's result may depend on the rows beside it; "
                "float32 has the same bytes in every run"
            )
        if self.dry_run:
            return self._print_estimate(job)
        try:
            with JobProgressDisplay() as display:
                result = job.run(on_progress=display.update, ray=self.ray)
        except KeyboardInterrupt:
            terminal.print_info(_saved_text(job, display.rows))
            return INTERRUPTED
        terminal.write(
            f"rows: {result.rows}, failed: {result.failed}, shards: {result.shards}; "
            f"computed now: {result.computed_rows} rows, {result.tokens} tokens\n"
        )
        return FAILURE if result.failed else 0

    def _print_estimate(self, job: Job) -> int:
        from descant.cli.job_progress import format_seconds

        with terminal.console().status("measuring"):
            estimate = job.estimate()
        if not estimate.missing_rows:
            terminal.write(f"rows    {estimate.rows}, all of them there\n")
            return 0
        pace = f"{format_seconds(estimate.seconds)} at {estimate.tokens_per_second:.0f} tokens a second"
        terminal.write(
            f"rows    {estimate.rows}, {estimate.missing_rows} to compute\n"
            f"shards  {estimate.shards}, {estimate.missing_shards} to compute\n"
            f"time    {pace}, by {estimate.measured_rows} rows, of which {estimate.failed_rows} failed\n"
            f"workers {estimate.fitting_workers} fit on this machine; the time is that of one\n"
        )
        return 0

    def _with_options(self, job: Job) -> Job:
        """A job with the options of the command line."""
        given = {name: getattr(self, name) for name in _JOB_OPTIONS}
        changes = {name: value for name, value in given.items() if value}
        values = dict(self.values)
        if "seed" in values:  # of the job: each row has its own
            changes["seed"] = values.pop("seed")
        config, file_config = job.generation_config, self.file_config()
        if file_config is not None:
            config = GenerationConfig.merge({}, file_config, config)
        if values:
            config = GenerationConfig.merge(values, config)
        return dataclasses.replace(job, generation_config=config, **changes)


def _saved_text(job: Job, rows: int | None) -> str:
    """What an interrupted run leaves."""
    files = Path(job.sink).glob(f"shard-*.{job.sink_format}")
    saved = sum(not path.name.endswith(".errors.jsonl") for path in files)
    of_all = "" if rows is None else f" of {-(-rows // job.shard_rows)}"
    return f"interrupted: {saved}{of_all} shards are in {job.sink}; the same command computes the others"
