"""generate() as a method of a model: what transformers' own method tolerates is tolerated, with a warning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

from descant.config.generation_config import GenerationConfig
from descant.config.validation import TOLERATED, unused_warning
from descant.errors import ConfigError

__all__ = ["IGNORED_INPUTS", "explain_pipeline", "warn_unused"]

# Inputs of a training step, which trainers pass on and transformers drops before it decodes.
IGNORED_INPUTS: Final = frozenset({"labels", "num_items_in_batch"})

_PIPELINE_FIELDS: Final = frozenset({"do_sample", "temperature"})
_INTERNAL_MODULES: Final = frozenset({"descant", "torch", "contextlib"})


def warn_unused(configs: Sequence[GenerationConfig], argument: Any, fields: Mapping[str, Any]) -> None:
    """Warn of values that lenient configs have ignored; those of the model's own config are expected."""
    arguments = argument if isinstance(argument, list | tuple) else (argument,)
    ignored: dict[str, Any] = {}
    for config in configs:
        ignored |= {name: value for name, value in config.unused.items() if name in TOLERATED}
    for name, value in ignored.items():
        if name in fields or any(getattr(one, name, None) is not None for one in arguments):
            warnings.warn(unused_warning(name, value), UserWarning, stacklevel=_caller_level())


def _caller_level() -> int:
    """The stack level of the first caller outside of Descant and torch, for the function that calls this."""
    names = [name.partition(".")[0] for name in _calling_modules()][2:]
    return 1 + next((level for level, name in enumerate(names) if name not in _INTERNAL_MODULES), 0)


def _calling_modules() -> list[str]:
    """The name of the module of each function on the stack, this one first."""
    names: list[str] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        names.append(frame.f_globals.get("__name__", ""))
        frame = frame.f_back
    return names


@contextmanager
def explain_pipeline() -> Iterator[None]:
    """A block whose errors say that the pipeline of transformers that makes the call sets a parameter."""
    try:
        yield
    except ConfigError as error:
        names = {error.field} if isinstance(error.field, str) else {*error.field}
        is_in_pipeline = any(name.startswith("transformers.pipelines.") for name in _calling_modules())
        if not names & _PIPELINE_FIELDS or not is_in_pipeline:
            raise
        hint = "the pipeline sets do_sample=True unless it is given: pass do_sample=False to the pipeline"
        raise error.with_hint(hint) from None
