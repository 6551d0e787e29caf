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
from descant.tokenization.detokenizer import IncrementalDetokenizer

__all__ = ["FunctionRecipe"]


@dataclass(frozen=True)
class FunctionRecipe:
    """A function with the model that it decodes; what it says is known when it returns, not before."""

    recipe: Recipe
    model: Any
    tokenizer: Any

    @classmethod
    def from_request(cls, brought: Mapping[str, Any], model: Any, tokenizer: Any) -> FunctionRecipe | None:
        """That of a request, if its recipe is a function."""
        recipe = brought.get("recipe")
        if not isinstance(recipe, Recipe) or recipe.kind != "generate":
            return None
        return cls(recipe, model, tokenizer)

    def stream_events(
        self, given: Mapping[str, Any], argument: GenerationConfig | None, values: Mapping[str, Any]
    ) -> Generator[StreamEvent]:
        """Its answer to one prompt as a stream has it, each sequence whole."""
        for place, (ids, text) in enumerate(self.generate(given, argument, values)):
            yield StreamEvent(0, place, tuple(ids), text, finish_reason="stop")

    def generate(
        self, given: Mapping[str, Any], argument: GenerationConfig | None, values: Mapping[str, Any]
    ) -> list[tuple[list[int], str]]:
        """The new tokens and the text of each sequence for a prompt [1, L]."""
        inputs = dict(given)
        if not self._accepts("attention_mask"):  # one prompt has no padding, and its mask says nothing
            inputs.pop("attention_mask", None)
        if self._accepts("tokenizer"):
            inputs["tokenizer"] = self.tokenizer
        answer: Any = generate(self.model, generation_config=argument, **inputs, **values)
        ids = getattr(answer, "sequences", answer)
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point() or ids.is_complex():
            must = "must return token ids [N, L], or a record with `sequences`"
            raise RecipeError(self.recipe.name, f"{must}, got {type(answer).__name__}")
        prompt = given["input_ids"][0].tolist()
        return [self._split_prompt(line, prompt) for line in ids.tolist()]

    def _accepts(self, name: str) -> bool:
        return self.recipe.accepts_kwargs or name in self.recipe.argument_names

    def _split_prompt(self, line: list[int], prompt: list[int]) -> tuple[list[int], str]:
        """What a sequence adds to its prompt, as ids and as text; all of it where it does not begin so."""
        if self.model.config.is_encoder_decoder:
            return line, self._decode(line, [])
        first = 0
        while first < len(line) and line[first] == self.tokenizer.pad_token_id and line[first] != prompt[0]:
            first += 1
        if line[first : first + len(prompt)] != prompt:
            return line, self._decode(line, [])
        new = line[first + len(prompt) :]
        return new, self._decode(new, prompt)

    def _decode(self, ids: list[int], prompt: list[int]) -> str:
        text = IncrementalDetokenizer(self.tokenizer, prompt_ids=prompt, skip_special_tokens=True)
        return text.put(ids) + text.end()
