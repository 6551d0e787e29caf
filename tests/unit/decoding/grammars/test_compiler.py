"""Compiled grammars: shared by content, bounded in bytes, refused by name, and made beside the engine."""

import sys
import threading
import time

import pytest

import descant
from descant import ConfigError, GenerationConfig, MissingExtra, Request
from descant.config.generation_config import FIELDS
from descant.decoding.grammars import compiler as compiler_module
from descant.decoding.grammars.compiler import GrammarCompiler, installed_backends
from descant.decoding.grammars.llguidance_backend import LLGuidanceBackend
from descant.models.loading.tiny_llama import toy
from tests.support.grammar_texts import BACKENDS
from tests.support.json_tokenizer import tokenizer

EOS = 2


def spec(**given):
    return FIELDS["grammar"].parse(given)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_compilation_serves_64_rows(backend, monkeypatch):
    monkeypatch.setattr(compiler_module, "_compilers", type(compiler_module._compilers)())
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    configs = [
        GenerationConfig(
            grammar={"json_schema": schema, "backend": backend}, max_new_tokens=3, eos_token_id=EOS
        )
        for _ in range(64)
    ]
    session = descant.Session(toy(len(tokenizer())))
    session.admit(*(Request([5, 6], config, tokenizer=tokenizer()) for config in configs))
    assert len([event for event in session.drain() if isinstance(event, descant.Finished)]) == 64
    assert compiler_module.compiler_of(tokenizer()).num_compilations == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_cache_is_bounded_in_bytes(backend):
    compiler = GrammarCompiler(tokenizer(), max_bytes=2 << 20)
    for index in range(300):
        schema = {"type": "object", "properties": {f"name{index}": {"type": "string"}}}
        compiler.compile(spec(json_schema=schema, backend=backend))
    assert 1 < len(compiler) < 300
    assert compiler.nbytes <= 2 << 20
    before = compiler.num_compilations
    compiler.compile(spec(json_schema=schema, backend=backend, drafts=False))
    assert compiler.num_compilations == before


def test_auto_takes_the_backend_that_can(monkeypatch):
    compiler = GrammarCompiler(tokenizer())
    assert installed_backends() == ("llguidance", "xgrammar")
    assert compiler.compile(spec(regex="a+")).backend.name == "llguidance"

    def refuse(self, spec, prefix=b""):
        raise compiler_module.UnsupportedGrammar("not today")

    monkeypatch.setattr(LLGuidanceBackend, "compile", refuse)
    assert compiler.compile(spec(choice=["a"])).backend.name == "xgrammar"
    with pytest.raises(
        ConfigError, match=r"llguidance or xgrammar can enforce .llguidance: not today; xgrammar:"
    ):
        compiler.compile(spec(json_schema={"type": "array", "uniqueItems": True}))


def test_a_missing_library_names_its_extra(monkeypatch):
    for name in BACKENDS:
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(MissingExtra, match=rf"pip install descant\[{name}\]"):
            GrammarCompiler(tokenizer()).compile(spec(regex="a", backend=name))
    monkeypatch.setattr(compiler_module, "installed_backends", tuple)
    with pytest.raises(MissingExtra, match=r"pip install descant\[llguidance\]"):
        GrammarCompiler(tokenizer()).compile(spec(regex="a"))


def test_a_compilation_delays_no_step(monkeypatch):
    """The engine's thread goes on while a caller's thread compiles."""
    started, release = threading.Event(), threading.Event()
    compile_now = GrammarCompiler.compile

    def slow(self, spec, prefix=b""):
        started.set()
        assert release.wait(30)
        return compile_now(self, spec, prefix)

    monkeypatch.setattr(GrammarCompiler, "compile", slow)
    config = GenerationConfig(max_new_tokens=6, eos_token_id=EOS, pad_token_id=0)
    with descant.AsyncEngine(toy(len(tokenizer()))) as engine:
        constrained = Request([5, 6], config.replace(grammar={"choice": ["ab", "cd"]}), tokenizer=tokenizer())
        results = []
        thread = threading.Thread(target=lambda: results.append(engine.submit(constrained).result()))
        thread.start()
        assert started.wait(30)
        assert engine.submit(Request([7, 8], config)).result().hypotheses  # while the other one compiles
        assert not results
        release.set()
        thread.join(30)
    text = tokenizer().decode(results[0].hypotheses[0].tokens.tolist(), skip_special_tokens=True)
    assert text in ("ab", "cd")


def test_a_refused_grammar_leaves_the_engine_as_it_was():
    """CVE-2025-48942: an invalid schema ended vLLM's process."""
    config = GenerationConfig(max_new_tokens=4, eos_token_id=EOS, pad_token_id=0)
    with descant.AsyncEngine(toy(len(tokenizer()))) as engine:
        for grammar in (
            {"json_schema": {"type": "stsring"}},
            {"regex": "("},
            {"grammar": "root ::= ("},
            {"regex": "a{3,1}"},
        ):
            bad = Request([5, 6], config.replace(grammar=grammar), tokenizer=tokenizer())
            with pytest.raises(ConfigError, match="`grammar` must be a grammar that"):
                engine.submit(bad)
        assert engine.submit(Request([7, 8], config)).result().hypotheses
        assert engine.is_healthy


def test_a_request_without_tokenizer_or_end_token_is_refused():
    session = descant.Session(toy(len(tokenizer())))
    config = GenerationConfig(grammar={"regex": "a+"}, max_new_tokens=3)
    assert "`tokenizer` must be given with `grammar`" in str(session.supports(Request([5], config)))
    network = toy(len(tokenizer()))
    network.generation_config.eos_token_id = None
    refused = descant.Session(network).supports(Request([5], config, tokenizer=tokenizer()))
    assert "`eos_token_id` must be given with `grammar`" in str(refused)


def test_xgrammar_is_refused_after_its_time(monkeypatch):
    from descant.decoding.grammars import xgrammar_backend

    monkeypatch.setattr(xgrammar_backend, "_MAX_SECONDS", 0.05)
    compiler = GrammarCompiler(tokenizer())
    compiler.compile(spec(regex="a", backend="xgrammar"))
    release = threading.Event()
    backend = compiler._backends["xgrammar"]

    class Slow:
        def compile_grammar(self, grammar):
            release.wait(20)
            raise RuntimeError("late")

    monkeypatch.setattr(backend, "_compiler", Slow())
    began = time.monotonic()
    with pytest.raises(ConfigError, match="xgrammar: it takes more than"):
        compiler.compile(spec(regex="ab", backend="xgrammar"))
    with pytest.raises(ConfigError, match="still compiles another grammar"):
        compiler.compile(spec(regex="abc", backend="xgrammar"))
    assert time.monotonic() - began < 10
    release.set()
