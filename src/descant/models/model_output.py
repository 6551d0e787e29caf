"""The base of all outputs of generate(), apart from its classes, which import transformers' generation."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from transformers.utils.generic import ModelOutput


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
