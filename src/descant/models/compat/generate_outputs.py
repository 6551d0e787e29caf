"""The output classes of generate(): those of transformers, with the fields of Descant after theirs.

Import this module where an output is made: transformers' generation takes seconds to import.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Final

from transformers.generation import utils as generation
from transformers.utils.generic import ModelOutput

__all__ = [
    "OUTPUT_CLASSES",
    "GenerateBeamDecoderOnlyOutput",
    "GenerateBeamEncoderDecoderOutput",
    "GenerateDecoderOnlyOutput",
    "GenerateEncoderDecoderOutput",
    "GenerateOutput",
]


class GenerateOutput(ModelOutput):
    """An output read by attribute, key or index: a `ModelOutput` of transformers.

    A value that was not requested is None as an attribute, and neither a key nor an entry of the tuple.
    Attributes and keys are one: setting either sets both, and setting None removes the key. The documented
    fields come first, in their documented order, then those of Descant.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)  # type: ignore[no-untyped-call]
        if value is None and name in self:
            OrderedDict.__delitem__(self, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self)})"

    def _repr_html_(self) -> str | None:
        """The pictures of its trace in a notebook; None without a trace."""
        trace = self.get("trace")
        html: str | None = None if trace is None else trace._repr_html_()
        return html


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
