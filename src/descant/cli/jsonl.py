"""Prompts as JSON lines: read, run in one session, and written back in order."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import fstat
from typing import Any, BinaryIO, Final, TextIO

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from descant.api.chat_prompt import encode_prompt, require_chat_template, user_messages
from descant.api.inputs import prepare_prompts
from descant.api.json_lines import format_line, parse_line
from descant.api.run_digest import GRAMMAR, WATERMARK, plain_grammar, plain_watermark, run_settings
from descant.api.text_output import completion_record
from descant.cli import terminal
from descant.cli.options import override_values, reject_tensor_fields
from descant.cli.output import DefaultLengthNote, FunctionRecipe
from descant.config.fields import RedactedMap
from descant.config.generation_config import FIELDS, GenerationConfig
from descant.core.atomic_file import lock_file
from descant.core.records import Hypothesis
from descant.engine.request import MERGED
from descant.engine.session import Failed, Finished, Request, Session
from descant.errors import DescantError, InputError, Words, file_errors

RUN_KEY: Final = "run"  # what a row of an output file was made from, as a digest
RESULT_KEYS: Final = ("completions", "error", RUN_KEY)  # added to a line of output
PROMPT_KEYS: Final = ("prompt", "messages")
# Must not be set in a line. Lines may be untrusted, and a step is compiled for a session, not for a line.
JOB_ONLY_KEYS: Final = {
    "recipe": "give --recipe",
    "custom_generate": "give --recipe",
    "trust_remote_code": "give --recipe",
    "compile_config": "give --compile-config or --config",
}
# Names of the same parameters in other programs.
FOREIGN_NAMES: Final = {
    "stop": "stop_strings",
    "temp": "temperature",
}
# Of a misspelt name; `prompt_id`, a name of the user's own, is 0.8 like `prompt`.
MIN_SIMILARITY: Final = 0.81


@dataclass(frozen=True)
class InputLine:
    """One line that is not blank: its index among those, its number in the file, its bytes."""

    index: int
    number: int
    data: bytes


@dataclass(frozen=True)
class InputLines:
    """Lines of a file or a pipe, and their number, if known."""

    lines: Iterable[bytes]
    count: int | None = None

    @classmethod
    def from_prompt(cls, prompt: str) -> InputLines:
        """A single prompt as one line."""
        return cls([json.dumps({"prompt": prompt}).encode()], 1)

    @classmethod
    def from_file(cls, file: BinaryIO) -> InputLines:
        """The lines of an open file, counted if it is a regular file."""
        if not stat.S_ISREG(fstat(file.fileno()).st_mode):
            return cls(file)
        count = sum(1 for line in file if line.strip())
        file.seek(0)
        return cls(file, count)

    def __iter__(self) -> Iterator[InputLine]:
        index = 0
        for number, data in enumerate(self.lines, 1):
            if data.strip():
                yield InputLine(index, number, data)
                index += 1


def check_names(data: Mapping[str, Any]) -> None:
    """Raise InputError for what a line must not set, and for a name that is nearly a known one."""
    for name, advice in JOB_ONLY_KEYS.items():
        if data.get(name) is not None:
            raise InputError(name, "applies to all lines and must not be set in one", data[name], advice)
    for name, value in data.items():
        if name not in FIELDS and name not in (*PROMPT_KEYS, *RESULT_KEYS, *JOB_ONLY_KEYS):
            meant = _similar_name(name)
            if meant is not None:
                requirement = "must be a generation parameter, or a name that is not nearly one"
                raise InputError(name, requirement, value, f"did you mean `{meant}`?")


def echo_line(data: Mapping[str, Any]) -> dict[str, Any]:
    """The data of a line as written back: without results of an earlier run, and without watermark keys."""
    kept = {name: value for name, value in data.items() if name not in RESULT_KEYS}
    if isinstance(kept.get("watermarking_config"), Mapping):
        kept["watermarking_config"] = RedactedMap(kept["watermarking_config"]).without_secrets()
    return kept


def _similar_name(name: str) -> str | None:
    """The known name that a misspelt one stands for; None: it is a name of the user's own."""
    known = (*FIELDS, *PROMPT_KEYS)
    if name in FOREIGN_NAMES:
        return FOREIGN_NAMES[name]
    equal = [field for field in known if _plain(field) == _plain(name)]
    return next(iter(equal or difflib.get_close_matches(name, known, n=1, cutoff=MIN_SIMILARITY)), None)


def _plain(name: str) -> str:
    return name.casefold().replace("_", "").replace("-", "").replace(" ", "")


_DIGEST_BYTES: Final = 8


class RunDigest:
    """Digests of lines with everything that decides their results: the model, the options, the recipe.

    A watermark key is represented by its fingerprint, which does not identify it.
    """

    def __init__(self, model: Any, tokenizer: Any, **settings: Any) -> None:
        self._prefix = run_settings(model, tokenizer, **settings)

    def of_line(self, line: InputLine) -> str:
        """The digest of one line."""
        try:
            data: Any = dict(parse_line(line.data))
        except DescantError:
            content = line.data
        else:
            public = {**echo_line(data), WATERMARK: plain_watermark(data.get(WATERMARK))}
            if GRAMMAR in public:
                public[GRAMMAR] = plain_grammar(public[GRAMMAR])
            content = json.dumps(public, sort_keys=True).encode()
        digest = hashlib.blake2b(self._prefix, digest_size=_DIGEST_BYTES, person=b"descant run")
        digest.update(content)
        return digest.hexdigest()


@dataclass(frozen=True)
class FinishedRow:
    """A row that an earlier run has written."""

    run: str
    failed: bool


class JsonlStream:
    """Rows written to a pipe or a terminal."""

    finished: tuple[FinishedRow, ...] = ()
    has_digests = False

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.is_terminal = stream.isatty()

    def start(self) -> None:
        """Nothing: a stream cannot be continued."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Write a row; on a terminal hidden characters are escaped, which JSON allows."""
        line = format_line(record)
        self._stream.write(terminal.escape_json(line) if self.is_terminal else line)

    def flush(self) -> None:
        """Hand the rows to the system."""
        self._stream.flush()


class JsonlFile:
    """Rows of a file with digests of what they were made from; `finished` are those of an earlier run."""

    has_digests = True
    is_terminal = False

    def __init__(self, file: BinaryIO, path: str, overwrite: bool) -> None:
        self._file, self._end = file, 0
        rows = []
        if not overwrite:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break  # the writer was killed within this row
                rows.append(_parse_row(line, number, path))
                self._end += len(line)
        self.finished = tuple(rows)

    def start(self) -> None:
        """Go to the end of the finished rows; an incomplete last row is removed."""
        self._file.truncate(self._end)
        self._file.seek(self._end)

    def write(self, record: Mapping[str, Any]) -> None:
        """Write a row."""
        self._file.write(format_line(record).encode())

    def flush(self) -> None:
        """Hand the rows to the system: they outlive this process."""
        self._file.flush()


@contextlib.contextmanager
def open_jsonl_file(path: str, overwrite: bool) -> Iterator[JsonlFile | JsonlStream]:
    """The output file of a run; a device or a pipe is a stream."""
    with file_errors("output", path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            with open(path, "w", encoding="utf-8", newline="\n") as stream:
                yield JsonlStream(stream)
            return
    with os.fdopen(descriptor, "r+b") as file:
        if lock_file(descriptor) is False:
            raise InputError("output", "must not be in use by another run", path, "wait for its end")
        output = JsonlFile(file, path, overwrite)
        yield output
        output.flush()
        os.fsync(descriptor)


def other_run_error(number: int, got: str) -> InputError:
    """The error for an output file that this run cannot continue."""
    must = f"must be new, or hold results of the same lines, model and options ({got} in line {number})"
    return InputError("output", must, "another file", "give --overwrite to start anew, or another file")


def _parse_row(line: bytes, number: int, path: str) -> FinishedRow:
    try:
        data = parse_line(line)
    except DescantError:
        data = {}
    if not isinstance(data.get(RUN_KEY), str):
        must = (
            f"must be new, or a file that `descant generate --output` wrote (line {number} is no row of it)"
        )
        raise InputError("output", must, path, "give --overwrite to start anew, or another file")
    return FinishedRow(data[RUN_KEY], "error" in data)


JsonlOutput = JsonlFile | JsonlStream


@dataclass(frozen=True)
class JsonlTask:
    """One line of input with its data and its request."""

    line: InputLine
    data: Mapping[str, Any]
    request: Request


class JsonlJob:
    """Runs lines on a model; the parameters of a line override the options."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        values: Mapping[str, Any],
        file_config: GenerationConfig | None,
        chat: bool,
        request_extras: Mapping[str, Any] | None = None,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        # Of each request: a recipe, and a draft model.
        self.request_extras = dict(request_extras or {})
        self.function = FunctionRecipe.from_request(self.request_extras, model, tokenizer)
        self.values, self.file_config, self.chat = values, file_config, chat
        self.model_config = GenerationConfig.from_transformers(model.generation_config)
        self.session = Session(model)
        self._running: dict[int, JsonlTask] = {}
        self._pending_records: dict[int, dict[str, Any]] = {}  # records that wait for an earlier one
        self._num_written = 0
        self._num_failures = 0
        self._length_note = DefaultLengthNote()
        self._digest: RunDigest | None = None  # None: rows are not marked with what they were made from

    def run(self, source: InputLines, target: JsonlOutput, width: int) -> int:
        """Run all lines that `target` does not hold yet, `width` at a time; returns the exit code."""
        pending_lines = iter(source)
        self._skip_finished(pending_lines, target)
        target.start()
        console = terminal.console()
        columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        # A progress bar would garble lines written to the same terminal.
        hidden = not console.is_terminal or target.is_terminal
        with Progress(*columns, console=console, disable=hidden, redirect_stdout=False) as progress:
            bar = progress.add_task("", total=source.count)
            while True:
                self._fill_session(pending_lines, width)
                self._write(target)
                progress.update(bar, completed=self._num_written + len(self._pending_records))
                if not len(self.session):
                    break
                for event in self.session.step():
                    if isinstance(event, Finished):
                        self._finish(self._running.pop(event.request), event.hypotheses)
                    elif isinstance(event, Failed):
                        task = self._running.pop(event.request)
                        self._fail(task.line, task.data, event.error)

        self._length_note.print_if_due()
        if self._num_failures:
            terminal.print_error(
                f'{self._num_failures} of {self._num_written} lines failed, each says why in its "error"'
            )
        return 1 if self._num_failures else 0

    def _skip_finished(self, pending_lines: Iterator[InputLine], target: JsonlOutput) -> None:
        """Skip lines whose rows are there; raises InputError for a row of another line, model or option."""
        if target.has_digests:
            self._digest = RunDigest(
                self.model,
                self.tokenizer,
                values=self.values,
                config=self.file_config,
                chat=self.chat,
                extras={name: item for name, item in self.request_extras.items() if "tokenizer" not in name},
            )
        for number, row in enumerate(target.finished, 1):
            line = next(pending_lines, None)
            if line is None or self._digest is None or self._digest.of_line(line) != row.run:
                raise other_run_error(number, "a row of another run" if line else "more rows than lines")
            self._num_written += 1
            self._num_failures += row.failed
        if target.finished:
            terminal.print_info(f"{self._num_written} lines are there already")

    def _fill_session(self, pending_lines: Iterator[InputLine], width: int) -> None:
        """Admit lines until `width` requests are running."""
        while len(self.session) < width:
            new_tasks = []
            for line in pending_lines:
                task = self._make_task(line)
                if task is not None:
                    new_tasks.append(task)
                if len(self.session) + len(new_tasks) == width:
                    break
            if not new_tasks:
                return
            self._admit_tasks(new_tasks)

    def _admit_tasks(self, tasks: list[JsonlTask]) -> None:
        """Admit tasks together; on an error one by one, so that only the invalid ones fail."""
        try:
            request_ids = self.session.admit(*(task.request for task in tasks))
        except DescantError as error:
            if len(tasks) == 1:
                self._fail(tasks[0].line, tasks[0].data, error)
                return
            for task in tasks:
                self._admit_tasks([task])
        else:
            self._running.update(zip(request_ids, tasks, strict=True))

    def _make_task(self, line: InputLine) -> JsonlTask | None:
        """A line as a task; None if it is invalid or already done, with its record written."""
        data: Mapping[str, Any] = {}
        try:
            data = parse_line(line.data)
            check_names(data)
            line_values = {
                name: value for name, value in data.items() if name in FIELDS and value is not None
            }
            reject_tensor_fields(line_values)
            config = GenerationConfig.merge(
                override_values(self.values, line_values),
                self.file_config,
                self.model_config,
                has_strategy=getattr(self.request_extras.get("recipe"), "kind", None) == "strategy",
            )
            inputs = encode_prompt(self.tokenizer, self._prompt_of(data))
            if self.function is not None:
                self._run_function(
                    line, data, inputs | self.request_extras, override_values(self.values, line_values)
                )
                return None
            prompts = prepare_prompts(inputs, config, self.session.model.traits, self.session.model.device)
        except DescantError as error:
            self._fail(line, data, error)
            return None
        extras = {"tokenizer": self.tokenizer, **self.request_extras}
        return JsonlTask(
            line, data, Request(prompts.prompt(0), config, prompts.inputs[0], _call=MERGED, **extras)
        )

    def _run_function(
        self,
        line: InputLine,
        data: Mapping[str, Any],
        request_args: Mapping[str, Any],
        values: Mapping[str, Any],
    ) -> None:
        """Run a line with a function recipe, which takes one prompt and gives no finish reason."""
        assert self.function is not None
        try:
            completions = self.function.generate(request_args, self.file_config, values)
        except DescantError:
            raise
        except Exception as error:  # third-party code may raise anything
            self._fail(line, data, error)
        else:
            texts = [{"text": text, "tokens": len(ids), "finish_reason": None} for ids, text in completions]
            self._add_record(line, data, {"completions": texts})

    def _prompt_of(self, data: Mapping[str, Any]) -> Any:
        """The prompt or messages of a line."""
        prompt, messages = data.get("prompt"), data.get("messages")
        if (prompt is None) == (messages is None):
            given_text = Words("neither" if prompt is None else "both")
            raise InputError("prompt", 'must be given, or "messages", in each line', given_text)
        if messages is not None:
            require_chat_template(self.tokenizer, self.model.name_or_path)
            if not isinstance(messages, list) or not messages:
                raise InputError("messages", "must be a non-empty list of messages", messages)
            return messages
        if not isinstance(prompt, str):
            raise InputError("prompt", "must be text", prompt)
        return user_messages(prompt) if self.chat else prompt

    # -------------------------------------------------------------------- results
    def _finish(self, task: JsonlTask, hypotheses: list[Hypothesis]) -> None:
        request = task.request
        for hypothesis in hypotheses:
            self._length_note.add(request.generation_config, hypothesis.reason)
        completions = [completion_record(self.tokenizer, request, hypothesis) for hypothesis in hypotheses]
        self._add_record(task.line, task.data, {"completions": completions})

    def _fail(self, line: InputLine, data: Mapping[str, Any], error: Exception) -> None:
        self._num_failures += 1
        message = str(error) if isinstance(error, DescantError) else f"{type(error).__name__}: {error}"
        self._add_record(line, data, {"error": f"line {line.number}: {message}"})

    def _add_record(self, line: InputLine, data: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        run = {} if self._digest is None else {RUN_KEY: self._digest.of_line(line)}
        self._pending_records[line.index] = {**echo_line(data), **result, **run}

    def _write(self, target: JsonlOutput) -> None:
        """Write the finished records that are next in order."""
        while self._num_written in self._pending_records:
            target.write(self._pending_records.pop(self._num_written))
            self._num_written += 1
        target.flush()
