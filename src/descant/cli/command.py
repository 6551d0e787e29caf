"""Commands as dataclasses: annotated fields are arguments and options, `run` executes the command."""

from __future__ import annotations

import dataclasses
import inspect
import json
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, get_type_hints

import typer

from descant.cli import options, terminal
from descant.cli.options import argument, error_text, option
from descant.cli.terminal import BROKEN_PIPE, FAILURE, INTERRUPTED, USAGE
from descant.config.dtype_names import DTYPES
from descant.config.generation_config import GenerationConfig
from descant.core.atomic_file import write_text
from descant.errors import (
    ConfigError,
    InputError,
    RecipeError,
    TraceError,
    UnsupportedModel,
    file_errors,
)

if TYPE_CHECKING:
    from descant.config.watermarking_config import BaseWatermarkingConfig
    from descant.recipes.recipe import Recipe


ENVIRONMENT_KEYS: Final = "env"  # instead of a key file


@dataclass(frozen=True, kw_only=True)
class Command:
    """Options of every command.

    A command's module is imported to show its help: what takes long to import is imported where it runs.
    """

    needs_torch: ClassVar[bool] = False  # whether it draws random numbers or reads watermark keys
    context_settings: ClassVar[Mapping[str, Any]] = {}  # of click

    debug: bool = option("Show the traceback of an error.", False)

    def run(self) -> int:
        """Run the command; returns the exit code."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ConfigCommand(Command):
    """Options of a command with generation parameters, each an option, and a config file."""

    needs_torch: ClassVar[bool] = True

    config: Path | None = option("A generation config: a JSON file or a model's folder.", metavar="PATH")
    values: Mapping[str, Any] = field(default_factory=dict)

    def file_config(self) -> GenerationConfig | None:
        """The config of `--config`: options override it, and it overrides the model's config."""
        if self.config is None:
            return None
        if self.config.is_dir():
            return GenerationConfig.from_pretrained(self.config)
        return GenerationConfig.from_pretrained(self.config.parent, self.config.name)


@dataclass(frozen=True, kw_only=True)
class DecodingCommand(ConfigCommand):
    """Options of a command that generates: a model and how to load it."""

    takes_speech: ClassVar[bool] = False  # whether it can use Whisper models

    model: str = argument("MODEL", "A folder, a GGUF file, or a name on the Hub.")
    dtype: str | None = option(f"Precision of the weights: {', '.join(DTYPES)} (as stored).")
    device: str | None = option("Where to run: cpu, cuda, cuda:1, mps, ...")
    assistant_model: str | None = option("A smaller draft model: the same text, faster.", metavar="MODEL")

    watermark: str | None = option(
        "Watermark the text with the key in this file; `env`: the environment's.", metavar="FILE"
    )

    recipe: str | None = option(
        "A recipe: a folder, owner/name on the Hub, or the name of an installed one.", metavar="REF"
    )
    trust_remote_code: bool = option("Run the code of --recipe, with your permissions.", False)
    recipe_argument: list[str] | None = option(
        "An argument of the recipe's own; may be repeated.", metavar="NAME=JSON"
    )

    @cached_property
    def parameters(self) -> Mapping[str, Any]:
        """The generation parameters, with the watermark, whose key is not an option."""
        if self.watermark is None:
            return self.values
        return {**self.values, "watermarking_config": _load_single_key(self.watermark)}

    @cached_property
    def loaded_recipe(self) -> Recipe | None:
        """The recipe with its arguments; None without `--recipe`."""
        if self.recipe is None:
            for name, value in (
                ("trust_remote_code", self.trust_remote_code),
                ("recipe_argument", self.recipe_argument),
            ):
                if value:
                    raise InputError(name, "has no use without --recipe", value, "add --recipe")
            return None
        from descant.recipes.loading import load_recipe

        arguments = parse_arguments("recipe_argument", self.recipe_argument or ())
        return load_recipe(self.recipe, trust_remote_code=self.trust_remote_code)(**arguments)

    @property
    def has_strategy(self) -> bool:
        """Whether the recipe chooses the tokens."""
        return self.loaded_recipe is not None and self.loaded_recipe.kind == "strategy"

    def check_parameters(self) -> None:
        """Raise for a config that cannot run and for a recipe that cannot be loaded."""
        options.reject_tensor_fields(self.parameters)
        GenerationConfig.merge(self.parameters, self.file_config(), has_strategy=self.has_strategy)

    def load(self) -> tuple[Any, Any]:
        """Load the model and its tokenizer, after checking the config and the recipe."""
        from descant.models.loading.loading import load

        self.check_parameters()
        with terminal.console().status("loading"):
            return load(self.model, self.dtype, self.device, speech=self.takes_speech)

    def request_extras(self) -> dict[str, Any]:
        """Keyword arguments of `stream` or a request: the recipe, the draft model and its tokenizer."""
        extras: dict[str, Any] = {} if self.loaded_recipe is None else {"recipe": self.loaded_recipe}
        if self.assistant_model is None:
            return extras
        from descant.models.loading.loading import load

        with terminal.console().status("loading the draft model"):
            model, tokenizer = load(self.assistant_model, self.dtype, self.device)
        return {**extras, "assistant_model": model, "assistant_tokenizer": tokenizer}


def typer_callback(kind: type[Command]) -> Callable[..., None]:
    """A command class as a typer function, with the options of the class and of the generation config."""
    hints = get_type_hints(kind)
    own_parameters = [
        options.typer_parameter(field, hints[field.name])
        for field in dataclasses.fields(kind)
        if field.metadata
    ]
    field_parameters = list(options.option_parameters()) if issubclass(kind, ConfigCommand) else []

    def command(**arguments: Any) -> None:
        chosen = {parameter.name: arguments.pop(parameter.name) for parameter in own_parameters}
        raise typer.Exit(_run_guarded(kind, chosen, arguments))

    # A paragraph is one line: the help wraps it to its own width.
    paragraphs = (inspect.getdoc(kind) or "").split("\n\n")
    command.__doc__ = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    command.__annotations__ = {}
    command.__signature__ = inspect.Signature([*own_parameters, *field_parameters])  # type: ignore[attr-defined]
    return command


def _run_guarded(kind: type[Command], chosen: Mapping[str, Any], arguments: Mapping[str, Any]) -> int:
    """Run a command and report errors; returns the exit code."""
    try:
        values: dict[str, Any] = (
            {"values": options.parse_options(arguments)} if issubclass(kind, ConfigCommand) else {}
        )
        with _torch_setup() if kind.needs_torch else nullcontext():
            return kind(**chosen, **values).run()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        terminal.mute_stdout()
        return BROKEN_PIPE
    except Exception as error:
        if chosen["debug"]:
            terminal.print_lines(traceback.format_exc().removesuffix("\n"))
        terminal.print_error(error_text(error, kind))
        usage_errors = ConfigError | InputError | RecipeError | TraceError | UnsupportedModel
        return USAGE if isinstance(error, usage_errors) else FAILURE


def load_watermark_keys(path: str | None) -> dict[str, BaseWatermarkingConfig]:
    """The watermark keys of a file or of the environment, by name."""
    from descant.decoding.watermark.keys import read_settings

    return read_settings(None if path == ENVIRONMENT_KEYS else path)


def parse_arguments(option: str, texts: Sequence[str]) -> dict[str, Any]:
    """Parse the arguments NAME=JSON of an option."""
    arguments: dict[str, Any] = {}
    for given in texts:
        name, equals, text = given.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name.isidentifier():
            raise InputError(option, "must be NAME=JSON", given, "for instance samples=8")
        if name in arguments:
            raise InputError(option, "must give each argument once", given, "leave one out")
        try:
            arguments[name] = json.loads(text)
        except (ValueError, RecursionError):
            advice = f"write text in quotation marks: '{name}=\"text\"'"
            raise InputError(option, "must have JSON after its =", given, advice) from None
    return arguments


def _load_single_key(path: str) -> BaseWatermarkingConfig:
    """The only watermark key of a file or of the environment."""
    keys = load_watermark_keys(path)
    if len(keys) > 1:
        raise InputError("watermark", "must have one key to mark with", sorted(keys), "give a file with one")
    [settings] = keys.values()
    return settings


@contextmanager
def _torch_setup() -> Iterator[None]:
    """A seed of this process, and each warning about public keys once, in the style of the command line."""
    import torch

    from descant.decoding.watermark.keys import PublicKeyWarning

    torch.seed()  # a new process has the same default seed every time
    shown: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("always", PublicKeyWarning)
        show_other = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *details: Any) -> None:
            if not issubclass(category, PublicKeyWarning):
                show_other(message, category, *details)
            elif str(message) not in shown:
                shown.add(str(message))
                terminal.print_warning(message)

        warnings.showwarning = show  # type: ignore[assignment]
        yield


@dataclass(frozen=True, kw_only=True)
class GrammarCommand(DecodingCommand):
    """Options of a command whose text may have to match a grammar."""

    json_schema: str | None = option("The text is JSON that matches this schema.", metavar="FILE")
    regex: str | None = option("The whole text matches this regular expression.", metavar="TEXT")
    choice: list[str] | None = option("The text is one of these; may be repeated.", metavar="TEXT")
    grammar_file: str | None = option("The text matches this grammar: EBNF or Lark.", metavar="FILE")

    @cached_property
    def parameters(self) -> Mapping[str, Any]:
        """The generation parameters, with the grammar of these options."""
        values, grammars = super().parameters, self._grammars()
        if values.get("grammar") is not None:
            grammars["--grammar"] = values["grammar"]
        if len(grammars) > 1:
            raise InputError("grammar", "must be given once", " and ".join(grammars), "give one of them")
        return {**values, "grammar": next(iter(grammars.values()))} if grammars else values

    def _grammars(self) -> dict[str, Mapping[str, Any]]:
        """The grammar of each option that is given."""
        grammars: dict[str, Mapping[str, Any]] = {}
        if self.json_schema is not None:
            grammars["--json-schema"] = {"json_schema": read_json("json_schema", self.json_schema)}
        if self.regex is not None:
            grammars["--regex"] = {"regex": self.regex}
        if self.choice:
            grammars["--choice"] = {"choice": self.choice}
        if self.grammar_file is not None:
            grammars["--grammar-file"] = {"grammar": read_text("grammar_file", self.grammar_file)}
        return grammars


def write_file(name: str, path: str | Path, text: str) -> None:
    """Write the file of an option."""
    with file_errors(name, path, "written"):
        write_text(path, text)


def read_text(name: str, path: str) -> str:
    """The text of an option's file."""
    try:
        with file_errors(name, path):
            return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(name, "must be a file of UTF-8 text", path) from None


def read_json(name: str, path: str) -> Any:
    """The data of an option's JSON file."""
    text = read_text(name, path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(name, f"must be a file of JSON ({error})", path) from None
