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
from descant.core.context import Context, params_of
from descant.core.interfaces import (
    Cache,
    Drafter,
    Facts,
    Model,
    Noise,
    Peers,
    Processor,
    Stop,
    Strategy,
    Wrapper,
)
from descant.core.records import Aid, Hypothesis, Output, Proposal, Selection, Tokens
from descant.core.rows import Column, Rows, pick
from descant.decoding.guidance.model_wrapper import Wrapped
from descant.decoding.processors.base import LogitsProcessor, marked, number
from descant.decoding.strategies.backtracking import Doubt, Rewinding
from descant.decoding.strategies.sampling import Sampling
from descant.errors import ConfigError, DescantError, InputError, RecipeError, RowError

__all__ = [
    "Aid",
    "Cache",
    "Column",
    "ConfigError",
    "Context",
    "DescantError",
    "Doubt",
    "Drafter",
    "Facts",
    "GenerationConfig",
    "Hypothesis",
    "InputError",
    "LogitsProcessor",
    "Model",
    "Noise",
    "Output",
    "Peers",
    "Processor",
    "Proposal",
    "RecipeError",
    "Rewinding",
    "RowError",
    "Rows",
    "Sampling",
    "Selection",
    "Stop",
    "Strategy",
    "Tokens",
    "Wrapped",
    "Wrapper",
    "marked",
    "number",
    "params_of",
    "pick",
]
