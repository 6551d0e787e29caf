"""The automaton that finds phrases in a text as it grows, and the constraint that it makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

from descant.decoding.constraints.base import Constraint, UpdateResult, as_token_id

__all__ = ["AhoCorasick", "AnyPhraseConstraint"]


class AhoCorasick(NamedTuple):
    """The trie of some phrases and what holds at each node (Aho and Corasick, 1975); node 0 is its root."""

    children: list[dict[int, int]]  # [S] the node after a token that goes on
    failure_links: list[int]  # [S] the node of the longest proper suffix that is in the trie, too
    depth: list[int]  # [S] how many tokens lead there
    is_match: list[bool]  # [S] whether the text there ends with a phrase
    min_remaining: list[int]  # [S] the fewest tokens to the end of a phrase

    @classmethod
    def from_phrases(cls, phrases: Sequence[Sequence[int]]) -> AhoCorasick:
        """The automaton of phrases, none of them empty and none a prefix of another."""
        children: list[dict[int, int]] = [{}]
        for phrase in phrases:
            node = 0
            for token in phrase:
                if token not in children[node]:
                    children[node][token] = len(children)
                    children.append({})
                node = children[node][token]
        size = len(children)
        made = cls(children, [0] * size, [0] * size, [not below for below in children], [0] * size)
        made._build_links()
        return made

    def _build_links(self) -> None:
        order = [0]  # shorter paths first: `behind` is always shorter
        for node in order:
            for token, child in self.children[node].items():
                order.append(child)
                self.depth[child] = self.depth[node] + 1
                if node:
                    self.failure_links[child] = self.next_node(self.failure_links[node], token)
                    self.is_match[child] |= self.is_match[self.failure_links[child]]
        for node in reversed(order):
            if not self.is_match[node]:
                self.min_remaining[node] = 1 + min(
                    self.min_remaining[child] for child in self.children[node].values()
                )
        for node in order[1:]:
            self.min_remaining[node] = min(
                self.min_remaining[node], self.min_remaining[self.failure_links[node]]
            )

    def next_node(self, node: int, token: int) -> int:
        """The node of the longest suffix of the text, this token included, that is in the trie."""
        while node and token not in self.children[node]:
            node = self.failure_links[node]
        return self.children[node].get(token, 0)


class AnyPhraseConstraint(Constraint):
    """The demand that one of some phrases stands in the text; once it does, it is met for good."""

    def __init__(self, phrases: Sequence[Sequence[int]]) -> None:
        # No `test`: these are sound, and a subclass may not be ready for it yet.
        self.seqlen = max(map(len, phrases))
        self._automaton = AhoCorasick.from_phrases(phrases)
        self._node = 0

    @property
    def completed(self) -> bool:
        """Whether it is met."""
        return self._automaton.is_match[self._node]

    @property
    def min_tokens_left(self) -> int:
        """The fewest tokens that can meet it from here."""
        return self._automaton.min_remaining[self._node]

    def advance(self) -> int | list[int] | None:
        """The tokens that go on with the longest phrase begun."""
        return None if self.completed else list(self._automaton.children[self._node])

    def does_advance(self, token_id: int) -> bool:
        """Whether this token goes on with the longest phrase begun, or completes any."""
        token, automaton, node = as_token_id(token_id), self._automaton, self._node
        if automaton.is_match[node]:
            return False
        return token in automaton.children[node] or (
            node > 0 and automaton.is_match[automaton.next_node(node, token)]
        )

    def update(self, token_id: int) -> UpdateResult:
        """Read a token; one that breaks a phrase leaves the longest beginning that ends the text."""
        token, automaton, node = as_token_id(token_id), self._automaton, self._node
        if automaton.is_match[node]:
            return False, True, False
        self._node = now = automaton.next_node(node, token)
        completed = automaton.is_match[now]
        return completed or automaton.depth[now] > automaton.depth[node], completed, now == 0

    def reset(self) -> None:
        """Go back to where nothing was read."""
        self._node = 0

    def remaining(self) -> int:
        """How many tokens are left of the longest phrase, as if the one begun were that; 0 when it is met."""
        return 0 if self.completed else self.seqlen - self._automaton.depth[self._node]

    def copy(self, stateful: bool = False) -> Self:
        """The same constraint as another object; the automaton is shared."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        if not stateful:
            new.reset()
        return new
