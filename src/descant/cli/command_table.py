"""Every command of `descant`: where its class is, and the line of the help that names it.

The help of the program is written from this table: a command that runs a model takes seconds to import.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from descant.cli.command import Command

__all__ = ["COMMANDS", "COMMAND_GROUPS", "CommandEntry"]


@dataclass(frozen=True)
class CommandEntry:
    """The module and class of a command, and the first line of its help."""

    module: str
    class_name: str
    summary: str

    def load(self) -> type[Command]:
        """Import the class of the command."""
        kind: type[Command] = getattr(importlib.import_module(self.module), self.class_name)
        return kind


COMMANDS: Final = {
    "generate": CommandEntry(
        "descant.cli.generate",
        "GenerateCommand",
        "Continue a prompt and stream the text; or, with --input and --output, many prompts.",
    ),
    "chat": CommandEntry(
        "descant.cli.chat.command",
        "ChatCommand",
        "Talk to a model: each line is a turn, and /help lists commands.",
    ),
    "explain": CommandEntry(
        "descant.cli.explain",
        "ExplainCommand",
        "Show what would run and why: strategy, processors in order, stops, and the source of every value.",
    ),
    "serve": CommandEntry(
        "descant.cli.serve",
        "ServeCommand",
        "Serve a model over HTTP with OpenAI's API; every generation parameter is a field of a request.",
    ),
    "run": CommandEntry(
        "descant.cli.run",
        "RunCommand",
        "Run every row of a source through a model, and write the results in shards.",
    ),
    "tree": CommandEntry(
        "descant.cli.tree",
        "TreeCommand",
        "Show the tree of a trace: all hypotheses with scores, dropped and returned ones.",
    ),
    "show": CommandEntry(
        "descant.cli.show",
        "ShowTraceCommand",
        "Show a trace: the text with the probability of every token, and further pictures.",
    ),
    "doctor": CommandEntry(
        "descant.cli.doctor.command",
        "DoctorCommand",
        "Check this machine and write one report: versions, fast paths, laws, parity with transformers, "
        "times.",
    ),
}

COMMAND_GROUPS: Final = {
    "recipe": (
        "Inspect and trust third-party decoding methods, and create and share your own.",
        {
            "show": CommandEntry(
                "descant.cli.recipe",
                "ShowRecipeCommand",
                "Show a recipe: its files and their hash, its requirements and README, and whether it is "
                "trusted.",
            ),
            "trust": CommandEntry(
                "descant.cli.recipe",
                "TrustRecipeCommand",
                "Trust the current version of a recipe, also if it has changed: pin its hash and commit.",
            ),
            "list": CommandEntry(
                "descant.cli.recipe", "ListRecipesCommand", "List installed and trusted recipes."
            ),
            "forget": CommandEntry(
                "descant.cli.recipe",
                "ForgetRecipeCommand",
                "Remove the trust in a recipe: the next use with --trust-remote-code pins its version then.",
            ),
            "new": CommandEntry(
                "descant.cli.recipe",
                "NewRecipeCommand",
                "Create a folder with a working recipe: code, README and tests.",
            ),
            "check": CommandEntry(
                "descant.cli.recipe",
                "CheckRecipeCommand",
                "Run the contract tests of descant.testing for a recipe, then its own tests.",
            ),
            "push": CommandEntry(
                "descant.cli.recipe",
                "PushRecipeCommand",
                "Share a recipe: push its folder to a repository on the Hub, which is created if needed.",
            ),
        },
    ),
    "watermark": (
        "Detect watermarks in texts, create keys, and train detectors.",
        {
            "detect": CommandEntry(
                "descant.cli.watermark",
                "DetectCommand",
                "Detect watermarks in texts: marked, not marked, or too short to tell.",
            ),
            "key": CommandEntry(
                "descant.cli.watermark",
                "KeyCommand",
                "Create a new key, for `descant generate --watermark FILE` and `descant watermark detect "
                "--key FILE`.",
            ),
            "train": CommandEntry(
                "descant.cli.train",
                "TrainCommand",
                "Train a Bayesian detector for a SynthID key, which detects shorter texts than the mean "
                "score.",
            ),
        },
    ),
}
