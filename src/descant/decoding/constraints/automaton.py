"""The automaton that finds phrases in a text as it grows, and the constraint that it makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

from descant.decoding.constraints.base import Constraint, Step, token_of

__all__ = ["Automaton", "Contained"]


class Automaton(NamedTuple):
    """The trie of some phrases and what holds at each node (Aho and Corasick, 1975); node 0 is its root."""

    children: list[dict[int, int]]  # [S] the node after a token that goes on
    behind: list[int]  # [S] the node of the longest proper suffix that is in the trie, too
    depth: list[int]  # [S] how many tokens lead there
    ends: list[bool]  # [S] whether the text there ends with a phrase
    least: list[int]  # [S] the fewest tokens to the end of a phrase

    @classmethod
    def of(cls, phrases: Sequence[Sequence[int]]) -> Automaton:
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
        made._link()
        return made

    def _link(self) -> None:
        order = [0]  # shorter paths first: `behind` is always shorter
        for node in order:
            for token, child in self.children[node].items():
                order.append(child)
                self.depth[child] = self.depth[node] + 1
                if node:
                    self.behind[child] = self.after(self.behind[node], token)
                    self.ends[child] |= self.ends[self.behind[child]]
        for node in reversed(order):
            if not self.ends[node]:
                self.least[node] = 1 + min(self.least[child] for child in self.children[node].values())
        for node in order[1:]:
            self.least[node] = min(self.least[node], self.least[self.behind[node]])

    def after(self, node: int, token: int) -> int:
        """The node of the longest suffix of the text, this token included, that is in the trie."""
        while node and token not in self.children[node]:
            node = self.behind[node]
        return self.children[node].get(token, 0)


class Contained(Constraint):
    """The demand that one of some phrases stands in the text; once it does, it is met for good."""

    def __init__(self, phrases: Sequence[Sequence[int]]) -> None:
        # No `test`: these are sound, and a subclass may not be ready for it yet.
        self.seqlen = max(map(len, phrases))
        self._automaton = Automaton.of(phrases)
        self._node = 0

    @property
    def completed(self) -> bool:
        """Whether it is met."""
        return self._automaton.ends[self._node]

    @property
    def least(self) -> int:
        """The fewest tokens that can meet it from here."""
        return self._automaton.least[self._node]

    def advance(self) -> int | list[int] | None:
        """The tokens that go on with the longest phrase begun."""
        return None if self.completed else list(self._automaton.children[self._node])

    def does_advance(self, token_id: int) -> bool:
        """Whether this token goes on with the longest phrase begun, or completes any."""
        token, automaton, node = token_of(token_id), self._automaton, self._node
        if automaton.ends[node]:
            return False
        return token in automaton.children[node] or (
            node > 0 and automaton.ends[automaton.after(node, token)]
        )

    def update(self, token_id: int) -> Step:
        """Read a token; one that breaks a phrase leaves the longest beginning that ends the text."""
        token, automaton, node = token_of(token_id), self._automaton, self._node
        if automaton.ends[node]:
            return False, True, False
        self._node = now = automaton.after(node, token)
        completed = automaton.ends[now]
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
