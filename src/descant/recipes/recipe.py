"""A loaded recipe: a decoding method that is ready to run."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, Final

from descant.config.fields import freeze
from descant.config.generation_config import FIELDS, STEP_OUTPUT_FIELDS, GenerationConfig
from descant.errors import ConfigError, InputError, RecipeError
from descant.recipes.recipe_files import KIND_METHODS, RECIPE_KINDS, REQUIRED_MEMBERS

if TYPE_CHECKING:  # the interfaces take torch, which the list of recipes does not need
    from descant.core.interfaces import StrategyTraits
    from descant.recipes.recipe_files import RecipeFiles


# Members of the interfaces that a recipe may leave out, and what the engine then uses.
_MEMBER_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "strategy": {"required_states": (), "drafter": None, "has_groups": False},
    "wrapper": {"required_states": ()},
}
_MAX_ROWS: Final = 2**16


@dataclass(frozen=True, eq=False)
class Recipe:
    """A decoding method: a function that replaces `generate`, or a factory of one of the engine's parts.

    Calling a recipe binds arguments: `recipe(patience=3)`.
    """

    name: str
    kind: str  # one of RECIPE_KINDS
    make: Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    source: str = "given"  # "folder", "hub", "package" or "given"
    contents: RecipeFiles | None = None  # files that it was loaded from
    revision: str | None = None  # commit on the Hub

    def __post_init__(self) -> None:
        conflicts = sorted(self.argument_names & FIELDS.keys()) if self.kind != "generate" else []
        if conflicts:
            advice = "give it another name, or read the row's own from `params_of(rows)`"
            raise RecipeError(
                self.name, f"its argument `{conflicts[0]}` is a generation parameter already: {advice}"
            )

    def __call__(self, **arguments: Any) -> Recipe:
        """The recipe with bound arguments."""
        self.check_arguments(arguments)
        return replace(self, arguments=MappingProxyType({**self.arguments, **arguments}))

    def __repr__(self) -> str:
        given = "".join(f", {name}={value!r}" for name, value in self.arguments.items())
        return f"Recipe({self.name!r}, {self.kind}{given})"

    @classmethod
    def from_object(cls, source: Any) -> Recipe:
        """A recipe from a class that implements an interface, a function like `generate`, or a module."""
        if isinstance(source, Recipe):
            return source
        name = getattr(source, "__name__", type(source).__name__)
        if isinstance(source, ModuleType):
            return cls.from_namespace(name, vars(source))
        if not callable(source):
            advice = "pass a folder, owner/name, the name of an installed one, a function or a class"
            raise InputError("recipe", "must be a recipe", source, advice)
        for kind, methods in KIND_METHODS.items():
            if all(hasattr(source, method) for method in methods):
                return cls(name, kind, source)
        return cls(name, "generate", source)

    @classmethod
    def from_namespace(cls, name: str, names: Mapping[str, Any], **fields: Any) -> Recipe:
        """The recipe that a module defines, under the name of its kind."""
        kinds = [kind for kind in RECIPE_KINDS if kind in names]
        if len(kinds) != 1:
            defined = " and ".join(kinds) or "none"
            raise RecipeError(name, f"must define one of {', '.join(RECIPE_KINDS)}, got {defined}")
        make = names[kinds[0]]
        if not callable(make):
            raise RecipeError(name, f"its `{kinds[0]}` must be a function or a class, got {make!r}")
        return cls(name, kinds[0], make, **fields)

    @cached_property
    def argument_names(self) -> frozenset[str]:
        """The names of the recipe's own arguments."""
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        # The first ones are positional arguments that the engine passes.
        own = list(self._parameters.items())[len(RECIPE_KINDS[self.kind]) :]
        return frozenset(name for name, parameter in own if parameter.kind in named)

    @cached_property
    def key(self) -> tuple[Hashable, ...]:
        """Identity: recipes with the same key can share the part that they build."""
        try:
            arguments: Hashable = freeze(dict(self.arguments))
            hash(arguments)
        except TypeError:
            arguments = tuple((name, id(value)) for name, value in sorted(self.arguments.items()))
        return ("recipe", self.name, id(self.make), arguments)

    @property
    def row_flag(self) -> str:
        """The row parameter that activates its wrapper, also the wrapper's name."""
        return repr(self.key)

    def call(self, *positional: Any, **extra: Any) -> Any:
        """Call the recipe's callable with positional arguments, bound arguments and extra ones."""
        arguments = {**self.arguments, **extra}
        for name, parameter in self._parameters.items():
            is_missing = name in self.argument_names and name not in arguments
            if is_missing and parameter.default is inspect.Parameter.empty:
                raise RecipeError(self.name, f"needs an argument `{name}`: pass it beside `recipe`")
        return self.make(*positional, **arguments)

    def build(self, *positional: Any) -> Any:
        """Build the part, from the engine's positional arguments and the bound arguments."""
        part = self.call(*positional)
        missing = [name for name in REQUIRED_MEMBERS[self.kind] if not hasattr(part, name)]
        if missing:
            raise RecipeError(
                self.name, f"its {self.kind} must have `{missing[0]}`, got {type(part).__name__}"
            )
        for name, default in _MEMBER_DEFAULTS.get(self.kind, {}).items():
            if not hasattr(part, name):
                setattr(part, name, default)
        if self.kind == "strategy" and not hasattr(part, "traits"):
            from descant.core.interfaces import StrategyTraits

            part.traits = StrategyTraits()
        return part

    @property
    def strategy_traits(self) -> StrategyTraits:
        """The traits that its strategy class declares; of a function nothing is known but the defaults."""
        from descant.core.interfaces import StrategyTraits

        declared = getattr(self.make, "traits", None)
        return declared if isinstance(declared, StrategyTraits) else StrategyTraits()

    @property
    def strategy_columns(self) -> frozenset[str]:
        """The names of the columns that its strategy class declares."""
        return frozenset(getattr(self.make, "columns", ()))

    def row_params(self, config: GenerationConfig) -> dict[str, Any]:
        """Row parameters that the recipe adds to or changes from those of the config."""
        if self.kind == "wrapper":
            return {self.row_flag: 1}
        if self.kind != "strategy":
            return {}
        values, num_returned = self._given_params(config), config.num_return_sequences
        forks = "max_rows" in values
        least = 1 if forks else num_returned
        num_sequences = values.setdefault("num_sequences", least)
        self._check_count("num_sequences", num_sequences, least, "`num_return_sequences`")
        max_rows = values.setdefault("max_rows", num_sequences)
        self._check_count("max_rows", max_rows, num_sequences, "`num_sequences`")
        if forks or num_sequences != num_returned:
            for name in STEP_OUTPUT_FIELDS if config.return_dict_in_generate else ():
                if getattr(config, name):
                    must = f"is not supported with {self.name}, whose rows are not its returned sequences"
                    raise ConfigError((name, "recipe"), must, True, "leave it out")
        if num_returned > 1 and not (forks or config.do_sample):
            must = f"must be 1 in greedy search with {self.name}, whose rows do not fork"
            do = "set do_sample=True, or have its `params` give `max_rows`"
            raise ConfigError("num_return_sequences", must, num_returned, do)
        return values

    def _check_count(self, name: str, value: Any, least: int, source: str) -> None:
        """Raise for a number of rows that its `params` must not give."""
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MAX_ROWS:
            must = f"must give a request at least the {least} rows of {source}, at most {_MAX_ROWS}"
            raise RecipeError(self.name, f"its `params` {must}, got `{name}` {value!r}")

    def forks(self, config: GenerationConfig) -> bool:
        """Whether its rows may fork at any step, so that it says itself how many sequences there are."""
        return "max_rows" in self._given_params(config)

    def _given_params(self, config: GenerationConfig) -> dict[str, Any]:
        """The row parameters that its strategy gives."""
        params = getattr(self.make, "params", None) if self.kind == "strategy" else None
        return {} if params is None else dict(params(config, **self.arguments))

    @cached_property
    def processor(self) -> Any:
        """The processor; it has no state of its own, so all requests share it."""
        processor = self.call()
        if not hasattr(processor, "process") and not callable(processor):
            raise RecipeError(self.name, f"its processor must have `process`, got {type(processor).__name__}")
        return processor

    def split_arguments(self, arguments: Mapping[str, Any]) -> tuple[Recipe, dict[str, Any]]:
        """Bind those of the arguments that are the recipe's own; returns the recipe and the rest."""
        own = {name: value for name, value in arguments.items() if name in self.argument_names}
        rest = {name: value for name, value in arguments.items() if name not in own}
        return (self(**own) if own else self), rest

    @property
    def configs(self) -> tuple[str, ...]:
        """The names of the generation configs that come with it."""
        return () if self.contents is None else tuple(self.contents.configs)

    def config(self, name: str = "generation_config.json") -> GenerationConfig:
        """A generation config that comes with it."""
        if self.contents is None or name not in self.configs:
            available = ", ".join(self.configs) or "none"
            raise RecipeError(self.name, f"has no generation config `{name}`: it has {available}")
        return GenerationConfig.from_dict(json.loads(self.contents.files[name]))  # checked when it was read

    @cached_property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        try:
            return inspect.signature(self.make).parameters
        except (TypeError, ValueError):
            raise RecipeError(self.name, f"its `{self.kind}` must have a signature") from None

    @cached_property
    def accepts_kwargs(self) -> bool:
        """Whether it accepts arbitrary keyword arguments."""
        parameters = self._parameters.values()
        return any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in parameters)

    def check_arguments(self, arguments: Iterable[str]) -> None:
        """Raise RecipeError for unknown arguments."""
        unknown = [name for name in arguments if name not in self.argument_names]
        if unknown and not self.accepts_kwargs:
            available = ", ".join(sorted(self.argument_names)) or "none"
            raise RecipeError(self.name, f"takes no argument `{unknown[0]}`: its own are {available}")
