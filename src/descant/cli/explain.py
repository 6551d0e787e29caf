"""`descant explain`: what a config would run, and the source of each value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from descant.cli import terminal
from descant.cli.command import ConfigCommand
from descant.config.generation_config import GenerationConfig

__all__ = ["ExplainCommand"]


@dataclass(frozen=True, kw_only=True)
class ExplainCommand(ConfigCommand):
    """Show what would run and why: strategy, processors in order, stops, and the source of every value.

    Nothing is generated, and only the configs of the model are read.
    """

    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="A folder, a GGUF file, or a name on the Hub."),
    ] = None

    def run(self) -> int:
        """Print the explanation."""
        file_config = self.file_config()
        if self.model is None:
            merged, model_interface = GenerationConfig.merge(self.values, file_config), None
        else:
            from descant.engine.planner import as_model
            from descant.models.loading import load_meta_model

            model = load_meta_model(self.model)
            model_config = GenerationConfig.from_transformers(model.generation_config)
            # The adapter, not the model: the model's config would be merged a second time.
            merged, model_interface = (
                GenerationConfig.merge(self.values, file_config, model_config),
                as_model(model),
            )
        terminal.write_untrusted(merged.explain(model_interface) + "\n")
        return 0
