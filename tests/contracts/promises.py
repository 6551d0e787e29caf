"""What a config promises about the new tokens of a row, as far as it can be checked on the tokens alone."""

from __future__ import annotations

import re

import torch

from descant.config.generation_config import GenerationConfig
from tests.contracts.configs import ALLOWING, TEXTS, TRIE
from tests.unit.decoding.constraints.reference import look_through


class Violation(AssertionError):
    """A call that was answered in a way it must not be."""


def stopped(config: GenerationConfig, prompt: list[int], new: list[int]) -> int | None:
    """The place of the first new token whose text completes a stop string or makes the regex match."""
    texts = [TEXTS[token] if token < len(TEXTS) else "" for token in (*prompt, *new)]
    strings = config.stop_strings or ()
    strings = (strings,) if isinstance(strings, str) else strings
    for at in range(len(new)):
        before, own = "".join(texts[: len(prompt) + at]), texts[len(prompt) + at]
        # A string that ends in this token, wherever it began.
        if any(string in (before + own)[-len(own) - len(string) + 1 :] for string in strings if own):
            return at
        said = "".join(texts[len(prompt) : len(prompt) + at + 1])
        if config.stop_regex is not None and re.search(config.stop_regex, said):
            return at
    return None


class Promises:
    """Checks of the rules of a config on the new tokens of one row."""

    def __init__(
        self, config: GenerationConfig, source: list[int], prompt: list[int], body: list[int], longest: int
    ) -> None:
        self.config, self.source, self.prompt, self.body = config, source, prompt, body
        self.whole = [*prompt, *body]
        # Forced tokens come before all rules but those after them.
        self.forced = set()
        if config.forced_bos_token_id is not None and len(prompt) == 1:
            self.forced.add(0)
        if config.forced_eos_token_id is not None:
            self.forced.add(longest - 1)

    def check(self, batch: int) -> None:
        """Raise Violation where one is broken."""
        config = self.config
        # Where what is ruled out becomes finite, or a thought's end is forced, no ban is certain.
        if not config.remove_invalid_values and config.thinking_budget is None:
            self._words()
            self._repeats()
            self._copies()
            self._allowed(batch)
        self._phrases()
        self._thought()
        self._timestamps()

    def _phrases(self) -> None:
        phrases = self.config.banned_phrases or ()
        said = "".join(TEXTS[token] for token in self.body if token < len(TEXTS))
        for phrase in (phrases,) if isinstance(phrases, str) else phrases:
            if phrase in said:
                raise Violation(f"the banned phrase {phrase!r} in {said!r}")

    def _free(self) -> list[int]:
        """The places of the body whose token was not forced."""
        return [at for at in range(len(self.body)) if at not in self.forced]

    def _endings(self, size: int) -> list[tuple[int, tuple[int, ...]]]:
        """The sequences of that size that end with a token which was not forced, with its place."""
        first = len(self.prompt)
        return [
            (first + at, tuple(self.whole[first + at + 1 - size : first + at + 1]))
            for at in self._free()
            if first + at + 1 >= size
        ]

    def _words(self) -> None:
        ids = self.config.eos_token_id
        eos = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
        for word in self.config.bad_words_ids or ():
            if list(word) in [[one] for one in eos]:
                continue  # as documented: the end itself cannot be banned
            if any(found == tuple(word) for _, found in self._endings(len(word))):
                raise Violation(f"the bad word {list(word)} in {self.body} after {self.prompt}")

    def _repeats(self) -> None:
        size, window = self.config.no_repeat_ngram_size, self.config.no_repeat_ngram_window
        if not size or size > len(self.whole):
            return
        for place, found in self._endings(size):
            start = max(0, place - window) if window else 0  # of the tokens before it
            seen = {tuple(self.whole[at : at + size]) for at in range(start, place - size + 1)}
            if found in seen:
                raise Violation(f"{found} for the second time in {self.whole} at {place}")

    def _copies(self) -> None:
        size = self.config.encoder_no_repeat_ngram_size
        if not size or size > len(self.source):
            return
        source = {tuple(self.source[at : at + size]) for at in range(len(self.source) - size + 1)}
        for place, found in self._endings(size):
            if found in source:
                raise Violation(f"{found} of the source {self.source} in {self.whole} at {place}")

    def _allowed(self, batch: int) -> None:
        function = self.config.prefix_allowed_tokens_fn
        if function is TRIE:
            self._listed()
        if function not in ALLOWING:
            return
        for at in self._free():
            allowed = torch.as_tensor(function(batch, torch.tensor(self.whole[: len(self.prompt) + at])))
            if self.body[at] not in allowed.tolist():
                raise Violation(f"{self.body[at]} at {at} of {self.body}, which the prefix does not allow")

    def _listed(self) -> None:
        """Of sequences that are listed one is written, or a beginning of one."""
        said = [token for token in self.body if token != 2]
        if not self.forced & set(range(len(self.body))) and not TRIE.allowed(said):
            raise Violation(f"{self.body}, of which nothing is listed")

    def _thought(self) -> None:
        config = self.config
        budget, end = config.thinking_budget, list(config.thinking_end or ())
        if budget is None or config.thinking_start or config.processor_order is not None:
            return  # where a thought begins is then the row's own affair
        if len(self.body) < budget + len(end) or set(range(budget, budget + len(end))) & self.forced:
            return
        if not any(self.body[at : at + len(end)] == end for at in range(budget + 1)):
            raise Violation(f"{self.body} thinks more than {budget} tokens, {end} never came")

    def _timestamps(self) -> None:
        config = self.config
        mark = config.no_timestamps_token_id
        if (
            not config.return_timestamps
            or config.processor_order is not None
            or config.thinking_budget is not None
        ):
            return
        if mark in self.body:
            raise Violation(f"the token {mark} for no timestamps in {self.body}")


def unmet(config: GenerationConfig, body: list[int]) -> tuple[int, ...]:
    """The places of the constraints that new tokens do not meet, those of `constraints` first."""
    nested = [one.token_ids for one in config.constraints or ()] + list(config.force_words_ids or ())
    choices = [[list(part) for part in one] if not isinstance(one[0], int) else [list(one)] for one in nested]
    met = look_through(choices, body, config.ordered_constraints, config.constraint_gap).met
    return tuple(place for place in range(len(choices)) if place not in met)
