"""Many prompts as JSON lines: read, run side by side in one Session, and written back in order."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from os import fstat
from typing import Any, BinaryIO, TextIO

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from descant.api.inputs import prepare_prompts
from descant.cli import terminal
from descant.cli.function_recipe import FunctionRecipe
from descant.cli.options import override_values, reject_tensor_fields
from descant.cli.prompt import encode_prompt, require_chat_template, user_messages
from descant.config.generation_config import FIELDS, GenerationConfig
from descant.core.records import Hypothesis, Logprobs
from descant.engine.session import Failed, Finished, Request, Session
from descant.errors import DescantError, InputError
from descant.tokenization.detokenizer import IncrementalDetokenizer

__all__ = ["InputLines", "JsonlJob"]

RESULT_KEYS = ("completions", "error")  # keys that are ours in a line of output
JOB_ONLY_KEYS = (
    "recipe",
    "custom_generate",
    "trust_remote_code",
)  # what whoever wrote a line must not choose


@dataclass(frozen=True)
class InputLines:
    """Lines of a file or a pipe, and how many, where that can be known before."""

    lines: Iterable[bytes]
    count: int | None = None

    @classmethod
    def from_prompt(cls, prompt: str) -> InputLines:
        """The one line that a single prompt is."""
        return cls([json.dumps({"prompt": prompt}).encode()], 1)

    @classmethod
    def from_file(cls, file: BinaryIO) -> InputLines:
        """The lines of an open file, counted first if it can be read twice."""
        if not stat.S_ISREG(fstat(file.fileno()).st_mode):
            return cls(file)
        count = sum(1 for line in file if line.strip())
        file.seek(0)
        return cls(file, count)


@dataclass(frozen=True)
class JsonlTask:
    """One line of input: its place, what it holds, and the ids of its prompt once known."""

    index: int
    data: Mapping[str, Any]
    request: Request


class JsonlJob:
    """A model, and what holds for all lines; a line's own parameters come before the options."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        values: Mapping[str, Any],
        argument: GenerationConfig | None,
        chat: bool,
        brought: Mapping[str, Any] | None = None,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.request_extras = dict(
            brought or {}
        )  # what a request brings along: a recipe, what guesses for it
        self.function = FunctionRecipe.from_request(self.request_extras, model, tokenizer)
        self.values, self.file_config, self.chat = values, argument, chat
        self.model_config = GenerationConfig.from_transformers(model.generation_config)
        self.session = Session(model)
        self._running: dict[int, JsonlTask] = {}
        self._pending_records: dict[int, dict[str, Any]] = {}  # records that wait for an earlier one
        self._num_written = 0
        self._num_failures = 0

    def run(self, source: InputLines, target: TextIO, width: int) -> int:
        """Run all lines, `width` at a time; the exit code."""
        console = terminal.console()
        columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        # A bar on the terminal that the lines are written to would only break them.
        hidden = not console.is_terminal or target.isatty()
        with Progress(*columns, console=console, disable=hidden, redirect_stdout=False) as progress:
            bar = progress.add_task("", total=source.count)
            waiting = enumerate(line for line in source.lines if line.strip())
            while True:
                self._fill_session(waiting, width)
                self._write(target)
                progress.update(bar, completed=self._num_written + len(self._pending_records))
                if not len(self.session):
                    break
                for event in self.session.step():
                    if isinstance(event, Finished):
                        self._finish(self._running.pop(event.request), event.hypotheses)
                    elif isinstance(event, Failed):
                        task = self._running.pop(event.request)
                        self._fail(task.index, task.data, event.error)

        if self._num_failures:
            terminal.print_error(
                f'{self._num_failures} of {self._num_written} lines failed, each says why in its "error"'
            )
        return 1 if self._num_failures else 0

    def _fill_session(self, waiting: Iterator[tuple[int, bytes]], width: int) -> None:
        """Fill the table up."""
        while len(self.session) < width:
            fresh = []
            for place, line in waiting:
                task = self._make_task(place, line)
                if task is not None:
                    fresh.append(task)
                if len(self.session) + len(fresh) == width:
                    break
            if not fresh:
                return
            self._admit_tasks(fresh)

    def _admit_tasks(self, tasks: list[JsonlTask]) -> None:
        """Admit tasks together; where that fails, each alone, so that only the bad ones fail."""
        try:
            numbers = self.session.admit(*(task.request for task in tasks))
        except DescantError as error:
            if len(tasks) == 1:
                self._fail(tasks[0].index, tasks[0].data, error)
                return
            for task in tasks:
                self._admit_tasks([task])
        else:
            self._running.update(zip(numbers, tasks, strict=True))

    def _make_task(self, place: int, line: bytes) -> JsonlTask | None:
        """A line as a task; None where it is wrong, which is then its result."""
        data: Mapping[str, Any] = {}
        try:
            data = _parse_line(line)
            for name in JOB_ONLY_KEYS:
                if data.get(name) is not None:
                    must = "is for all lines, and must not be in one"
                    raise InputError(name, must, data[name], "give --recipe")
            own = {name: value for name, value in data.items() if name in FIELDS and value is not None}
            reject_tensor_fields(own)
            config = GenerationConfig.merge(
                override_values(self.values, own), self.file_config, self.model_config
            )
            given = encode_prompt(self.tokenizer, self._prompt_of(data))
            if self.function is not None:
                self._run_function(
                    place, data, given | self.request_extras, override_values(self.values, own)
                )
                return None
            ready = prepare_prompts(given, config, self.session.model.traits, self.session.model.device)
        except DescantError as error:
            self._fail(place, data, error)
            return None
        brought = {"tokenizer": self.tokenizer, **self.request_extras}
        return JsonlTask(
            place, data, Request(ready.prompt(0), config, ready.inputs[0], config_merged=True, **brought)
        )

    def _run_function(
        self, place: int, data: Mapping[str, Any], given: Mapping[str, Any], values: Mapping[str, Any]
    ) -> None:
        """Run a line through a function, which takes one at a time and does not say why it ends."""
        assert self.function is not None
        try:
            found = self.function.generate(given, self.file_config, values)
        except DescantError:
            raise
        except Exception as error:  # somebody else's code, which fails in its own ways
            self._fail(place, data, error)
        else:
            lines = [{"text": text, "tokens": len(ids), "finish_reason": None} for ids, text in found]
            self._pending_records[place] = {**_without_results(data), "completions": lines}

    def _prompt_of(self, data: Mapping[str, Any]) -> Any:
        """What a line asks to be continued."""
        prompt, messages = data.get("prompt"), data.get("messages")
        if (prompt is None) == (messages is None):
            got = "neither" if prompt is None else "both"
            raise InputError("prompt", 'must be given, or "messages", in each line', got)
        if messages is not None:
            require_chat_template(self.tokenizer, self.model.name_or_path)
            if not isinstance(messages, list) or not messages:
                raise InputError("messages", "must be a non-empty list of messages", messages)
            return messages
        if not isinstance(prompt, str):
            raise InputError("prompt", "must be text", prompt)
        return user_messages(prompt) if self.chat else prompt

    # -------------------------------------------------------------------- results
    def _finish(self, task: JsonlTask, found: list[Hypothesis]) -> None:
        self._pending_records[task.index] = {
            **_without_results(task.data),
            "completions": [self._completion(task.request, one) for one in found],
        }

    def _fail(self, place: int, data: Mapping[str, Any], error: Exception) -> None:
        self._num_failures += 1
        told = str(error) if isinstance(error, DescantError) else f"{type(error).__name__}: {error}"
        self._pending_records[place] = {**_without_results(data), "error": told}

    def _completion(self, request: Request, one: Hypothesis) -> dict[str, Any]:
        """One returned sequence in JSON's types."""
        ids = one.tokens.tolist()
        made: dict[str, Any] = {
            "text": self._text(request, ids),
            "tokens": len(ids),
            "finish_reason": one.reason,
        }
        if one.score is not None:
            made["score"] = float(one.score)
        if one.logprobs is not None:
            made["logprobs"] = self._logprobs(ids, one.logprobs)
        return made

    def _logprobs(self, ids: list[int], found: Logprobs) -> list[dict[str, Any]]:
        """For each token what the model gave it, what the processors left, and the likeliest instead."""
        tables = (found.raw, found.processed, found.top, found.top_raw, found.top_processed)
        lines = zip(ids, *(table.tolist() for table in tables), strict=True)
        return [
            {
                **self._logprob(token, raw, processed),
                "top": [self._logprob(*one) for one in zip(*best, strict=True)],
            }
            for token, raw, processed, *best in lines
        ]

    def _logprob(self, token: int, raw: float, processed: float) -> dict[str, Any]:
        # JSON has no infinity: a token that the processors ruled out has no log-probability.
        left = processed if isfinite(processed) else None
        return {"id": token, "token": self.tokenizer.decode([token]), "raw": raw, "processed": left}

    def _text(self, request: Request, ids: list[int]) -> str:
        """What a sequence adds to its prompt's text, as a stream would have shown it."""
        stream = IncrementalDetokenizer(
            self.tokenizer,
            prompt_ids=torch.as_tensor(request.prompt).tolist(),
            stop_strings=request.generation_config.stop_strings or (),
            skip_special_tokens=True,
        )
        return stream.put(ids) + stream.end()

    def _write(self, target: TextIO) -> None:
        """Write the records that are next."""
        while self._num_written in self._pending_records:
            target.write(_format_line(self._pending_records.pop(self._num_written)))
            self._num_written += 1
        target.flush()


def _format_line(record: Mapping[str, Any]) -> str:
    """A record as a line; with escapes only where a file could not hold its characters."""
    line = json.dumps(record, ensure_ascii=False)
    try:
        line.encode()
    except UnicodeEncodeError:
        line = json.dumps(record)
    return line + "\n"


def _parse_line(line: bytes) -> Mapping[str, Any]:
    shown = line.decode(errors="replace").strip()
    try:
        data = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InputError("input", f"must hold a JSON object in each line ({error})", shown) from None
    if not isinstance(data, dict):
        raise InputError("input", "must hold a JSON object in each line", shown)
    return data


def _without_results(data: Mapping[str, Any]) -> dict[str, Any]:
    """A line as it came, without the results of an earlier run."""
    return {name: value for name, value in data.items() if name not in RESULT_KEYS}
