"""Compiled grammars by content: which backend runs a grammar, and the cache of what is compiled."""

from __future__ import annotations

import importlib.util
import weakref
from collections import OrderedDict
from threading import RLock
from typing import Any, Final

from descant.config.grammar_spec import GrammarSpec
from descant.decoding.grammars.backend import (
    CompiledGrammar,
    GrammarBackend,
    GrammarVocabulary,
    UnsupportedGrammar,
)
from descant.decoding.grammars.llguidance_backend import LLGuidanceBackend
from descant.decoding.grammars.xgrammar_backend import XGrammarBackend
from descant.errors import ConfigError, DescantError, MissingExtra, printable
from descant.tokenization.token_bytes import TokenBytes

MAX_CACHE_BYTES: Final = 128 << 20

# By preference: llguidance compiles lazily within bounds, and refuses what it cannot enforce.
_BACKENDS: Final[dict[str, Any]] = {"llguidance": LLGuidanceBackend, "xgrammar": XGrammarBackend}


def installed_backends() -> tuple[str, ...]:
    """The grammar libraries that are installed, the preferred one first."""
    return tuple(name for name in _BACKENDS if importlib.util.find_spec(name) is not None)


class GrammarCompiler:
    """The grammars of one tokenizer, compiled once each; the least recently used leave first.

    It may be called from any thread: compilation needs neither the model nor the engine.
    """

    def __init__(self, tokenizer: Any, max_bytes: int = MAX_CACHE_BYTES) -> None:
        self._vocabulary = GrammarVocabulary(tokenizer)
        self._max_bytes = max_bytes
        self._backends: dict[str, GrammarBackend] = {}
        self._compiled: OrderedDict[tuple[str, str, bytes], CompiledGrammar] = OrderedDict()
        self._lock = RLock()
        self.num_compilations = 0

    @property
    def nbytes(self) -> int:
        """The memory of the cached grammars."""
        with self._lock:
            return sum(grammar.nbytes for grammar in self._compiled.values())

    def __len__(self) -> int:
        return len(self._compiled)

    def compile(self, spec: GrammarSpec, prefix: bytes = b"") -> CompiledGrammar:
        """The compiled grammar of a spec, behind a fixed beginning of the text."""
        names = (spec.backend,) if spec.backend != "auto" else installed_backends()
        if not names:
            raise MissingExtra("llguidance", "`grammar`")
        if spec.kind == "regex":
            names = names[:1]  # another library may read it as another expression
        reasons = []
        for name in names:
            try:
                return self._compile(name, spec, prefix)
            except UnsupportedGrammar as error:
                reasons.append(f"{name}: {error}")
        must = f"must be a grammar that {' or '.join(names)} can enforce ({'; '.join(reasons)})"
        raise ConfigError("grammar", must, spec)

    def owns(self, grammar: CompiledGrammar, spec: GrammarSpec, prefix: bytes) -> bool:
        """Whether a grammar was compiled here from a spec and a prefix."""
        is_source = grammar.source == (spec.content, prefix)
        return is_source and any(grammar.backend is backend for backend in self._backends.values())

    def _compile(self, name: str, spec: GrammarSpec, prefix: bytes) -> CompiledGrammar:
        key = (name, spec.content, prefix)
        with self._lock:
            found = self._compiled.get(key)
            if found is not None:
                self._compiled.move_to_end(key)
                return found
            if name not in self._backends:
                self._backends[name] = _BACKENDS[name](self._vocabulary)
            backend = self._backends[name]
        try:
            compiled = backend.compile(spec, prefix)  # without the lock: others must not wait for it
        except (UnsupportedGrammar, DescantError):
            raise
        except Exception as error:  # a schema whose keywords have values of other types
            raise UnsupportedGrammar(f"it is invalid: {printable(error)}") from None
        with self._lock:
            self.num_compilations += 1
            self._compiled[key] = compiled
            while len(self._compiled) > 1 and self.nbytes > self._max_bytes:
                self._compiled.popitem(last=False)
        return compiled


_compilers: weakref.WeakKeyDictionary[TokenBytes, GrammarCompiler] = weakref.WeakKeyDictionary()


def compile_grammar(spec: GrammarSpec, tokenizer: Any, prefix: bytes = b"") -> CompiledGrammar:
    """The compiled grammar of a spec for a tokenizer, which keeps it for the next request."""
    return compiler_of(tokenizer).compile(spec, prefix)


def compiler_of(tokenizer: Any) -> GrammarCompiler:
    """The compiler of a tokenizer, made for its first grammar."""
    vocabulary = TokenBytes.from_tokenizer(tokenizer)
    compiler = _compilers.get(vocabulary)
    if compiler is None:
        compiler = _compilers[vocabulary] = GrammarCompiler(tokenizer)
    return compiler
