"""`descant eval`: lm-eval's command line with the backend `descant`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from descant.cli.command import Command
from descant.cli.options import argument
from descant.errors import MissingExtra

BACKEND: Final = "descant"
_TARGET: Final = "descant.api.compat.lm_eval_backend:DescantLM"


@dataclass(frozen=True, kw_only=True)
class EvaluateCommand(Command):
    """Run lm-eval's benchmarks on a model, with any method of Descant.

    All arguments are those of lm-eval's own command: `descant eval --model_args pretrained=FOLDER --tasks
    NAME`. `descant eval -- --help` lists them. Without `--model` the backend is `descant`,
    which is added to those that it has.
    """

    context_settings: ClassVar[Mapping[str, Any]] = {"ignore_unknown_options": True}

    arguments: list[str] = argument("ARGUMENTS", "Arguments of lm-eval.")

    def run(self) -> int:
        """Hand over to lm-eval, which reads its arguments from `sys.argv`."""
        try:
            import lm_eval.models  # noqa: F401 - else a registry with `descant` alone would not be filled
            from lm_eval.__main__ import cli_evaluate
            from lm_eval.api.registry import model_registry
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "lm_eval":
                raise
            raise MissingExtra("eval", "`descant eval`") from None
        if BACKEND not in model_registry:  # newer versions of lm-eval find its entry point
            model_registry.register(BACKEND, target=_TARGET)
        given = list(self.arguments)
        is_run = given[0] not in ("ls", "validate") and not {"--help", "-h"} & {*given}
        names = {text.partition("=")[0] for text in given}
        if is_run and not names & {"--model", "-M", "--config", "-C"}:
            given += ["--model", BACKEND]
        before, sys.argv = sys.argv, ["lm_eval", *given]
        try:
            cli_evaluate()
        finally:
            sys.argv = before
        return 0
