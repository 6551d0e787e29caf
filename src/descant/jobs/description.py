"""The description of a job: what to read, how to generate, where to write; and what its runs report."""

from __future__ import annotations

import dataclasses
import json
import os
import string
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, Final, NamedTuple, Self

from descant.config.dtype_names import DTYPES
from descant.config.generation_config import FIELDS, GenerationConfig
from descant.config.registry import suggest_name, unknown_field_error
from descant.errors import ConfigError, InputError, file_errors
from descant.jobs.selection import SelectionConfig, check_keys, check_types
from descant.jobs.shards import DEDUP_MODES, SINK_FORMATS, JobManifest, ShardFolder
from descant.jobs.source import SOURCE_FORMATS, JobSource

PROMPT_COLUMNS: Final = ("prompt", "messages", "ids")
CONFIG_COLUMN: Final = "generation_config"
OUTPUT_NAMES: Final = ("row", "id", "completions")
# With these a result would depend on more than the job and the row, or be no text.
_NOT_IN_JOBS: Final = {
    **{
        name: "is not supported in jobs, whose output is text"
        for name, parameter in FIELDS.items()
        if parameter.group == "output" and name != "num_return_sequences"
    },
    "generation_kwargs": "is not supported in jobs, whose inputs are columns",
    "max_time": "must be unset in a job, whose results do not depend on the time",
    "prefix_allowed_tokens_fn": "is not supported in jobs, which are described by data",
}
_COLUMN_LISTS: Final = ("override_columns", "keep_columns")
# A CPU computes more rows at once hardly faster, and each of them ends later.
_DEFAULT_IN_FLIGHT, _DEFAULT_IN_FLIGHT_ON_CPU = 256, 64
_CHOICES: Final[dict[str, tuple[str | None, ...]]] = {
    "engine": ("descant", "vllm", "auto"),
    "sink_format": SINK_FORMATS,
    "dedup": (None, *DEDUP_MODES),
}
_COUNT: Final = "must be an integer >= 1"
_TYPES: Final[dict[str, tuple[Any, str]]] = {
    **dict.fromkeys(("model", "sink", "dtype"), (str, "must be text")),
    **dict.fromkeys(("template", "id_column", "device"), (str | None, "must be text")),
    **dict.fromkeys(("shard_rows", "window", "workers"), (int, _COUNT)),
    **dict.fromkeys(("max_in_flight", "cpus_per_worker"), (int | None, _COUNT)),
    **dict.fromkeys(("chat", "report"), (bool, "must be true or false")),
    "seed": (int, "must be an integer"),
    "generation_config": (GenerationConfig, "must be a GenerationConfig"),
    "select": (SelectionConfig | None, "must be a SelectionConfig or a table of its fields"),
    "engine_options": (Mapping, "must be a table of options"),
}


@dataclass(frozen=True, kw_only=True)
class JobDescription:
    """The fields of a job; `window`, `max_in_flight` and `workers` change its speed, never its results."""

    model: str  # a folder, or a name on the Hub
    source: str | Sequence[str]  # files, or folders of datasets
    sink: str  # the folder of the shards
    template: str | None = None  # "Translate: {text}"; None: a column `prompt`, `messages` or `ids`
    chat: bool = False  # whether the prompt is a user message to a chat model
    generation_config: GenerationConfig = field(default_factory=GenerationConfig)
    override_columns: str | Sequence[str] = ()  # that hold generation parameters of their names
    id_column: str | None = None  # with an id of each row of its own; None: its index in the source
    keep_columns: str | Sequence[str] = ()  # that are copied to the output
    dtype: str = "float32"  # in half precision the last bit of a sum depends on the rows beside it
    device: str | None = None
    seed: int = 0  # a row's own seed is derived from it and from the row's id
    shard_rows: int = 1000
    sink_format: str = "jsonl"  # or "parquet"
    window: int = 1024  # rows that are sorted by length before they start
    max_in_flight: int | None = None  # requests in an engine at once; None: 256, and 64 on a CPU
    engine: str = "descant"  # "vllm", or "auto": vLLM for all that it can run
    engine_options: Mapping[str, Any] = field(default_factory=dict)  # of vLLM's EngineArgs
    workers: int = 1  # processes, or actors on Ray, that each load the model
    cpus_per_worker: int | None = None  # threads of each; None: all of a machine together, on Ray 1
    select: SelectionConfig | None = None  # which completions of a row are written; None: all
    dedup: str | None = None  # "exact" or "normalized": a folder `unique` with the first row of each text
    report: bool = True  # whether a page `report.html` is written at the end

    def __post_init__(self) -> None:
        for name in ("source", *_COLUMN_LISTS):
            object.__setattr__(self, name, _as_texts(name, getattr(self, name)))
        for name in ("model", "sink"):
            value = getattr(self, name)
            object.__setattr__(self, name, os.fspath(value) if isinstance(value, os.PathLike) else value)
        select: Any = self.select
        if isinstance(select, Mapping):
            object.__setattr__(self, "select", SelectionConfig.from_table(select))
        self._check_types()
        self._check_source()
        self._check_columns()
        config = self.generation_config
        check_generation_fields({name: getattr(config, name) for name in config.given})
        if config.seed is not None:
            must, advice = "must be unset in the `generation_config` of a job", "set the `seed` of the job"
            raise ConfigError("seed", must, config.seed, advice)
        if self.template is not None:
            check_template(self.template)
        if self.engine == "vllm":
            from descant.engine.vllm.field_support import check_fields  # takes torch

            check_fields(config, ("vllm", "plug-in", "engine"))
            if self.select is not None and self.select.needs_logprobs:
                raise InputError(
                    "scorer", "must be another with vLLM, which has no such scores", "mean_logprob"
                )
        if self.select is not None and "num_return_sequences" not in self.override_columns:
            self.select.check_samples(config.num_return_sequences or 1)

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> Self:
        """The job of a TOML file; its paths are relative to the working directory."""
        with file_errors("job", path), open(path, "rb") as file:
            data = file.read()
        try:
            values = tomllib.loads(data.decode())
        except (ValueError, RecursionError) as error:
            raise InputError("job", f"must be a TOML file ({error})", os.fspath(path)) from None
        check_keys(cls, values, "a job")
        for own in dataclasses.fields(cls):
            is_required = own.default is own.default_factory is dataclasses.MISSING
            if is_required and own.name not in values:
                raise InputError(own.name, "must be given in a job", None, f"add it to {os.fspath(path)}")
        config = values.get("generation_config", {})
        if not isinstance(config, dict):
            raise InputError("generation_config", "must be a table", config)
        check_generation_fields(config)
        return cls(**{**values, "generation_config": GenerationConfig(**config)})

    @property
    def source_files(self) -> tuple[str, ...]:
        """The files of the source."""
        return _as_texts("source", self.source)

    @property
    def rows_in_flight(self) -> int:
        """The most rows in an engine at once."""
        if self.max_in_flight is not None:
            return self.max_in_flight
        is_on_cpu = self.engine == "descant" and (self.device or "cpu") == "cpu"
        return _DEFAULT_IN_FLIGHT_ON_CPU if is_on_cpu else _DEFAULT_IN_FLIGHT

    @property
    def source_columns(self) -> frozenset[str] | None:
        """The columns of the source that the job uses, beside that of the ids; None: all."""
        if self.select is not None and self.select.needs_row:
            return None
        prompt = PROMPT_COLUMNS if self.template is None else _template_columns(self.template)
        return frozenset((*prompt, CONFIG_COLUMN, *self.override_columns, *self.keep_columns))

    def _check_types(self) -> None:
        check_types(self, _TYPES)
        if self.dtype not in DTYPES:
            raise InputError("dtype", f"must be one of {', '.join(DTYPES)}", self.dtype)
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise InputError(name, f"must be one of {', '.join(filter(None, choices))}", value)
        options = self.engine_options
        if not all(isinstance(name, str) for name in options):
            raise InputError("engine_options", "must be a table of options", options)
        if options and self.engine == "descant":
            raise InputError("engine_options", "must be empty without vLLM", options, 'set engine = "vllm"')

    def _check_source(self) -> None:
        if not self.source_files:
            raise InputError("source", "must name at least one file", self.source)
        for path in self.source_files:
            if not path.endswith(SOURCE_FORMATS) and not os.path.isdir(path):
                must = f"must be files that end in {', '.join(SOURCE_FORMATS)}, or folders that exist"
                raise InputError("source", must, path)

    def _check_columns(self) -> None:
        for name in self.override_columns:
            if name not in FIELDS:
                do = suggest_name(name, FIELDS) or "leave it out"
                raise InputError("override_columns", "must name generation parameters", name, do)
            check_generation_fields({name: True})
        for name in self.keep_columns:
            if name in OUTPUT_NAMES:
                must = f"must have other names than the output's own ({', '.join(OUTPUT_NAMES)})"
                do = 'leave it out, and set id_column = "id"' if name == "id" else "leave it out"
                raise InputError("keep_columns", must, name, do)


def _as_texts(name: str, value: Any) -> tuple[str, ...]:
    """One text or several, as a tuple."""
    texts = (value,) if isinstance(value, str | os.PathLike) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str | os.PathLike) for text in texts):
        raise InputError(name, "must be text or a list of texts", value)
    return tuple(os.fspath(text) for text in texts)


def check_generation_fields(values: dict[str, Any]) -> None:
    """Raise ConfigError for unknown generation parameters, and for those that a job cannot have."""
    for name, value in values.items():
        if name not in FIELDS:
            raise unknown_field_error(name, value)
        if name in _NOT_IN_JOBS and value is not None and value is not False:
            raise ConfigError(name, _NOT_IN_JOBS[name], value, "leave it out")


def _template_columns(template: str) -> list[str]:
    """The columns that a template names."""
    return [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]


def check_template(template: str) -> None:
    """Raise InputError for a template without columns, or with anything but plain names in its braces."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        must = f"must have paired braces ({error})"
        raise InputError("template", must, template, "write {{ for a brace") from None
    has_columns = False
    for _, name, spec, conversion in parts:
        if name is None:
            continue
        if spec or conversion or not name or any(char in name for char in ".[]"):
            must = "must have the name of a column in each pair of braces"
            raise InputError("template", must, template, "write {{ for a brace")
        has_columns = True
    if not has_columns:
        raise InputError("template", "must name a column, as in {text}", template)


def open_source(job: JobDescription, known: bytes | None = None) -> JobSource:
    """The rows of a job; of formats with columns only those that the job uses are read.

    `known` is the content that the run has scanned; None: it is that of the first reading.
    """
    return JobSource(job.source_files, job.id_column, job.source_columns, known)


def open_sink(job: JobDescription, manifest: JobManifest) -> ShardFolder:
    """The shards of a job."""
    ids = () if job.id_column is None else ("id",)
    return ShardFolder(job.sink, manifest, (*ids, *job.keep_columns))


def encode_job(job: JobDescription) -> dict[str, Any]:
    """A job in JSON types, with absolute paths: a worker may run in another folder."""
    values = {own.name: getattr(job, own.name) for own in dataclasses.fields(JobDescription)}
    values["source"] = [os.path.abspath(path) for path in job.source_files]
    values["sink"] = os.path.abspath(job.sink)
    if os.path.isdir(job.model):  # else it is a name on the Hub
        values["model"] = os.path.abspath(job.model)
    select = None if job.select is None else dataclasses.asdict(job.select.with_absolute_path())
    config = json.loads(job.generation_config.to_json_string())
    options = dict(job.engine_options)
    return {**values, "generation_config": config, "select": select, "engine_options": options}


def job_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a job of `encode_job`."""
    return {**values, "generation_config": GenerationConfig.from_dict(values["generation_config"])}


@dataclass(frozen=True)
class JobProgress:
    """The state of a run, at its start and after each row."""

    rows: int  # of the source
    finished: int  # rows with a result or an error, those of earlier runs included
    failed: int  # rows with an error, those of earlier runs included
    computed: int  # rows of this run
    tokens: int  # generated by this run
    seconds: float  # since this run began to compute
    in_flight: int = 0  # the most rows that run at once
    damaged_files: tuple[str, ...] = ()  # of shards that were not as written, and are computed again

    @property
    def tokens_per_second(self) -> float:
        """The generated tokens a second of this run."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """The time until the end at the pace of this run; None: it is too early to say.

        Rows that began together end together: before as many have ended as run at once, or half of all, the
        pace is that of the first ones, not of the run.
        """
        to_compute = self.rows - self.finished + self.computed
        if not self.computed or self.computed < min(self.in_flight, to_compute / 2):
            return None
        return (self.rows - self.finished) * self.seconds / self.computed


@dataclass(frozen=True)
class JobResult:
    """The end of a job: all its shards are there."""

    rows: int  # of the source
    failed: int  # rows with an error instead of a result
    shards: int
    computed_rows: int  # of this run; the others were there already
    tokens: int  # generated by this run
    seconds: float  # of this run
    drafted: tuple[int, ...] = ()  # draft tokens that this run fed, by their index in a draft
    accepted: tuple[int, ...] = ()  # and those of them that were accepted
    unique_rows: int | None = None  # with a text of their own; None: without `dedup`
    damaged_files: tuple[str, ...] = ()  # of shards that were not as written; computed again by this run


@dataclass(frozen=True)
class JobEstimate:
    """The size of a run that was not started, and its time by some measured rows."""

    rows: int  # of the source
    missing_rows: int  # in shards that are not there yet
    shards: int
    missing_shards: int
    measured_rows: int
    failed_rows: int  # of the measured ones
    tokens_per_second: float
    seconds: float  # for the missing rows, with one worker
    fitting_workers: int  # by the cores and the free memory of this machine


class RowCounts(NamedTuple):
    """Rows that have ended, and their tokens."""

    rows: int = 0
    failed: int = 0
    tokens: int = 0
    drafted: Sequence[int] = ()  # draft tokens that were fed, by their index in a draft
    accepted: Sequence[int] = ()  # and those of them that were accepted

    def plus(self, other: RowCounts) -> RowCounts:
        """The sum of both; of counts by index the shorter ends with zeros."""
        drafted, accepted = (
            tuple(map(sum, zip_longest(*pair, fillvalue=0)))
            for pair in ((self.drafted, other.drafted), (self.accepted, other.accepted))
        )
        rows, failed = self.rows + other.rows, self.failed + other.failed
        return RowCounts(rows, failed, self.tokens + other.tokens, drafted, accepted)


@dataclass
class RunProgress:
    """The rows that the workers of a run report, all in one thread: of complete groups, and of the others."""

    start: JobProgress  # with the rows of earlier runs
    on_progress: Callable[[JobProgress], None] | None
    began: float = field(default_factory=time.monotonic)
    complete: RowCounts = field(default_factory=RowCounts)
    running: dict[int, RowCounts] = field(default_factory=dict)  # by the first shard of a group

    def add(self, group: int, counts: RowCounts) -> None:
        """Count rows of a group that is not complete."""
        self.running[group] = self.running.get(group, RowCounts()).plus(counts)
        self.tell()

    def retry(self, group: int) -> None:
        """Forget the rows of a group that is computed again; their tokens were generated all the same."""
        tokens = self.running.pop(group, RowCounts()).tokens
        self.complete = self.complete.plus(RowCounts(tokens=tokens))

    def finish(self, group: int) -> None:
        """Count a complete group."""
        self.complete = self.complete.plus(self.running.pop(group, RowCounts()))

    def tell(self) -> None:
        """Report the state."""
        if self.on_progress is None:
            return
        total = self.complete
        for counts in self.running.values():
            total = total.plus(counts)
        self.on_progress(
            replace(
                self.start,
                finished=self.start.finished + total.rows,
                failed=self.start.failed + total.failed,
                computed=total.rows,
                tokens=total.tokens,
                seconds=time.monotonic() - self.began,
            )
        )
