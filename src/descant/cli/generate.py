"""`descant generate`: one prompt, shown as it grows, or many from a file into another."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from descant.api.stream import stream
from descant.cli.command import Decoder
from descant.cli.function_recipe import Function
from descant.cli.jsonl import Job, Lines
from descant.cli.prompt import encoded, refuse_without_template, said
from descant.cli.stream_printer import Shown
from descant.errors import ConfigError, InputError
from descant.trace.tracer import Tracer

__all__ = ["Generate"]

STANDARD = "-"


@dataclass(frozen=True, kw_only=True)
class Generate(Decoder):
    """Continue a prompt, and show the text as it grows; or, with --input and --output, many prompts.

    Lines of --input are objects with "prompt" or "messages" and any generation parameter for that line; they
    are written to --output in order, with "completions", or with "error" where one failed.
    """

    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The text to continue; - reads standard input.")
    ] = None
    chat: Annotated[
        bool, typer.Option("--chat", metavar="", help="The prompt is what a user says to a chat model.")
    ] = False
    input: Annotated[
        str | None,
        typer.Option("--input", metavar="FILE", help="Prompts as JSON lines; - is standard input."),
    ] = None
    output: Annotated[
        str | None,
        typer.Option("--output", metavar="FILE", help="Results as JSON lines; - is standard output."),
    ] = None
    trace: Annotated[
        str | None,
        typer.Option(
            "--trace", metavar="FILE", help="Record every step, to be drawn by `descant show FILE`."
        ),
    ] = None
    batch_size: Annotated[
        int,
        typer.Option("--batch-size", min=1, help="Prompts of --input that run side by side (default: 16)."),
    ] = 16

    def run(self) -> int:
        """Do one or many."""
        self._refuse()
        if self.input is None and self.output is None:
            return self._show()
        model, tokenizer = self._loaded()
        job = Job(model, tokenizer, self.parameters, self.argument(), self.chat, self.brought())
        with self._source() as source, self._target() as target:
            return job.run(source, target, self.batch_size)

    def _show(self) -> int:
        """Stream one prompt to the terminal."""
        text = self._prompt()
        model, tokenizer = self._loaded()
        given = encoded(tokenizer, said(text) if self.chat else text) | self.brought()
        shown, argument = Shown(), self.argument()
        function = Function.of(given, model, tokenizer)
        if function is not None and self.trace is not None:
            must = "has no use with a recipe that is a function, whose loop is its own"
            raise InputError("trace", must, self.trace, "leave it out")
        with (
            self._traced() as tracer,
            contextlib.closing(
                stream(model, None, tokenizer, argument, **given, **self.parameters, trace=tracer)
                if function is None
                else function.events(given, argument, self.parameters)
            ) as events,
        ):
            try:
                for event in events:
                    shown.take(event)
            finally:
                shown.end()
        return 0

    @contextlib.contextmanager
    def _traced(self) -> Iterator[Tracer | None]:
        """Who records the run, if --trace says where to; what there is of it is saved however it ends."""
        if self.trace is None:
            yield None
            return
        # Before anything is decoded, and without touching what the file may hold.
        _opened(self.trace, "trace", "a").close()
        tracer = Tracer()
        try:
            yield tracer
        finally:
            if tracer.begun and tracer.trace.requests:
                tracer.trace.save(self.trace)

    def _loaded(self) -> tuple[Any, Any]:
        model, tokenizer = self.load()
        if self.chat:
            refuse_without_template(tokenizer, self.model)
        return model, tokenizer

    def _prompt(self) -> str:
        if self.prompt != STANDARD:
            assert self.prompt is not None
            return self.prompt
        # What `echo` adds is not meant for the model.
        return sys.stdin.read().removesuffix("\n")

    @contextlib.contextmanager
    def _source(self) -> Iterator[Lines]:
        if self.input is None:
            yield Lines.of_prompt(self._prompt())
        elif self.input == STANDARD:
            yield Lines(sys.stdin.buffer)
        else:
            with _opened(self.input, "input", "rb") as file:
                yield Lines.of_file(file)

    @contextlib.contextmanager
    def _target(self) -> Iterator[Any]:
        if self.output in (None, STANDARD):
            yield sys.stdout
        else:
            assert self.output is not None
            with _opened(self.output, "output", "w") as file:
                yield file

    def _refuse(self) -> None:
        """Raise for options that contradict each other."""
        given = [
            name for name, value in (("PROMPT", self.prompt), ("--input", self.input)) if value is not None
        ]
        if len(given) != 1:
            got = " and ".join(given) or "neither"
            raise InputError("prompt", "must come from PROMPT or --input", got, "give one of them")
        if self.input not in (None, STANDARD) and self.output not in (None, STANDARD):
            with contextlib.suppress(OSError):
                if Path(str(self.output)).samefile(str(self.input)):
                    raise InputError("output", "must be another file than --input", self.output)
        if self.trace is not None and (self.input is not None or self.output is not None):
            raise InputError("trace", "has no use with --input and --output", self.trace, "leave it out")
        if self.values.get("logprobs") is not None and self.input is None and self.output is None:
            do = "add --output -"
            raise ConfigError("logprobs", "has no use where only text is shown", self.values["logprobs"], do)


def _opened(path: str, option: str, mode: str) -> Any:
    try:
        return open(path, mode) if "b" in mode else open(path, mode, encoding="utf-8", newline="\n")
    except OSError as error:
        raise InputError(option, f"must be a file that can be opened ({error.strerror})", path) from None
