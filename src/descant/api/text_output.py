"""What generate() returns for prompts given as text: the texts, with their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from descant.api.call import Call
from descant.api.inputs import RaggedPrompts
from descant.core.records import Hypothesis
from descant.models.model_output import GenerateOutput

__all__ = ["Completion", "TextOutput", "text_output"]


@dataclass(frozen=True)
class Completion:
    """The text that one sequence adds to its prompt."""

    row: int  # index of the prompt
    sequence: int  # index among the prompt's `num_return_sequences`
    text: str  # without special tokens, and without the stop string that ended it
    token_ids: tuple[int, ...]
    finish_reason: str  # "eos", "length", "time", "stop"
    # With its score, log-probabilities and drafts, where it has them.
    hypothesis: Hypothesis = field(compare=False, repr=False)

    def __str__(self) -> str:
        return self.text


class TextOutput(Sequence[Completion]):
    """The completions of a call, prompt by prompt; `str` gives the text.

    `output` is the output object of the same call with token ids: `sequences`, `scores`, `trace`.
    """

    def __init__(self, completions: Sequence[Completion], output: GenerateOutput) -> None:
        self._completions, self.output = tuple(completions), output

    @property
    def texts(self) -> list[str]:
        """The text of each sequence."""
        return [completion.text for completion in self._completions]

    @property
    def text(self) -> str:
        """The text of the first sequence."""
        return self._completions[0].text

    @property
    def trace(self) -> Any:
        """The trace of the call, with `trace=True`; None without."""
        return self.output.get("trace")

    def __len__(self) -> int:
        return len(self._completions)

    @overload
    def __getitem__(self, index: int) -> Completion: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Completion]: ...

    def __getitem__(self, index: int | slice) -> Completion | Sequence[Completion]:
        return self._completions[index]

    def __str__(self) -> str:
        return "\n".join(self.texts)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.texts!r})"

    def _repr_html_(self) -> str | None:
        """The pictures of its trace in a notebook; None without a trace."""
        return self.output._repr_html_()


def text_output(
    call: Call, prompts: RaggedPrompts, results: Sequence[Sequence[Hypothesis]], output: Any
) -> TextOutput:
    """The output of a call with texts: `results` has the sequences of each prompt."""
    completions = []
    for row, group in enumerate(results):
        for index, hypothesis in enumerate(group):
            ids, detokenizer = tuple(hypothesis.tokens.tolist()), call.detokenizer(prompts, row)
            text = detokenizer.put(ids) + detokenizer.end()
            completions.append(Completion(row, index, text, ids, hypothesis.reason, hypothesis))
    return TextOutput(completions, output)
