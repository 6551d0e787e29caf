"""The Aho-Corasick automaton over token phrases, and the constraint built on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

from descant.decoding.constraints.base import Constraint, UpdateResult, as_token_id

__all__ = ["AhoCorasick", "AnyPhraseConstraint"]


class AhoCorasick(NamedTuple):
    """The trie of several phrases with failure links (Aho and Corasick, 1975); node 0 is the root."""

    children: list[dict[int, int]]  # [S] child node by token
    failure_links: list[int]  # [S] node of the longest proper suffix in the trie
    depth: list[int]  # [S] tokens from the root
    is_match: list[bool]  # [S] whether a phrase ends at the node
    min_remaining: list[int]  # [S] fewest tokens to the end of a phrase

    @classmethod
    def from_phrases(cls, phrases: Sequence[Sequence[int]]) -> AhoCorasick:
        """The automaton of non-empty phrases, none a prefix of another."""
        children: list[dict[int, int]] = [{}]
        for phrase in phrases:
            node = 0
            for token in phrase:
                if token not in children[node]:
                    children[node][token] = len(children)
                    children.append({})
                node = children[node][token]
        size = len(children)
        automaton = cls(children, [0] * size, [0] * size, [not edges for edges in children], [0] * size)
        automaton._build_links()
        return automaton

    def _build_links(self) -> None:
        order = [0]  # breadth first: a failure link always leads to a shorter path
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
        """The node of the longest suffix of the text, this token included, in the trie."""
        while node and token not in self.children[node]:
            node = self.failure_links[node]
        return self.children[node].get(token, 0)


class AnyPhraseConstraint(Constraint):
    """The text must contain one of several phrases; once met, it stays met."""

    def __init__(self, phrases: Sequence[Sequence[int]]) -> None:
        # Skip `test`: these phrases are valid, and a subclass may not be initialised yet.
        self.seqlen = max(map(len, phrases))
        self._automaton = AhoCorasick.from_phrases(phrases)
        self._node = 0

    @property
    def completed(self) -> bool:
        """Whether the constraint is met."""
        return self._automaton.is_match[self._node]

    @property
    def min_tokens_left(self) -> int:
        """The fewest tokens that can still meet it."""
        return self._automaton.min_remaining[self._node]

    def advance(self) -> int | list[int] | None:
        """The tokens that continue the longest started phrase."""
        return None if self.completed else list(self._automaton.children[self._node])

    def does_advance(self, token_id: int) -> bool:
        """Whether this token continues the longest started phrase or completes any."""
        token, automaton, node = as_token_id(token_id), self._automaton, self._node
        if automaton.is_match[node]:
            return False
        return token in automaton.children[node] or (
            node > 0 and automaton.is_match[automaton.next_node(node, token)]
        )

    def update(self, token_id: int) -> UpdateResult:
        """Read a token; on a mismatch the longest matching suffix remains."""
        token, automaton, node = as_token_id(token_id), self._automaton, self._node
        if automaton.is_match[node]:
            return False, True, False
        self._node = next_node = automaton.next_node(node, token)
        completed = automaton.is_match[next_node]
        return completed or automaton.depth[next_node] > automaton.depth[node], completed, next_node == 0

    def reset(self) -> None:
        """Return to the state before any token."""
        self._node = 0

    def remaining(self) -> int:
        """The tokens left of the longest phrase, counted from the started one; 0 when met."""
        return 0 if self.completed else self.seqlen - self._automaton.depth[self._node]

    def copy(self, stateful: bool = False) -> Self:
        """A copy that shares the automaton; `stateful` keeps the progress."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        if not stateful:
            new.reset()
        return new
