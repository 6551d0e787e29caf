"""The building blocks of decoding methods, for recipes to import.

| To change | Write | From here |
|---|---|---|
| the choice of tokens | a strategy | `Sampling`, `Backtracking` with `Retraction`, or `Strategy` |
| the logits | a processor | `LogitsProcessor`, whose lines are in a `Context` |
| the distribution | a wrapper | `ModelWrapper`, or the interface `Wrapper` |
| the drafts | a drafter | the interface `Drafter`, which returns a `Proposal` |

The records of a step are `Rows`, `Proposal`, `ForwardOutput`, `Selection`, `Tokens` and `Hypothesis`.
`row_params` gives the parameters of each row, `index_rows` some rows of a column, `vocab_mask` the mask of
token ids.
"""

from descant.config.generation_config import GenerationConfig
from descant.core.context import Context, row_params
from descant.core.interfaces import (
    DraftContext,
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
from descant.core.records import ForwardOutput, Hypothesis, Proposal, Selection, Tokens
from descant.core.rows import Column, Rows, index_rows
from descant.decoding.guidance import ModelWrapper
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
