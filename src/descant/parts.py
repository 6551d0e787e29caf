"""The parts that a method of your own is made of, under one name, for recipes to import from.

| To change | Write | From here |
|---|---|---|
| the choice | a strategy | `Sampling`, `Rewinding` and `Doubt`, or the port `Strategy` |
| the logits | a processor | `LogitsProcessor`, its lines in a `Context` |
| the distribution | a wrapper | `Wrapped`, or the port `Wrapper` |
| the guesses ahead | a drafter | the port `Drafter`, which answers with a `Proposal` |

What a step hands around are `Rows`, `Proposal`, `Output`, `Selection`, `Tokens` and `Hypothesis`; `params_of`
gives the parameters of each row, `pick` some rows of a column, `marked` the columns that token ids name.
"""

from descant.config.generation_config import GenerationConfig
from descant.core.context import Context, row_params
from descant.core.interfaces import (
    Drafter,
    Model,
    ModelTraits,
    NoiseSource,
    Processor,
    RankGroup,
    RowCache,
    StopCondition,
    Strategy,
    Wrapper,
)
from descant.core.records import DraftContext, ForwardOutput, Hypothesis, Proposal, Selection, Tokens
from descant.core.rows import Column, Rows, index_rows
from descant.decoding.guidance.model_wrapper import ModelWrapper
from descant.decoding.processors.base import LogitsProcessor, check_number, vocab_mask
from descant.decoding.strategies.backtracking import Backtracking, Retraction
from descant.decoding.strategies.sampling import Sampling
from descant.errors import ConfigError, DescantError, InputError, RecipeError, RowError

__all__ = [
    "Backtracking",
    "Column",
    "ConfigError",
    "Context",
    "DescantError",
    "DraftContext",
    "Drafter",
    "ForwardOutput",
    "GenerationConfig",
    "Hypothesis",
    "InputError",
    "LogitsProcessor",
    "Model",
    "ModelTraits",
    "ModelWrapper",
    "NoiseSource",
    "Processor",
    "Proposal",
    "RankGroup",
    "RecipeError",
    "Retraction",
    "RowCache",
    "RowError",
    "Rows",
    "Sampling",
    "Selection",
    "StopCondition",
    "Strategy",
    "Tokens",
    "Wrapper",
    "check_number",
    "index_rows",
    "row_params",
    "vocab_mask",
]
