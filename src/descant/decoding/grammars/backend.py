"""The interface of grammar libraries: compiled grammars, their matchers, and token masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from descant.config.grammar_spec import GrammarSpec

__all__ = ["CompiledGrammar", "GrammarBackend", "GrammarMatcher", "UnsupportedGrammar", "decode_prefix"]


class UnsupportedGrammar(Exception):
    """A grammar that a backend cannot run, with the reason as its text."""


def decode_prefix(prefix: bytes) -> str:
    """The text before a grammar, which must end with a whole character."""
    try:
        return prefix.decode()
    except UnicodeDecodeError:
        raise UnsupportedGrammar(
            "the prompt ends within a character, which token healing cannot keep"
        ) from None


class GrammarMatcher(Protocol):
    """A position in the language of a grammar: after some tokens, all of which are text."""

    def accept(self, tokens: Sequence[int]) -> int:
        """Advance over as many of the tokens as the grammar permits; return how many these are."""
        ...

    def rollback(self, count: int) -> None:
        """Take the last `count` accepted tokens back."""
        ...

    def copy(self) -> GrammarMatcher:
        """Another matcher at the same position."""
        ...

    def is_complete(self) -> bool:
        """Whether the text so far is a whole text of the language."""
        ...

    def is_final(self) -> bool:
        """Whether it is complete and nothing may follow."""
        ...

    def failure(self) -> str | None:
        """Why it cannot go on, after it has exceeded a bound of its library; None: it can."""
        ...

    def forced_tokens(self) -> list[int]:
        """The tokens that most likely spell what must follow; empty: several texts may, or none."""
        ...


class CompiledGrammar(Protocol):
    """A grammar compiled for a vocabulary; several requests may share it."""

    backend: GrammarBackend
    nbytes: int  # an estimate of its memory
    source: tuple[str, bytes]  # the content of its spec, and the prefix

    def new_matcher(self) -> GrammarMatcher:
        """A matcher at the beginning."""
        ...


class GrammarBackend(Protocol):
    """A grammar library with one vocabulary."""

    name: str
    mask_width: int  # 32-bit words of a token mask

    def compile(self, spec: GrammarSpec, prefix: bytes = b"") -> CompiledGrammar:
        """Compile the grammar of texts that begin with `prefix`, which is followed by the spec's.

        Raises `UnsupportedGrammar` for a grammar that it cannot run exactly, or that is invalid.
        """
        ...

    def fill_masks(self, matchers: Sequence[Any], masks: NDArray[Any], lines: Sequence[int]) -> None:
        """Set `masks[lines[i]]` to the tokens that may follow `matchers[i]`, a bit each, end tokens aside.

        The matchers must be different objects: the library's threads fill them at once. The mask of one that
        fails is undefined.
        """
        ...
