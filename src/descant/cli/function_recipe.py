"""A recipe that is a function in the place of generate(): it is called, and its answer is text."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from descant.api.generate import generate
from descant.api.stream import StreamEvent
from descant.config.generation_config import GenerationConfig
from descant.errors import RecipeError
from descant.recipes.recipe import Recipe
from descant.tokenization.detokenizer import TextStream

__all__ = ["Function"]


@dataclass(frozen=True)
class Function:
    """A function with the model that it decodes; what it says is known when it returns, not before."""

    recipe: Recipe
    model: Any
    tokenizer: Any

    @classmethod
    def of(cls, brought: Mapping[str, Any], model: Any, tokenizer: Any) -> Function | None:
        """That of a request, if its recipe is a function."""
        recipe = brought.get("recipe")
        if not isinstance(recipe, Recipe) or recipe.kind != "generate":
            return None
        return cls(recipe, model, tokenizer)

    def events(
        self, given: Mapping[str, Any], argument: GenerationConfig | None, values: Mapping[str, Any]
    ) -> Generator[StreamEvent]:
        """Its answer to one prompt as a stream has it, each sequence whole."""
        for place, (ids, text) in enumerate(self.answer(given, argument, values)):
            yield StreamEvent(0, place, tuple(ids), text, finish_reason="stop")

    def answer(
        self, given: Mapping[str, Any], argument: GenerationConfig | None, values: Mapping[str, Any]
    ) -> list[tuple[list[int], str]]:
        """The new tokens and the text of each sequence for a prompt [1, L]."""
        inputs = dict(given)
        if not self._takes("attention_mask"):  # one prompt has no padding, and its mask says nothing
            inputs.pop("attention_mask", None)
        if self._takes("tokenizer"):
            inputs["tokenizer"] = self.tokenizer
        answer: Any = generate(self.model, generation_config=argument, **inputs, **values)
        ids = getattr(answer, "sequences", answer)
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point() or ids.is_complex():
            must = "must return token ids [N, L], or a record with `sequences`"
            raise RecipeError(self.recipe.name, f"{must}, got {type(answer).__name__}")
        prompt = given["input_ids"][0].tolist()
        return [self._read(line, prompt) for line in ids.tolist()]

    def _takes(self, name: str) -> bool:
        return self.recipe.anything or name in self.recipe.takes

    def _read(self, line: list[int], prompt: list[int]) -> tuple[list[int], str]:
        """What a sequence adds to its prompt, as ids and as text; all of it where it does not begin so."""
        if self.model.config.is_encoder_decoder:
            return line, self._text(line, [])
        first = 0
        while first < len(line) and line[first] == self.tokenizer.pad_token_id and line[first] != prompt[0]:
            first += 1
        if line[first : first + len(prompt)] != prompt:
            return line, self._text(line, [])
        new = line[first + len(prompt) :]
        return new, self._text(new, prompt)

    def _text(self, ids: list[int], prompt: list[int]) -> str:
        text = TextStream(self.tokenizer, prompt_ids=prompt, skip_special_tokens=True)
        return text.put(ids) + text.end()
