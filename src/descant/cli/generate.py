"""`descant generate`: a prompt to the terminal, many from a file, or sound; and `descant explain`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from descant.cli import terminal
from descant.cli.command import ConfigCommand, GrammarCommand
from descant.cli.options import STDIO, argument, option
from descant.config.generation_config import GenerationConfig
from descant.core.atomic_file import require_writable
from descant.errors import ConfigError, InputError, Words, file_errors

if TYPE_CHECKING:
    from descant.cli.jsonl import InputLines, JsonlFile, JsonlStream
    from descant.trace.tracer import Tracer


# Options that are for text alone, beside generation parameters: those are refused by the model of sound.
TEXT_OPTIONS: Final = (
    "chat", "input", "output", "trace", "recipe", "assistant_model", "watermark", "json_schema", "regex",
    "choice", "grammar_file",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GenerateCommand(GrammarCommand):
    """Continue a prompt and stream the text; or, with --input and --output, many prompts.

    Lines of --input are objects with "prompt" or "messages" and any generation parameter for that line; they
    are written to --output in order, with "completions", or with "error" for a line that failed. A run that
    was interrupted continues where its output ends.

    A model of sound, such as MusicGen, writes what it generates for a prompt to the WAV file of --out.
    """

    prompt: str | None = argument("PROMPT", "The text to continue; - reads standard input.", None)
    chat: bool = option("The prompt is a user message to a chat model.", False)
    input: str | None = option("Prompts as JSON lines; - is standard input.", metavar="FILE")
    output: str | None = option("Results as JSON lines; - is standard output.", metavar="FILE")
    overwrite: bool = option(
        "Start --output anew instead of continuing what is there; replace the file of --out.", False
    )
    out: str | None = option("The sound of a model of sound, as a new WAV file.", metavar="FILE.wav")
    trace: str | None = option("Record every step, for `descant show FILE`.", metavar="FILE")
    batch_size: int = option("Prompts of --input per batch.", 16, min=1)

    def run(self) -> int:
        """Run one prompt or many."""
        self._check_options()
        if self.out is not None:
            return self._write_sound(self.out)
        if self.input is None and self.output is None:
            return self._stream_to_terminal()
        from descant.cli.jsonl import JsonlJob

        model, tokenizer = self._load_checked()
        job = JsonlJob(
            model, tokenizer, self.parameters, self.file_config(), self.chat, self.request_extras()
        )
        with self._open_input() as source, self._open_output() as target:
            return job.run(source, target, self.batch_size)

    def _write_sound(self, path: str) -> int:
        """Write the sound of one prompt."""
        from descant.cli.output import SoundJob

        text = self._read_prompt()
        self.check_parameters()
        job = SoundJob(path, self.overwrite, self.parameters, self.file_config())
        return job.run(self.model, text, self.dtype, self.device)

    def _stream_to_terminal(self) -> int:
        """Stream one prompt to the terminal."""
        from descant.api.chat_prompt import encode_prompt, user_messages
        from descant.api.stream import stream
        from descant.cli.output import DefaultLengthNote, FunctionRecipe, StreamPrinter

        text = self._read_prompt()
        model, tokenizer = self._load_checked()
        request_args = (
            encode_prompt(tokenizer, user_messages(text) if self.chat else text) | self.request_extras()
        )
        printer, file_config, length_note = StreamPrinter(), self.file_config(), DefaultLengthNote()
        model_config = GenerationConfig.from_transformers(model.generation_config)
        merged = GenerationConfig.merge(
            self.parameters, file_config, model_config, has_strategy=self.has_strategy
        )
        function = FunctionRecipe.from_request(request_args, model, tokenizer)
        if function is not None and self.trace is not None:
            requirement = "is not supported with a recipe that is a function"
            raise InputError("trace", requirement, self.trace, "leave it out")
        with (
            self._open_tracer() as tracer,
            contextlib.closing(
                stream(model, None, tokenizer, file_config, **request_args, **self.parameters, trace=tracer)
                if function is None
                else function.stream_events(request_args, file_config, self.parameters)
            ) as events,
        ):
            try:
                for event in events:
                    printer.print_event(event)
                    length_note.add(merged, event.finish_reason)
            finally:
                printer.end_line()
        length_note.print_if_due()
        return 0

    @contextlib.contextmanager
    def _open_tracer(self) -> Iterator[Tracer | None]:
        """The tracer of --trace, if given; the trace is saved also after an error."""
        if self.trace is None:
            yield None
            return
        with file_errors("trace", self.trace):
            require_writable(self.trace)  # before decoding
        from descant.trace.tracer import Tracer

        tracer = Tracer()
        try:
            yield tracer
        finally:
            if tracer.has_run and tracer.trace.requests:
                tracer.trace.save(self.trace)

    def _load_checked(self) -> tuple[Any, Any]:
        model, tokenizer = self.load()
        if self.chat:
            from descant.api.chat_prompt import require_chat_template

            require_chat_template(tokenizer, self.model)
        return model, tokenizer

    def _read_prompt(self) -> str:
        if self.prompt != STDIO:
            assert self.prompt is not None
            return self.prompt
        # Drop the newline that `echo` adds.
        return sys.stdin.read().removesuffix("\n")

    @contextlib.contextmanager
    def _open_input(self) -> Iterator[InputLines]:
        from descant.cli.jsonl import InputLines

        if self.input is None:
            yield InputLines.from_prompt(self._read_prompt())
        elif self.input == STDIO:
            yield InputLines(sys.stdin.buffer)
        else:
            with file_errors("input", self.input):
                file = open(self.input, "rb")  # noqa: SIM115 - errors of the run are not those of the file
            with file:
                yield InputLines.from_file(file)

    @contextlib.contextmanager
    def _open_output(self) -> Iterator[JsonlFile | JsonlStream]:
        from descant.cli.jsonl import JsonlStream, open_jsonl_file

        if self.output in (None, STDIO):
            yield JsonlStream(sys.stdout)
        else:
            assert self.output is not None
            with open_jsonl_file(self.output, self.overwrite) as output:
                yield output

    def _check_options(self) -> None:
        """Raise InputError for contradicting options."""
        self._check_sound_options()
        given = [
            name for name, value in (("PROMPT", self.prompt), ("--input", self.input)) if value is not None
        ]
        if len(given) != 1:
            got, do = Words(" and ".join(given) or "neither"), "give one of them; - reads standard input"
            raise InputError("PROMPT", "must be given, or --input", got, do)
        if self.input not in (None, STDIO) and self.output not in (None, STDIO):
            with contextlib.suppress(OSError):
                if Path(str(self.output)).samefile(str(self.input)):
                    raise InputError("output", "must be another file than --input", self.output)
        if self.overwrite and self.output in (None, STDIO) and self.out is None:
            must = "has no use without a file as --output or --out"
            raise InputError("overwrite", must, self.output, "leave it out")
        if self.trace is not None and (self.input is not None or self.output is not None):
            raise InputError("trace", "has no use with --input and --output", self.trace, "leave it out")
        only_text = self.input is None and self.output is None and self.out is None
        if self.values.get("logprobs") is not None and only_text:
            advice = "add --output -"
            raise ConfigError(
                "logprobs", "has no use where only text is shown", self.values["logprobs"], advice
            )

    def _check_sound_options(self) -> None:
        """Raise InputError for an option of text beside --out."""
        if self.out is None:
            return
        for name in TEXT_OPTIONS:
            if value := getattr(self, name):
                raise InputError(name, "has no use with --out, which writes sound", value, "leave it out")


@dataclass(frozen=True, kw_only=True)
class ExplainCommand(ConfigCommand):
    """Show what would run and why: strategy, processors in order, stops, and the source of every value.

    Nothing is generated, and only the configs of the model are read.
    """

    model: str | None = argument("MODEL", "A folder, a GGUF file, or a name on the Hub.", None)

    def run(self) -> int:
        """Print the explanation."""
        file_config = self.file_config()
        if self.model is None:
            merged, model_interface = GenerationConfig.merge(self.values, file_config), None
        else:
            from descant.engine.planning.planner import as_model
            from descant.models.loading.loading import load_meta_model

            model = load_meta_model(self.model)
            model_config = GenerationConfig.from_transformers(model.generation_config)
            # The adapter, not the model: the model's config would be merged a second time.
            merged, model_interface = (
                GenerationConfig.merge(self.values, file_config, model_config),
                as_model(model),
            )
        terminal.write_untrusted(merged.explain(model_interface) + "\n")
        return 0
