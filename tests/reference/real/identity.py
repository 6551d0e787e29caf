"""Greedy identity on pretrained models: the same tokens with any drafter, draft length and batch.

`python -m tests.reference.real.identity` runs all of it and prints a table; `--model`, `--drafter` and
`--prompts` take
a part. Every drafter continues every prompt in batches of 1, 3 and 8, while the number of drafts goes round
from 1 to 8 batch by batch. What it says is held to the same prompt without drafts. fp32 rounds otherwise in
another shape: where two tokens differ of which the model scores both within 1e-4 of the best, that is a tie,
and counted as such.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import descant
from tests.contracts.speculation import near
from tests.reference.real.prompts import ARTICLES, PROMPTS
from tests.support import pretrained
from tests.support.pretrained import Pretrained
from tests.support.tiny_models import pad

TIE = 1e-4
BATCHES = (1, 3, 8)
COUNTS = tuple(range(1, 9))
ALWAYS = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}

# ------------------------------------------------------------------------ prompts
_WHO = ("dog", "girl", "robot", "king", "baker", "frog", "teacher", "sailor", "cat", "boy", "bird", "farmer")
_HOW = (
    "little",
    "old",
    "brave",
    "tired",
    "clever",
    "sad",
    "green",
    "hungry",
    "quiet",
    "funny",
    "tall",
    "shy",
)
_WHERE = (
    "the park",
    "a small house",
    "the sea",
    "the forest",
    "school",
    "the market",
    "a red boat",
    "the moon",
)
_WHAT = ("ball", "book", "key", "cake", "letter", "hat", "stone", "flower", "lamp", "clock", "map", "coin")
_DOES = ("find", "paint", "lose", "count", "carry", "repair", "hide", "share", "draw", "buy")
_TEMPLATES = (
    "Once upon a time there was a {how} {who} who lived near {where}.",
    "The {how} {who} wanted to {does} a {what}, but",
    "Lily and the {who} went to {where}. They saw a {how} {what}.",
    "Question: Why did the {who} {does} the {what}?\nAnswer:",
    "def {does}_{what}(items):\n    for {who} in items:\n        if {who}.{how}:\n",
    "The {what} was {how}. The {what} was {how}. The {what}",
    "List: {what}, {who}, {what}, {who}, {what},",
    'Say it again: "A {how} {who} can {does} a {what} at {where}." Again: "A {how} {who}',
    "In {where}, nobody knows how to {does} a {what}. Yesterday",
    "A {who} is a {how} animal that",
    "{what} = {does}({who})\nprint({what})\n{what} = {does}(",
    "Dear {who}, thank you for the {how} {what}. We will {does} it at {where}. Dear {who}, thank you",
)


def prompts(count: int) -> list[str]:
    """So many different prompts: sentences of a few patterns, and pieces of longer text."""
    rng, made = random.Random(6), dict.fromkeys(PROMPTS)
    whole = [word for article in ARTICLES for word in article.split()]
    while len(made) < count:
        if rng.random() < 0.2:
            start, size = rng.randrange(len(whole) - 40), rng.randint(3, 40)
            made[" ".join(whole[start : start + size])] = None
            continue
        names = {"who": _WHO, "how": _HOW, "where": _WHERE, "what": _WHAT, "does": _DOES}
        made[rng.choice(_TEMPLATES).format(**{name: rng.choice(some) for name, some in names.items()})] = None
    return list(made)[:count] if count >= len(PROMPTS) else rng.sample(list(made), count)


# ------------------------------------------------------------------------ drafters
Fields = Callable[[Pretrained, int], dict[str, Any]]  # of a call, by the model and how many are drafted


def _helped(name: str | None, share: float = 1.0) -> Fields:
    """A draft model: a pretrained one, or mostly the model itself."""

    def fields(target: Pretrained, count: int) -> dict[str, Any]:
        given = {"num_assistant_tokens": count, **ALWAYS}
        if name is None:
            return {"assistant_model": near(target.model, share), **given}
        helper = pretrained.load(name)
        both = {"tokenizer": target.tokenizer, "assistant_tokenizer": helper.tokenizer}
        return {"assistant_model": helper.model, **(both if name != "smol-draft" else {}), **given}

    return fields


_CONSTANT = {"num_assistant_tokens_schedule": "constant"}
_LOOKING: dict[str, Fields] = {
    "prompt lookup": lambda _, count: {"prompt_lookup_num_tokens": count, **_CONSTANT},
    "prompt lookup, adaptive": lambda _, count: {"prompt_lookup_num_tokens": 2 * count},
    "suffix lookup": lambda _, count: {"suffix_lookup_num_tokens": count, **_CONSTANT},
    "suffix lookup, shared": lambda _, count: {
        "suffix_lookup_num_tokens": count, "suffix_lookup_shared": True, **_CONSTANT
    },
    "early exit": lambda target, count: {
        "assistant_early_exit": max(1, 2 * target.model.config.num_hidden_layers // 3),
        "num_assistant_tokens": count,
        **ALWAYS,
    },
}  # fmt: skip

DRAFTERS: dict[str, dict[str, Fields]] = {
    "stories15m": {
        **_LOOKING,
        "a draft model": _helped(None, 0.998),
        "minimind2-small": _helped("minimind2-small"),
    },
    "minimind2-small": {
        **_LOOKING,
        "a draft model": _helped(None, 0.998),
        "stories15m": _helped("stories15m"),
    },
    "smollm2": {
        **_LOOKING,
        "smol-draft": _helped("smol-draft"),
        "stories15m": _helped("stories15m"),
        "minimind2-small": _helped("minimind2-small"),
    },
}
# It answers in few words, and to what is no question in none: as if nothing ended, there is more to compare.
ENDLESS = ("minimind2-small",)
WHOLE = {"stories15m": 500, "minimind2-small": 500, "smollm2": 60}  # prompts


# ------------------------------------------------------------------------ the trial
@dataclass
class Tally:
    """What was compared, and what became of the drafts."""

    prompts: int = 0
    tokens: int = 0
    ties: int = 0
    differ: list[str] = field(default_factory=list)
    tried: int = 0
    right: int = 0
    forwards: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        rate = self.right / max(self.tried, 1)
        return (
            f"{self.prompts} prompts, {self.tokens} tokens: {len(self.differ)} differ, {self.ties} ties; "
            f"{self.right} of {self.tried} guesses stood ({rate:.0%}), {self.seconds:.0f} s"
        )


@dataclass
class Trial:
    """A model, its prompts, and its output without drafts."""

    model: Pretrained
    rows: Sequence[Sequence[int]]
    new: int = 64
    plain: list[list[int]] = field(default_factory=list)

    @classmethod
    def of(cls, name: str, count: int, new: int = 64) -> Trial:
        """The trial of a model with so many prompts."""
        model = pretrained.load(name)
        made = cls(model, [_prompt_ids(model, text) for text in prompts(count)], new)
        for part in made.parts(max(BATCHES)):
            made.plain += made.said(part)[0]
        return made

    def parts(self, size: int) -> Iterator[list[int]]:
        """The numbers of the prompts, in batches."""
        for first in range(0, len(self.rows), size):
            yield list(range(first, min(first + size, len(self.rows))))

    def said(self, part: Sequence[int], **drafts: Any) -> tuple[list[list[int]], Any]:
        """The new tokens of some prompts, up to and with their end; and the record."""
        ids, mask = pad([self.rows[at] for at in part], self.model.pad, "left")
        out = descant.generate(
            self.model.model,
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=self.new,
            return_dict_in_generate=True,
            **({"eos_token_id": None} if self.model.name in ENDLESS else {}),
            **drafts,
        )
        return [self._cut(row) for row in out.sequences[:, ids.shape[1] :].tolist()], out

    def _cut(self, row: list[int]) -> list[int]:
        eos: Any = () if self.model.name in ENDLESS else self.model.eos
        ends = {eos} if isinstance(eos, int) else set(eos)
        return row[: next((at + 1 for at, token in enumerate(row) if token in ends), len(row))]

    def run(self, drafter: str, sizes: Sequence[int] = BATCHES, counts: Sequence[int] = COUNTS) -> Tally:
        """Every prompt in batches of every size, with drafts."""
        fields, tally, began = DRAFTERS[self.model.name][drafter], Tally(), time.process_time()
        for size in sizes:
            for turn, part in enumerate(self.parts(size)):
                count = counts[turn % len(counts)]
                found, out = self.said(part, **fields(self.model, count))
                for at, mine in zip(part, found, strict=True):
                    self._compare(tally, at, mine, f"{drafter}, {count} guesses, batch {size}, prompt {at}")
                for one in out.speculation:
                    tally.tried += sum(one.drafted)
                    tally.right += one.saved_forwards
                    tally.forwards += one.forwards
        tally.seconds = time.process_time() - began
        return tally

    def _compare(self, tally: Tally, at: int, mine: list[int], where: str) -> None:
        wanted = self.plain[at]
        tally.prompts += 1
        tally.tokens += len(wanted)
        if mine == wanted:
            return
        pairs = enumerate(zip(mine, wanted, strict=False))
        place = next((step for step, (a, b) in pairs if a != b), min(len(mine), len(wanted)))
        if place < min(len(mine), len(wanted)) and self._tie(at, place, (mine[place], wanted[place])):
            tally.ties += 1
        else:
            tally.differ.append(f"{where}, at token {place}: {mine[place:][:4]}, not {wanted[place:][:4]}")

    def _tie(self, at: int, place: int, tokens: tuple[int, int]) -> bool:
        """Whether the model scores two tokens alike after what both have before them."""
        with torch.no_grad():
            ids = torch.tensor([[*self.rows[at], *self.plain[at][:place]]])
            logits: Tensor = self.model.model(ids).logits[0, -1]
        return bool((logits[list(tokens)] > logits.max() - TIE).all())


def _prompt_ids(model: Pretrained, text: str) -> list[int]:
    """The tokens of a prompt in the chat template of the model."""
    template = getattr(model.tokenizer, "chat_template", None)
    if model.name in ENDLESS and template is not None:
        turns = [{"role": "user", "content": text}]
        text = model.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return model.tokens(text)


def main() -> None:
    """Run the selected trials and print their results."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(prog="python -m tests.reference.real.identity")
    parser.add_argument("--model", choices=DRAFTERS, action="append")
    parser.add_argument("--drafter", action="append")
    parser.add_argument("--prompts", type=int, help="instead of 500, and of 60 for smollm2")
    parser.add_argument("--new", type=int, default=64, help="tokens for each prompt")
    asked = parser.parse_args()
    wrong = 0
    for name in asked.model or DRAFTERS:
        trial = Trial.of(name, asked.prompts or WHOLE[name], asked.new)
        for drafter in DRAFTERS[name]:
            if asked.drafter is None or drafter in asked.drafter:
                tally = trial.run(drafter)
                wrong += len(tally.differ)
                print(f"{name} <- {drafter}: {tally}", *tally.differ[:5], sep="\n  ", flush=True)
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
