"""`descant explain`: what a config would run, and where each of its values comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from descant.cli import terminal
from descant.cli.command import ConfigCommand
from descant.config.generation_config import GenerationConfig
from descant.engine.planner import as_model
from descant.models.loading import load_meta_model

__all__ = ["ExplainCommand"]


@dataclass(frozen=True, kw_only=True)
class ExplainCommand(ConfigCommand):
    """Say what would run and why: strategy, processors in order, stops, and where every value comes from.

    Nothing is generated, and of the model only its configs are read.
    """

    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A model's folder, or its name on the hub.")
    ] = None

    def run(self) -> int:
        """Print the explanation."""
        argument = self.file_config()
        if self.model is None:
            merged, facts = GenerationConfig.merge(self.values, argument), None
        else:
            model = load_meta_model(self.model)
            theirs = GenerationConfig.from_transformers(model.generation_config)
            # The adapter and not the model: it has no config of its own to merge a second time.
            merged, facts = GenerationConfig.merge(self.values, argument, theirs), as_model(model)
        terminal.write(merged.explain(facts) + "\n")
        return 0
