"""Different prompts for every generated text."""

from __future__ import annotations

from typing import Any

__all__ = ["COUNT", "chat", "story"]

_TOPICS = (
    "the history of bridges", "how bread is baked", "life in a harbour town", "the migration of birds",
    "a journey by night train", "the making of glass", "why leaves change their colour", "old maps",
    "the work of a beekeeper", "mountains and weather", "learning a second language", "the first railways",
    "a quarrel between neighbours", "how rivers shape the land", "the invention of printing", "lighthouses",
    "growing vegetables in a city", "the moons of Jupiter", "a lost letter", "how clocks measure time",
    "the life of a medieval scribe", "coral reefs", "the smell of rain", "choosing a good dog",
    "the rules of chess", "a winter without snow", "how vaccines work", "the price of coffee",
    "building a wooden boat", "deserts at night", "the sound of a violin", "a day in a hospital",
    "how cities get their water", "an island nobody visits", "memory and forgetting", "volcanoes",
    "repairing an old bicycle", "the first day at school", "what makes people laugh", "salt",
)  # fmt: skip
_INSTRUCTIONS = (
    "Write a long essay about {}.",
    "Tell me a story about {}.",
    "Explain {} to a curious child, at length.",
    "Write a newspaper article on {}.",
    "Describe {} in great detail.",
    "Write a letter to a friend about {}.",
    "Give a long talk on {}.",
    "What should everybody know about {}? Answer in several paragraphs.",
)
_CHARACTERS = (
    "a girl named Lily", "a boy named Tom", "an old bear", "a small blue car", "a curious cat", "a wise owl",
    "a brave mouse", "a lonely cloud", "a kind farmer", "a young bird", "a little red fish", "two brothers",
    "a shy dragon", "a clever fox", "a tiny seed", "a sleepy dog",
)  # fmt: skip
_CLAUSES = (
    "who lived near the sea", "who loved to sing", "who was afraid of the dark", "who had lost a shoe",
    "who wanted to fly", "who never said thank you", "who found a shiny key", "who liked to bake",
    "who lived in a big tree", "who had a secret friend", "who wished for snow", "who could not sleep",
    "who went to the market", "who broke a cup", "who had a red hat", "who saw a rainbow",
    "who met a stranger", "who heard a noise", "who was always hungry", "who drew a picture",
)  # fmt: skip

COUNT = len(_TOPICS) * len(_INSTRUCTIONS)


def chat(tokenizer: Any, index: int) -> list[int]:
    """The tokens of the `index`th prompt of a chat model, which requests a long text."""
    text = _INSTRUCTIONS[index // len(_TOPICS) % len(_INSTRUCTIONS)].format(_TOPICS[index % len(_TOPICS)])
    turns = [{"role": "user", "content": text}]
    whole = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)
    return list(whole["input_ids"])


def story(tokenizer: Any, index: int) -> list[int]:
    """The tokens of the `index`th beginning of a story."""
    character, clause = (
        _CHARACTERS[index % len(_CHARACTERS)],
        _CLAUSES[index // len(_CHARACTERS) % len(_CLAUSES)],
    )
    return list(tokenizer(f"Once upon a time, there was {character} {clause}.")["input_ids"])
