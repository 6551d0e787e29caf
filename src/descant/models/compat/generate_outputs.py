"""The output classes of generate(): those of transformers, with the fields of Descant after theirs.

Import this module where an output is made: transformers' generation takes seconds to import.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from transformers.generation import utils as generation

from descant.models.model_output import GenerateOutput


@dataclass(repr=False)
class GenerateDecoderOnlyOutput(GenerateOutput, generation.GenerateDecoderOnlyOutput):
    """Output of a decoder-only model without beams."""

    logprobs: Any = None
    speculation: Any = None
    sequence_counts: Any = None  # of each prompt, where a recipe says how many it has
    trace: Any = None


@dataclass(repr=False)
class GenerateEncoderDecoderOutput(GenerateOutput, generation.GenerateEncoderDecoderOutput):
    """Output of an encoder-decoder model without beams."""

    logprobs: Any = None
    speculation: Any = None
    sequence_counts: Any = None  # of each prompt, where a recipe says how many it has
    trace: Any = None


@dataclass(repr=False)
class GenerateBeamDecoderOnlyOutput(GenerateOutput, generation.GenerateBeamDecoderOnlyOutput):
    """Output of a decoder-only model with beams."""

    logprobs: Any = None
    unmet_constraints: Any = None
    trace: Any = None


@dataclass(repr=False)
class GenerateBeamEncoderDecoderOutput(GenerateOutput, generation.GenerateBeamEncoderDecoderOutput):
    """Output of an encoder-decoder model with beams."""

    logprobs: Any = None
    unmet_constraints: Any = None
    trace: Any = None


# By (has beams, is encoder-decoder).
OUTPUT_CLASSES: Final[dict[tuple[bool, bool], type[GenerateOutput]]] = {
    (False, False): GenerateDecoderOnlyOutput,
    (False, True): GenerateEncoderDecoderOutput,
    (True, False): GenerateBeamDecoderOnlyOutput,
    (True, True): GenerateBeamEncoderDecoderOutput,
}
