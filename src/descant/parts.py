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

from descant.config import GenerationConfig
from descant.context import Context, params_of
from descant.errors import ConfigError, DescantError, InputError, RecipeError, RowError
from descant.guidance.wrapped import Wrapped
from descant.ports import Cache, Drafter, Facts, Model, Noise, Peers, Processor, Stop, Strategy, Wrapper
from descant.processors.base import LogitsProcessor, marked, number
from descant.rows import Column, Rows, pick
from descant.step import Aid, Hypothesis, Output, Proposal, Selection, Tokens
from descant.strategies.rewinding import Doubt, Rewinding
from descant.strategies.sampling import Sampling

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
