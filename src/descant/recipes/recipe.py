"""A recipe: somebody's decoding method, ready to run."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, Final

from descant.config.fields import freeze
from descant.config.generation_config import FIELDS, GenerationConfig
from descant.errors import ConfigError, InputError, RecipeError

if TYPE_CHECKING:
    from descant.recipes.recipe_files import RecipeFiles

__all__ = ["RECIPE_KINDS", "Recipe"]

# What a recipe may be, and what its callable is given by position.
RECIPE_KINDS: Final[Mapping[str, tuple[str, ...]]] = {
    "generate": ("model",),
    "strategy": ("noise", "stop", "rank_group"),
    "drafter": (),
    "processor": (),
    "wrapper": ("inner",),
}
# By which methods a class is told to be one.
_KIND_METHODS: Final = {
    "strategy": ("propose", "select", "finish"),
    "drafter": ("draft",),
    "wrapper": ("forward", "wrap_cache"),
    "processor": ("process",),
}
# What the loop asks of what it makes.
_REQUIRED_MEMBERS: Final = {
    "strategy": ("needs_log_probs", "columns", "propose", "select", "finish", "drop", "finished_so_far"),
    "drafter": ("is_model_free", "add_requests", "remove_requests", "commit", "draft"),
    "wrapper": ("traits", "wrap_cache", "forward"),
}
_STEP_OUTPUT_FIELDS: Final = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
_MAX_ROWS: Final = 2**16


@dataclass(frozen=True, eq=False)
class Recipe:
    """A decoding method: a function in the place of `generate`, or what makes a part of the loop.

    Called with its own arguments it is the same recipe with these: `recipe(patience=3)`.
    """

    name: str
    kind: str  # of KINDS
    make: Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    source: str = "given"  # "folder", "hub", "package" or "given"
    contents: RecipeFiles | None = None  # the files it was loaded from
    revision: str | None = None  # the commit, of one from the Hub

    def __post_init__(self) -> None:
        taken = sorted(self.argument_names & FIELDS.keys()) if self.kind != "generate" else []
        if taken:
            do = "give it another name, or read the row's own from `params_of(rows)`"
            raise RecipeError(self.name, f"its argument `{taken[0]}` is a generation parameter already: {do}")

    def __call__(self, **arguments: Any) -> Recipe:
        """The recipe with these arguments."""
        self.check_arguments(arguments)
        return replace(self, arguments=MappingProxyType({**self.arguments, **arguments}))

    def __repr__(self) -> str:
        given = "".join(f", {name}={value!r}" for name, value in self.arguments.items())
        return f"Recipe({self.name!r}, {self.kind}{given})"

    @classmethod
    def from_object(cls, given: Any) -> Recipe:
        """A recipe from a class of one of the ports, a function like `generate`, or a module of a package."""
        if isinstance(given, Recipe):
            return given
        name = getattr(given, "__name__", type(given).__name__)
        if isinstance(given, ModuleType):
            return cls.from_namespace(name, vars(given))
        if not callable(given):
            do = "pass a folder, owner/name, the name of an installed one, a function or a class"
            raise InputError("recipe", "must be a recipe", given, do)
        for kind, methods in _KIND_METHODS.items():
            if all(hasattr(given, method) for method in methods):
                return cls(name, kind, given)
        return cls(name, "generate", given)

    @classmethod
    def from_namespace(cls, name: str, names: Mapping[str, Any], **more: Any) -> Recipe:
        """The recipe that a module defines under the one of `KINDS` that it has."""
        found = [kind for kind in RECIPE_KINDS if kind in names]
        if len(found) != 1:
            has = " and ".join(found) or "none"
            raise RecipeError(name, f"must define one of {', '.join(RECIPE_KINDS)}, got {has}")
        make = names[found[0]]
        if not callable(make):
            raise RecipeError(name, f"its `{found[0]}` must be a function or a class, got {make!r}")
        return cls(name, found[0], make, **more)

    @cached_property
    def argument_names(self) -> frozenset[str]:
        """The names of its own arguments."""
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return frozenset(
            name
            for name, one in self._parameters.items()
            if one.kind in named and name not in self._positional_names
        )

    @cached_property
    def key(self) -> tuple[Hashable, ...]:
        """What tells it apart: recipes of one key can share what they make."""
        try:
            told: Hashable = freeze(dict(self.arguments))
            hash(told)
        except TypeError:
            told = tuple((name, id(value)) for name, value in sorted(self.arguments.items()))
        return ("recipe", self.name, id(self.make), told)

    @property
    def row_flag(self) -> str:
        """The parameter of rows that ask for its wrapper, and the name of that among wrappers."""
        return repr(self.key)

    def call(self, *given: Any, **more: Any) -> Any:
        """What its callable returns, of what it is given by position, its arguments and further ones."""
        said = {**self.arguments, **more}
        required = [
            name for name in self._parameters if name in self.argument_names and self._is_required(name)
        ]
        missing = [name for name in required if name not in said]
        if missing:
            raise RecipeError(self.name, f"needs an argument `{missing[0]}`: pass it beside `recipe`")
        return self.make(*given, **said)

    def build(self, *given: Any) -> Any:
        """What it makes, of what the loop gives it and its own arguments."""
        made = self.call(*given)
        lacks = [name for name in _REQUIRED_MEMBERS[self.kind] if not hasattr(made, name)]
        if lacks:
            raise RecipeError(self.name, f"its {self.kind} must have `{lacks[0]}`, got {type(made).__name__}")
        return made

    def row_params(self, config: GenerationConfig) -> dict[str, Any]:
        """The parameters that it gives to its rows, or sets otherwise than the config does."""
        if self.kind == "wrapper":
            return {self.row_flag: 1}
        params = getattr(self.make, "params", None)
        if self.kind != "strategy" or params is None:
            return {}
        values = dict(params(config, **self.arguments))
        copies, wanted = values.get("num_sequences"), config.num_return_sequences
        if copies is None or copies == wanted:
            return values
        if not isinstance(copies, int) or isinstance(copies, bool) or not wanted <= copies <= _MAX_ROWS:
            must = f"must give a request at least the {wanted} rows of `num_return_sequences`"
            raise RecipeError(self.name, f"its `params` {must}, got `copies` {copies!r}")
        for name in _STEP_OUTPUT_FIELDS if config.return_dict_in_generate else ():
            if getattr(config, name):
                must = f"has no meaning with {self.name}, whose rows are not what it returns"
                raise ConfigError((name, "recipe"), must, True, "leave it out")
        return values

    @cached_property
    def processor(self) -> Any:
        """Its processor, which keeps nothing and so serves everybody."""
        made = self.call()
        if not hasattr(made, "process") and not callable(made):
            raise RecipeError(self.name, f"its processor must have `process`, got {type(made).__name__}")
        return made

    def split_arguments(self, given: Mapping[str, Any]) -> tuple[Recipe, dict[str, Any]]:
        """The recipe with those of these keyword arguments that are its own, and the others."""
        mine = {name: value for name, value in given.items() if name in self.argument_names}
        rest = {name: value for name, value in given.items() if name not in mine}
        return (self(**mine) if mine else self), rest

    @property
    def configs(self) -> tuple[str, ...]:
        """The names of the generation configs that lie beside it."""
        return () if self.contents is None else tuple(self.contents.configs)

    def config(self, name: str = "generation_config.json") -> GenerationConfig:
        """A generation config that lies beside it."""
        if self.contents is None or name not in self.configs:
            has = ", ".join(self.configs) or "none"
            raise RecipeError(self.name, f"has no generation config `{name}`: it has {has}")
        try:
            data = json.loads(self.contents.files[name])
        except (ValueError, RecursionError):
            raise RecipeError(self.name, f"its `{name}` must be JSON") from None
        if not isinstance(data, dict):
            raise RecipeError(self.name, f"its `{name}` must hold an object")
        return GenerationConfig.from_dict(data)

    def _is_required(self, name: str) -> bool:
        return self._parameters[name].default is inspect.Parameter.empty

    @property
    def _positional_names(self) -> tuple[str, ...]:
        """The names of what the loop gives it: whatever comes first."""
        return tuple(self._parameters)[: len(RECIPE_KINDS[self.kind])]

    @cached_property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        try:
            return inspect.signature(self.make).parameters
        except (TypeError, ValueError):
            raise RecipeError(self.name, f"its `{self.kind}` must have a signature") from None

    @cached_property
    def accepts_kwargs(self) -> bool:
        """Whether it takes arguments of any name."""
        return any(one.kind == inspect.Parameter.VAR_KEYWORD for one in self._parameters.values())

    def check_arguments(self, arguments: Iterable[str]) -> None:
        """Raise for arguments that it has no place for."""
        odd = [name for name in arguments if name not in self.argument_names]
        if odd and not self.accepts_kwargs:
            has = ", ".join(sorted(self.argument_names)) or "none"
            raise RecipeError(self.name, f"takes no argument `{odd[0]}`: its own are {has}")
