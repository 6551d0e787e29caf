"""A command as a dataclass: its annotated fields are arguments and options, `run` does it."""

from __future__ import annotations

import dataclasses
import inspect
import json
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, get_type_hints

import typer

from descant.cli import options, terminal
from descant.config.generation_config import GenerationConfig
from descant.decoding.watermark.schemes import BaseWatermarkingConfig
from descant.decoding.watermark.schemes.keys import PublicKeyWarning, read_settings
from descant.errors import (
    ConfigError,
    DescantError,
    InputError,
    MissingRequirements,
    RecipeError,
    TraceError,
    UnsupportedModel,
    UntrustedRecipe,
)
from descant.models.loading import DTYPES, load
from descant.recipes.loading import load_recipe
from descant.recipes.recipe import Recipe

__all__ = [
    "Command",
    "ConfigCommand",
    "DecodingCommand",
    "load_watermark_keys",
    "parse_recipe_arguments",
    "typer_callback",
]

USAGE, FAILURE, INTERRUPTED, BROKEN_PIPE = 2, 1, 130, 141  # exit codes; the last two as shells report signals
ENVIRONMENT_KEYS: Final = "env"  # in the place of a key's file


@dataclass(frozen=True, kw_only=True)
class Command:
    """What every command takes."""

    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.", metavar="")] = (
        False
    )

    def run(self) -> int:
        """Do it; the exit code."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ConfigCommand(Command):
    """What a command takes that has generation parameters: each as an option, and a config below them."""

    config: Annotated[
        Path | None,
        typer.Option(
            "--config", metavar="PATH", help="A generation config: a JSON file or a model's folder."
        ),
    ] = None
    values: Mapping[str, Any] = field(default_factory=dict)

    def file_config(self) -> GenerationConfig | None:
        """The config of `--config`, which the options overrule and which overrules the model's."""
        if self.config is None:
            return None
        if self.config.is_dir():
            return GenerationConfig.from_pretrained(self.config)
        return GenerationConfig.from_pretrained(self.config.parent, self.config.name)


@dataclass(frozen=True, kw_only=True)
class DecodingCommand(ConfigCommand):
    """What a command that decodes takes: a model, and how to load it."""

    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model's folder, or its name on the hub.")]
    dtype: Annotated[
        str | None, typer.Option(help=f"Precision of the weights: {', '.join(DTYPES)} (as stored).")
    ] = None
    device: Annotated[str | None, typer.Option(help="Where to run: cpu, cuda, cuda:1, mps, ...")] = None
    assistant_model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="A smaller model that guesses ahead: same text, sooner."),
    ] = None

    watermark: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Mark the text with the key in this file; `env`: with the environment's."
        ),
    ] = None

    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="REF",
            help="Somebody's method: a folder, owner/name on the Hub, or an installed one's name.",
        ),
    ] = None
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            metavar="",
            help="Let the code of --recipe run, which may do anything that you may.",
        ),
    ] = False
    recipe_argument: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=JSON", help="An argument of the recipe's own; may be repeated."),
    ] = None

    @cached_property
    def parameters(self) -> Mapping[str, Any]:
        """The generation parameters of the options, and the watermark, whose key is no option."""
        if self.watermark is None:
            return self.values
        return {**self.values, "watermarking_config": _load_single_key(self.watermark)}

    @cached_property
    def loaded_recipe(self) -> Recipe | None:
        """The recipe with its arguments, if there is one."""
        if self.recipe is None:
            for name, value in (
                ("trust_remote_code", self.trust_remote_code),
                ("recipe_argument", self.recipe_argument),
            ):
                if value:
                    raise InputError(name, "has no use without `recipe`", value, "add --recipe")
            return None
        arguments = parse_recipe_arguments(self.recipe_argument or ())
        return load_recipe(self.recipe, trust_remote_code=self.trust_remote_code)(**arguments)

    def load(self) -> tuple[Any, Any]:
        """The model and its tokenizer, once the config and the recipe are known to be right."""
        options.reject_tensor_fields(self.parameters)
        GenerationConfig.merge(self.parameters, self.file_config())
        _ = self.loaded_recipe
        with terminal.console().status("loading"):
            return load(self.model, self.dtype, self.device)

    def request_extras(self) -> dict[str, Any]:
        """The recipe, and the draft model with its tokenizer, as `stream` and a request take them."""
        mine: dict[str, Any] = {} if self.loaded_recipe is None else {"recipe": self.loaded_recipe}
        if self.assistant_model is None:
            return mine
        with terminal.console().status("loading the draft model"):
            model, tokenizer = load(self.assistant_model, self.dtype, self.device)
        return {**mine, "assistant_model": model, "assistant_tokenizer": tokenizer}


def typer_callback(kind: type[Command]) -> Callable[..., None]:
    """A command as the function that typer wants, its options those of the class and of a config it has."""
    hints = get_type_hints(kind, include_extras=True)
    own = {one.name: one for one in dataclasses.fields(kind) if one.name != "values"}
    keyword = inspect.Parameter.KEYWORD_ONLY
    mine = [
        inspect.Parameter(name, keyword, annotation=hints[name], default=_parameter_default(one))
        for name, one in own.items()
    ]

    parameters = list(options.option_parameters()) if issubclass(kind, ConfigCommand) else []

    def command(**given: Any) -> None:
        chosen = {name: given.pop(name) for name in own}
        raise typer.Exit(_run_guarded(kind, chosen, given))

    command.__doc__ = inspect.getdoc(kind)
    command.__annotations__ = {}
    command.__signature__ = inspect.Signature([*mine, *parameters])  # type: ignore[attr-defined]
    return command


def _parameter_default(one: dataclasses.Field[Any]) -> Any:
    """A dataclass field's default as a parameter's."""
    return inspect.Parameter.empty if one.default is dataclasses.MISSING else one.default


def _run_guarded(kind: type[Command], chosen: Mapping[str, Any], given: Mapping[str, Any]) -> int:
    """Run a command; its exit code, whatever happens."""
    try:
        values: dict[str, Any] = (
            {"values": options.parse_options(given)} if issubclass(kind, ConfigCommand) else {}
        )
        with _show_key_warnings():
            return kind(**chosen, **values).run()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        terminal.mute_stdout()
        return BROKEN_PIPE
    except Exception as error:
        if chosen["debug"]:
            terminal.console().print(traceback.format_exc(), end="")
        terminal.print_error(_error_text(error))
        wrong = ConfigError | InputError | RecipeError | TraceError | UnsupportedModel
        return USAGE if isinstance(error, wrong) else FAILURE


def _error_text(error: Exception) -> str:
    """What is said of an error."""
    if isinstance(error, MissingRequirements):  # a list, in the one line that there is
        first, *missing = str(error).splitlines()
        return f"{first} {', '.join(missing)}"
    if type(error) is UntrustedRecipe:  # as it is said here
        return str(error).replace("trust_remote_code=True", "--trust-remote-code")
    return str(error) if isinstance(error, DescantError | OSError) else f"{type(error).__name__}: {error}"


def load_watermark_keys(path: str | None) -> dict[str, BaseWatermarkingConfig]:
    """The watermarks of a file by name, or those of the environment."""
    return read_settings(None if path == ENVIRONMENT_KEYS else path)


def parse_recipe_arguments(given: Sequence[str]) -> dict[str, Any]:
    """The arguments of a recipe from NAME=JSON."""
    found: dict[str, Any] = {}
    for one in given:
        name, equals, text = one.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name.isidentifier():
            raise InputError("recipe_argument", "must be NAME=JSON", one, "for instance samples=8")
        if name in found:
            raise InputError("recipe_argument", "must give each argument once", one, "leave one out")
        try:
            found[name] = json.loads(text)
        except (ValueError, RecursionError):
            do = f"write text in quotation marks: '{name}=\"text\"'"
            raise InputError("recipe_argument", "must have JSON after its =", one, do) from None
    return found


def _load_single_key(path: str) -> BaseWatermarkingConfig:
    """The one watermark of a file, or of the environment."""
    found = load_watermark_keys(path)
    if len(found) > 1:
        raise InputError("watermark", "must have one key to mark with", sorted(found), "give a file with one")
    [settings] = found.values()
    return settings


@contextmanager
def _show_key_warnings() -> Iterator[None]:
    """Show warnings of public keys as the command shows things, each once; others as Python does."""
    said: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("always", PublicKeyWarning)
        before = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *more: Any) -> None:
            if not issubclass(category, PublicKeyWarning):
                before(message, category, *more)
            elif str(message) not in said:
                said.add(str(message))
                terminal.print_warning(message)

        warnings.showwarning = show  # type: ignore[assignment]
        yield
