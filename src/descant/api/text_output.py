"""The result of generate() for prompts given as text: the texts, with their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, overload

import torch

from descant.api.generate_call import GenerateCall
from descant.core.records import Hypothesis, Logprobs
from descant.engine.request import Request
from descant.models.model_output import GenerateOutput
from descant.tokenization.detokenizer import IncrementalDetokenizer
from descant.tokenization.regions import ResponsePart
from descant.tokenization.response_syntax import ToolCall


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
    # The text by regions; None: the model's tokenizer has no markers of thoughts and calls.
    parts: tuple[ResponsePart, ...] | None = field(default=None, compare=False, repr=False)
    num_reasoning_tokens: int = 0  # of the thought, with the tokens that close it

    def __str__(self) -> str:
        return self.text

    @property
    def reasoning(self) -> str:
        """The thought, without its markers."""
        return self._text_of("reasoning")

    @property
    def content(self) -> str:
        """The text without the thought and the tool calls."""
        return self.text if self.parts is None else self._text_of("content")

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls, in the format of the model's family; one that is cut off is content."""
        return tuple(call for part in self.parts or () for call in part.calls)

    def _text_of(self, region: str) -> str:
        return "".join(part.text for part in self.parts or () if part.region == region)


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


def text_output(call: GenerateCall, output: Any) -> TextOutput:
    """The output of a call with texts, after its run."""
    completions = []
    for row, group in enumerate(call.results):
        for index, hypothesis in enumerate(group):
            ids, detokenizer = tuple(hypothesis.tokens.tolist()), call.detokenizer(row)
            text = detokenizer.put(ids) + detokenizer.end()
            reader = call.response_reader(row)
            parts = None if reader is None else (*reader.put(ids), *reader.end())
            num_thought = 0 if reader is None else reader.num_reasoning_tokens
            completions.append(
                Completion(row, index, text, ids, hypothesis.reason, hypothesis, parts, num_thought)
            )
    return TextOutput(completions, output)


def completion_record(tokenizer: Any, request: Request, hypothesis: Hypothesis) -> dict[str, Any]:
    """One returned sequence as JSON values."""
    ids = hypothesis.tokens.tolist()
    completion: dict[str, Any] = {
        "text": completion_text(tokenizer, request, ids),
        "tokens": len(ids),
        "finish_reason": hypothesis.reason,
    }
    if hypothesis.score is not None:
        completion["score"] = float(hypothesis.score)
    if hypothesis.logprobs is not None:
        completion["logprobs"] = _logprobs(tokenizer, ids, hypothesis.logprobs)
    return completion


def completion_text(tokenizer: Any, request: Request, ids: list[int]) -> str:
    """The text that a sequence adds to its prompt, as a stream would give it."""
    stream = IncrementalDetokenizer(
        tokenizer,
        prompt_ids=torch.as_tensor(request.prompt).tolist(),
        stop_strings=request.generation_config.stop_strings or (),
        skip_special_tokens=True,
    )
    return stream.put(ids) + stream.end()


def _logprobs(tokenizer: Any, ids: list[int], logprobs: Logprobs) -> list[dict[str, Any]]:
    """For each token its log-probabilities before and after the processors, and the likeliest tokens."""
    tables = (logprobs.raw, logprobs.processed, logprobs.top, logprobs.top_raw, logprobs.top_processed)
    lines = zip(ids, *(table.tolist() for table in tables), strict=True)
    return [
        {
            **_logprob(tokenizer, token, raw, processed),
            "top": [_logprob(tokenizer, *alternative) for alternative in zip(*best, strict=True)],
        }
        for token, raw, processed, *best in lines
    ]


def _logprob(tokenizer: Any, token: int, raw: float, processed: float) -> dict[str, Any]:
    # JSON has no infinity: a masked token has no log-probability.
    left = processed if isfinite(processed) else None
    return {"id": token, "token": tokenizer.decode([token]), "raw": raw, "processed": left}
