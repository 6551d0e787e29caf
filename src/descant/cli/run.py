"""`descant run`: a job of a TOML file, each row of its source exactly once."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, Self

from descant.cli import terminal
from descant.cli.command import ConfigCommand
from descant.cli.options import argument, option
from descant.cli.terminal import FAILURE, INTERRUPTED, USAGE
from descant.config.dtype_names import DTYPES
from descant.config.generation_config import GenerationConfig
from descant.errors import ConfigError, InputError

if TYPE_CHECKING:
    from descant.jobs import Job, JobProgress


_SECONDS_BETWEEN_LINES: Final = 10.0


class JobProgressDisplay:
    """Shows rows, tokens a second and the time left on standard error."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn  # slow to import

        console = terminal.console()
        self._is_terminal = console.is_terminal
        columns = (TextColumn("rows"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
        self._bar = Progress(*columns, console=console, disable=not self._is_terminal)
        self._task = self._bar.add_task("starting", total=None)
        self._next_line: float | None = None  # from the first row on: a model may take long to load
        self.rows: int | None = None  # of the source; None: it is not read yet

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, progress: JobProgress) -> None:
        """Show the state at the start or after a row."""
        if self.rows is None and progress.damaged_files:
            names = ", ".join(progress.damaged_files)
            terminal.print_warning(f"shards that were changed are computed again: {names}")
        self.rows = progress.rows
        if self._is_terminal:
            text = _pace(progress)
            self._bar.update(self._task, total=progress.rows, completed=progress.finished, description=text)
        elif progress.computed and (self._next_line is None or time.monotonic() >= self._next_line):
            is_first, self._next_line = self._next_line is None, time.monotonic() + _SECONDS_BETWEEN_LINES
            if is_first:
                return
            terminal.print_info(f"{progress.finished} of {progress.rows} rows, {_pace(progress)}")


def _pace(progress: JobProgress) -> str:
    if not progress.computed:
        return "the first rows are running" if progress.finished < progress.rows else ""
    left = progress.seconds_left
    time_left = "" if left is None else f", {format_seconds(left)} left"
    failed = f", {progress.failed} failed" if progress.failed else ""
    return f"{progress.tokens_per_second:.0f} tokens a second{failed}{time_left}"


def format_seconds(seconds: float) -> str:
    """A time in hours, minutes and seconds."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


@dataclass(frozen=True, kw_only=True)
class RunCommand(ConfigCommand):
    """Run every row of a source through a model, and write the results in shards.

    JOB is a TOML file with the fields of `descant.jobs.Job`; options override it. The same command resumes a
    run that was interrupted, and computes only the shards that are missing. The exit code is 1 if rows
    failed: the errors files beside the shards say why.
    """

    needs_torch: ClassVar[bool] = False  # each row has a seed of its own

    job: Path = argument("JOB", "The job: a TOML file.")
    dry_run: bool = option("Write nothing: show rows, shards, and the time by some rows.", False)
    model: str | None = option("A folder, a GGUF file, or a name on the Hub.", metavar="MODEL")
    source: list[str] | None = option("A file of rows; may be repeated.", metavar="FILE")
    sink: str | None = option("The folder of the shards.", metavar="FOLDER")
    dtype: str | None = option(f"Precision of the weights: {', '.join(DTYPES)} (float32).")
    device: str | None = option("Where to run: cpu, cuda, cuda:1, mps, ...")
    shard_rows: int | None = option("Rows of a shard (default: 1000).", min=1)
    sink_format: str | None = option("Format of the shards: jsonl, parquet (jsonl).")
    window: int | None = option("Rows that are sorted by length (default: 1024).", min=1)
    max_in_flight: int | None = option("Requests in an engine at once (256, on a CPU 64).", min=1)
    engine: str | None = option("descant, vllm, or auto: vLLM for all that it can run (descant).")
    workers: int | None = option("Processes that load the model, or actors on Ray (default: 1).", min=1)
    cpus_per_worker: int | None = option("Threads of each worker (default: all together, on Ray 1).", min=1)
    ray: str | None = option("Run on a Ray cluster: its address, or local for a new one.", metavar="ADDRESS")

    def run(self) -> int:
        """Run the job, or estimate its time."""
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
        names = (field.name for field in dataclasses.fields(job))
        changes = {name: value for name in names if (value := getattr(self, name, None))}
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
    """The message of an interrupted run: the shards that it leaves."""
    files = Path(job.sink).glob(f"shard-*.{job.sink_format}")
    saved = sum(not path.name.endswith(".errors.jsonl") for path in files)
    of_all = "" if rows is None else f" of {-(-rows // job.shard_rows)}"
    return f"interrupted: {saved}{of_all} shards are in {job.sink}; the same command computes the others"
