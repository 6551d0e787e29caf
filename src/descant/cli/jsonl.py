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

from descant.api.inputs import prepared
from descant.cli import terminal
from descant.cli.function_recipe import Function
from descant.cli.options import overlaid, refuse_tensors
from descant.cli.prompt import encoded, refuse_without_template, said
from descant.config.generation_config import FIELDS, GenerationConfig
from descant.core.records import Hypothesis, Logprobs
from descant.engine.session import Failed, Finished, Request, Session
from descant.errors import DescantError, InputError
from descant.tokenization.detokenizer import TextStream

__all__ = ["Job", "Lines"]

RESULTS = ("completions", "error")  # keys that are ours in a line of output
WHOLE = ("recipe", "custom_generate", "trust_remote_code")  # what whoever wrote a line must not choose


@dataclass(frozen=True)
class Lines:
    """Lines of a file or a pipe, and how many, where that can be known before."""

    lines: Iterable[bytes]
    count: int | None = None

    @classmethod
    def of_prompt(cls, prompt: str) -> Lines:
        """The one line that a single prompt is."""
        return cls([json.dumps({"prompt": prompt}).encode()], 1)

    @classmethod
    def of_file(cls, file: BinaryIO) -> Lines:
        """The lines of an open file, counted first if it can be read twice."""
        if not stat.S_ISREG(fstat(file.fileno()).st_mode):
            return cls(file)
        count = sum(1 for line in file if line.strip())
        file.seek(0)
        return cls(file, count)


@dataclass(frozen=True)
class Task:
    """One line of input: its place, what it holds, and the ids of its prompt once known."""

    place: int
    data: Mapping[str, Any]
    request: Request


class Job:
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
        self.brought = dict(brought or {})  # what a request brings along: a recipe, what guesses for it
        self.function = Function.of(self.brought, model, tokenizer)
        self.values, self.argument, self.chat = values, argument, chat
        self.theirs = GenerationConfig.from_transformers(model.generation_config)
        self.session = Session(model)
        self._running: dict[int, Task] = {}
        self._done: dict[int, dict[str, Any]] = {}  # records that wait for an earlier one
        self._written = 0
        self._failures = 0

    def run(self, source: Lines, target: TextIO, width: int) -> int:
        """Run all lines, `width` at a time; the exit code."""
        console = terminal.console()
        columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        # A bar on the terminal that the lines are written to would only break them.
        hidden = not console.is_terminal or target.isatty()
        with Progress(*columns, console=console, disable=hidden, redirect_stdout=False) as progress:
            bar = progress.add_task("", total=source.count)
            waiting = enumerate(line for line in source.lines if line.strip())
            while True:
                self._admit(waiting, width)
                self._write(target)
                progress.update(bar, completed=self._written + len(self._done))
                if not len(self.session):
                    break
                for event in self.session.step():
                    if isinstance(event, Finished):
                        self._finish(self._running.pop(event.request), event.hypotheses)
                    elif isinstance(event, Failed):
                        task = self._running.pop(event.request)
                        self._fail(task.place, task.data, event.error)

        if self._failures:
            terminal.blame(f'{self._failures} of {self._written} lines failed, each says why in its "error"')
        return 1 if self._failures else 0

    def _admit(self, waiting: Iterator[tuple[int, bytes]], width: int) -> None:
        """Fill the table up."""
        while len(self.session) < width:
            fresh = []
            for place, line in waiting:
                task = self._task(place, line)
                if task is not None:
                    fresh.append(task)
                if len(self.session) + len(fresh) == width:
                    break
            if not fresh:
                return
            self._enter(fresh)

    def _enter(self, tasks: list[Task]) -> None:
        """Admit tasks together; where that fails, each alone, so that only the bad ones fail."""
        try:
            numbers = self.session.admit(*(task.request for task in tasks))
        except DescantError as error:
            if len(tasks) == 1:
                self._fail(tasks[0].place, tasks[0].data, error)
                return
            for task in tasks:
                self._enter([task])
        else:
            self._running.update(zip(numbers, tasks, strict=True))

    def _task(self, place: int, line: bytes) -> Task | None:
        """A line as a task; None where it is wrong, which is then its result."""
        data: Mapping[str, Any] = {}
        try:
            data = _object(line)
            for name in WHOLE:
                if data.get(name) is not None:
                    must = "is for all lines, and must not be in one"
                    raise InputError(name, must, data[name], "give --recipe")
            own = {name: value for name, value in data.items() if name in FIELDS and value is not None}
            refuse_tensors(own)
            config = GenerationConfig.merge(overlaid(self.values, own), self.argument, self.theirs)
            given = encoded(self.tokenizer, self._prompt(data))
            if self.function is not None:
                self._call(place, data, given | self.brought, overlaid(self.values, own))
                return None
            ready = prepared(given, config, self.session.model.facts, self.session.model.device)
        except DescantError as error:
            self._fail(place, data, error)
            return None
        brought = {"tokenizer": self.tokenizer, **self.brought}
        return Task(place, data, Request(ready.prompt(0), config, ready.inputs[0], merged=True, **brought))

    def _call(
        self, place: int, data: Mapping[str, Any], given: Mapping[str, Any], values: Mapping[str, Any]
    ) -> None:
        """Run a line through a function, which takes one at a time and does not say why it ends."""
        assert self.function is not None
        try:
            found = self.function.answer(given, self.argument, values)
        except DescantError:
            raise
        except Exception as error:  # somebody else's code, which fails in its own ways
            self._fail(place, data, error)
        else:
            lines = [{"text": text, "tokens": len(ids), "finish_reason": None} for ids, text in found]
            self._done[place] = {**_kept(data), "completions": lines}

    def _prompt(self, data: Mapping[str, Any]) -> Any:
        """What a line asks to be continued."""
        prompt, messages = data.get("prompt"), data.get("messages")
        if (prompt is None) == (messages is None):
            got = "neither" if prompt is None else "both"
            raise InputError("prompt", 'must be given, or "messages", in each line', got)
        if messages is not None:
            refuse_without_template(self.tokenizer, self.model.name_or_path)
            if not isinstance(messages, list) or not messages:
                raise InputError("messages", "must be a non-empty list of messages", messages)
            return messages
        if not isinstance(prompt, str):
            raise InputError("prompt", "must be text", prompt)
        return said(prompt) if self.chat else prompt

    # -------------------------------------------------------------------- results
    def _finish(self, task: Task, found: list[Hypothesis]) -> None:
        self._done[task.place] = {
            **_kept(task.data),
            "completions": [self._completion(task.request, one) for one in found],
        }

    def _fail(self, place: int, data: Mapping[str, Any], error: Exception) -> None:
        self._failures += 1
        told = str(error) if isinstance(error, DescantError) else f"{type(error).__name__}: {error}"
        self._done[place] = {**_kept(data), "error": told}

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
        stream = TextStream(
            self.tokenizer,
            prompt_ids=torch.as_tensor(request.prompt).tolist(),
            stop_strings=request.generation_config.stop_strings or (),
            skip_special_tokens=True,
        )
        return stream.put(ids) + stream.end()

    def _write(self, target: TextIO) -> None:
        """Write the records that are next."""
        while self._written in self._done:
            target.write(_line(self._done.pop(self._written)))
            self._written += 1
        target.flush()


def _line(record: Mapping[str, Any]) -> str:
    """A record as a line; with escapes only where a file could not hold its characters."""
    line = json.dumps(record, ensure_ascii=False)
    try:
        line.encode()
    except UnicodeEncodeError:
        line = json.dumps(record)
    return line + "\n"


def _object(line: bytes) -> Mapping[str, Any]:
    shown = line.decode(errors="replace").strip()
    try:
        data = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InputError("input", f"must hold a JSON object in each line ({error})", shown) from None
    if not isinstance(data, dict):
        raise InputError("input", "must hold a JSON object in each line", shown)
    return data


def _kept(data: Mapping[str, Any]) -> dict[str, Any]:
    """A line as it came, without the results of an earlier run."""
    return {name: value for name, value in data.items() if name not in RESULTS}
