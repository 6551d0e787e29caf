"""Generated text on standard output: as it streams, of function recipes, and why it ended."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from descant.api.generate import generate
from descant.api.stream import StreamEvent
from descant.cli import terminal
from descant.config.generation_config import DEFAULT_NEW_TOKENS, GenerationConfig
from descant.errors import RecipeError
from descant.recipes.recipe import Recipe
from descant.tokenization.detokenizer import IncrementalDetokenizer

__all__ = ["LENGTH_FIELDS", "DefaultLengthNote", "FunctionRecipe", "StreamPrinter"]

SEPARATOR: Final = "---\n"


class StreamPrinter:
    """Prints sequences one after the other: the first one as it grows, the others afterwards."""

    def __init__(self) -> None:
        self._pending_texts: dict[int, str] = {}  # not printed yet
        self._finished: set[int] = set()
        self._current = 0
        self._has_separator = True  # the first sequence needs none
        self._last_char = "\n"
        self._output = terminal.UntrustedText()

    def print_event(self, event: StreamEvent) -> None:
        """Print what is next in order; raises the error of an event."""
        if event.error is not None:
            raise event.error
        self._pending_texts[event.sequence] = self._pending_texts.get(event.sequence, "") + (event.text or "")
        if event.finish_reason is not None:
            self._finished.add(event.sequence)
        while True:
            text = self._pending_texts.pop(self._current, "")
            if not self._has_separator and (text or self._current in self._finished):
                self.end_line()
                self._write(SEPARATOR)
                self._has_separator = True
            self._write(text)
            if self._current not in self._finished:
                return
            self._current += 1
            self._has_separator = False

    def end_line(self) -> None:
        """End the last line, if needed."""
        if self._last_char != "\n":
            self._write("\n")

    def _write(self, text: str) -> None:
        if text:
            self._last_char = text[-1]  # before writing, which may be interrupted
            self._output.write(text)


LENGTH_FIELDS: Final = frozenset({"max_new_tokens", "max_length"})


class DefaultLengthNote:
    """Collects why texts of a run ended, and says once that the default length has cut one."""

    def __init__(self) -> None:
        self._is_due = False

    def add(self, config: GenerationConfig, finish_reason: str | None) -> None:
        """Take the end of a text that was generated with a merged config."""
        self._is_due |= finish_reason == "length" and not config.given & LENGTH_FIELDS

    def print_if_due(self) -> None:
        """Print the note, if a text was cut."""
        if self._is_due:
            terminal.print_info(
                f"stopped at the default of {DEFAULT_NEW_TOKENS} new tokens: set --max-new-tokens"
            )


@dataclass(frozen=True)
class FunctionRecipe:
    """A function recipe with its model; its text is known only when it returns."""

    recipe: Recipe
    model: Any
    tokenizer: Any

    @classmethod
    def from_request(
        cls, request_extras: Mapping[str, Any], model: Any, tokenizer: Any
    ) -> FunctionRecipe | None:
        """The function recipe of a request; None if it has no such recipe."""
        recipe = request_extras.get("recipe")
        if not isinstance(recipe, Recipe) or recipe.kind != "generate":
            return None
        return cls(recipe, model, tokenizer)

    def stream_events(
        self, request_args: Mapping[str, Any], file_config: GenerationConfig | None, values: Mapping[str, Any]
    ) -> Generator[StreamEvent]:
        """The result for one prompt as stream events, one per sequence."""
        for index, (ids, text) in enumerate(self.generate(request_args, file_config, values)):
            yield StreamEvent(0, index, tuple(ids), text, finish_reason="stop")

    def generate(
        self, request_args: Mapping[str, Any], file_config: GenerationConfig | None, values: Mapping[str, Any]
    ) -> list[tuple[list[int], str]]:
        """New tokens and text of each sequence for a prompt [1, L]."""
        inputs = dict(request_args)
        if not self._accepts("attention_mask"):  # redundant: one prompt has no padding
            inputs.pop("attention_mask", None)
        if self._accepts("tokenizer"):
            inputs["tokenizer"] = self.tokenizer
        result: Any = generate(self.model, generation_config=file_config, **inputs, **values)
        ids = getattr(result, "sequences", result)
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point() or ids.is_complex():
            requirement = "must return token ids [N, L], or a record with `sequences`"
            raise RecipeError(self.recipe.name, f"{requirement}, got {type(result).__name__}")
        prompt = request_args["input_ids"][0].tolist()
        return [self._split_prompt(sequence, prompt) for sequence in ids.tolist()]

    def _accepts(self, name: str) -> bool:
        return self.recipe.accepts_kwargs or name in self.recipe.argument_names

    def _split_prompt(self, sequence: list[int], prompt: list[int]) -> tuple[list[int], str]:
        """The new tokens of a sequence and their text; all tokens if it does not start with the prompt."""
        if self.model.config.is_encoder_decoder:
            return sequence, self._decode(sequence, [])
        start = 0
        while (
            start < len(sequence)
            and sequence[start] == self.tokenizer.pad_token_id
            and sequence[start] != prompt[0]
        ):
            start += 1
        if sequence[start : start + len(prompt)] != prompt:
            return sequence, self._decode(sequence, [])
        new = sequence[start + len(prompt) :]
        return new, self._decode(new, prompt)

    def _decode(self, ids: list[int], prompt: list[int]) -> str:
        text = IncrementalDetokenizer(self.tokenizer, prompt_ids=prompt, skip_special_tokens=True)
        return text.put(ids) + text.end()
