"""Prompts as JSON lines: run in one session, written back in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from descant.api.completion_record import completion_record
from descant.api.inputs import prepare_prompts
from descant.api.json_lines import parse_line
from descant.api.prompt import encode_prompt, require_chat_template, user_messages
from descant.cli import terminal
from descant.cli.default_length import DefaultLengthNote
from descant.cli.function_recipe import FunctionRecipe
from descant.cli.jsonl_lines import RUN_KEY, InputLine, InputLines, check_names, echo_line
from descant.cli.jsonl_output import JsonlFile, JsonlStream, RunDigest, other_run_error
from descant.cli.options import override_values, reject_tensor_fields
from descant.config.generation_config import FIELDS, GenerationConfig
from descant.core.records import Hypothesis
from descant.engine.session import Failed, Finished, Request, Session
from descant.errors import DescantError, InputError, Words

__all__ = ["JsonlJob"]

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
        self.request_extras = dict(
            request_extras or {}
        )  # what a request brings along: a recipe, what guesses for it
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
                extras={name: one for name, one in self.request_extras.items() if "tokenizer" not in name},
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
            numbers = self.session.admit(*(task.request for task in tasks))
        except DescantError as error:
            if len(tasks) == 1:
                self._fail(tasks[0].line, tasks[0].data, error)
                return
            for task in tasks:
                self._admit_tasks([task])
        else:
            self._running.update(zip(numbers, tasks, strict=True))

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
            line, data, Request(prompts.prompt(0), config, prompts.inputs[0], config_merged=True, **extras)
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
        for one in hypotheses:
            self._length_note.add(task.request.generation_config, one.reason)
        completions = [completion_record(self.tokenizer, task.request, one) for one in hypotheses]
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
