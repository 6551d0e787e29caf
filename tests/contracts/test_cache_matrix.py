"""Every method on every cache: the tokens of the dense cache, or a refusal that names the cache and why.

Caches that forget are given room for everything here, so that they have to be exact; how they forget is
held against references of its own, and in the last part of this file against themselves: with less room, too,
neither neighbours nor drafts may be seen. CI runs some of the methods by themselves and all of them in one
session; `pytest tests/contracts/test_cache_matrix.py -m ""` runs each by itself.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from descant import ConfigError, GenerationConfig, Request
from descant.kv_cache.stores.quantizers import GroupCodec, QuantizedTensor
from descant.testing import Outcome, Schedule, check_admission, check_batch, compare, outcomes
from tests.contracts import methods, speculation, subjects
from tests.contracts.stores import small
from tests.support.tiny_models import ARCHITECTURES, Tiny
from tools.sweep.kinds import representative
from tools.sweep.trial import subject_of

# By name: the models, the first of which is enough for most of CI, and settings with room for everything.
CACHES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "dynamic": (("llama",), {}),
    "paged": (("llama", "gpt2", "mistral", "t5"), {}),
    "static": (("llama", "gpt2", "mistral", "t5"), {}),
    "offloaded": (("llama", "t5"), {}),
    "offloaded_static": (("llama", "t5"), {}),
    "sliding_window": (("mistral",), {}),
    "hybrid": (("mistral", "llama"), {}),
    "quantized": (("llama", "t5"), {"backend": "quanto", "nbits": 4, "residual_length": 3}),
    "sink": (("llama", "gpt-neox"), {"window_length": 128, "num_sink_tokens": 2}),
    "snapkv": (("llama", "gpt2"), {"budget": 128, "window": 8, "kernel": 3}),
    "h2o": (("llama", "gpt2"), {"budget": 128, "recent": 8}),
}
# The same with so little room that most of a row is forgotten.
TIGHT: dict[str, tuple[str, dict[str, Any]]] = {
    "sliding_window": ("mistral", {}),
    "sink": ("llama", {"window_length": 6, "num_sink_tokens": 2}),
    "snapkv": ("llama", {"budget": 5, "window": 3, "kernel": 3}),
    "h2o": ("llama", {"budget": 5, "recent": 3}),
    "quantized": ("llama", {"backend": "quanto", "nbits": 4, "residual_length": 3}),
}
# What takes tokens back that were committed needs a cache that goes back as far as one likes.
FORGETFUL = ("sliding_window", "sink", "snapkv", "h2o")

DRAFTS = tuple(f"guessed by {name}" for name in speculation.DRAFTERS)
SAMPLED = "guessed by lookup, sampled"
# In CI each by itself on every cache.
SHOWN = (
    "greedy", "sampling-fanned", "beam-4", "groups", "constrained", "contrastive", "contrastive-sequential",
    "guessed by lookup", "guessed by draft model", "guessed by early exit", "banned", "dola", "guided-beams",
)  # fmt: skip


def known(name: str) -> list[str]:
    """All methods that a model has, by its name."""
    encodes = ARCHITECTURES[name].encoder_decoder
    able = [one for one in DRAFTS if not (encodes and "early exit" in one)]
    return [*subjects.METHODS, *methods.METHODS, *(() if encodes else methods.DECODER_ONLY), *able, SAMPLED]


def requests_for(tiny: Tiny, method: str) -> list[Request]:
    """Three requests of a method, none like another."""
    if method in subjects.METHODS:
        return subjects.of_method(tiny, method, 3)
    if not method.startswith("guessed by "):
        return methods.of_method(tiny, method, 3, new=5)
    name = method.removeprefix("guessed by ").removesuffix(", sampled")
    options = speculation.few_words(tiny)
    if method == SAMPLED:
        options |= {"do_sample": True, "seed": 5, "num_return_sequences": 2}
    texts = speculation.texts(tiny)[:3]
    return [speculation.request(tiny, one, {**options, "max_new_tokens": 14}, name) for one in texts]


def on(cache: str, settings: dict[str, Any], given: Sequence[Request]) -> list[Request]:
    """The same requests on a cache of that name."""
    fields = {"cache_implementation": cache, **({"cache_config": settings} if settings else {})}
    return [replace(one, generation_config=one.generation_config.replace(**fields)) for one in given]


@pytest.fixture(scope="module")
def dense(tiny: Callable[..., Tiny]) -> Callable[[str, str], list[Outcome]]:
    """What becomes of a method's requests on the dense cache."""

    @functools.cache
    def get(name: str, method: str) -> list[Outcome]:
        found = outcomes(tiny(name).model, on("dynamic", {}, requests_for(tiny(name), method)))
        assert any(one.error is None for one in found)
        return found

    return get


@pytest.fixture
def lossless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of the quantized cache that hold numbers as they came, so that it has to be exact as well."""

    def encode(self: GroupCodec, content: torch.Tensor) -> QuantizedTensor:
        none = content.new_zeros(*content.shape[:2], 0)
        return QuantizedTensor(content.clone(), none, none)

    def decode(self: GroupCodec, parts: Sequence[QuantizedTensor], into: torch.Tensor) -> None:
        whole = torch.cat([part.codes for part in parts], 1)
        into.copy_(whole.unflatten(1, into.shape[1:3]))

    monkeypatch.setattr(GroupCodec, "encode", encode)
    monkeypatch.setattr(GroupCodec, "decode", decode)


def cannot_rewind(cache: str, model: str, method: str) -> bool:
    """Whether a cache cannot rewind as far as the method does."""
    forgets = cache in FORGETFUL or (cache == "hybrid" and model == "mistral")
    return forgets and method.startswith("banned")


CELLS = [
    pytest.param(
        cache, name, method,
        marks=() if name == names[0] and method in SHOWN else pytest.mark.slow,
        id=f"{cache}-{name}-{method}",
    )
    for cache, (names, _) in CACHES.items()
    for name in names
    for method in known(name)
]  # fmt: skip


@pytest.mark.usefixtures("lossless")
@pytest.mark.parametrize(("cache", "name", "method"), CELLS)
def test_every_method_on_every_cache(tiny, dense, cache, name, method):
    given = on(cache, CACHES[cache][1], requests_for(tiny(name), method))
    with small():
        if cannot_rewind(cache, name, method):
            with pytest.raises(ConfigError, match=rf"takes tokens back, which the {cache} cache cannot"):
                outcomes(tiny(name).model, given)
            return
        found = outcomes(tiny(name).model, given)
    for place, (alone, other) in enumerate(zip(dense(name, method), found, strict=True)):
        same(alone, other, f"{method}, request {place}, on the {cache} cache")


def same(alone: Outcome, other: Outcome, where: str) -> None:
    """Compare two outcomes, which may have made their steps at other places where anything was drafted."""
    if any(one.speculation is not None for one in alone.hypotheses):
        both = alone.logits.keys() & other.logits.keys()
        alone, other = (replace(one, logits={key: one.logits[key] for key in both}) for one in (alone, other))
    compare(alone, other, where)


@pytest.fixture(scope="module")
def together(tiny: Callable[..., Tiny]) -> Callable[[str, bool], tuple[list[Request], list[Outcome]]]:
    """A request of every method, with or without those that take tokens back, and what becomes of them."""

    @functools.cache
    def get(name: str, bans: bool) -> tuple[list[Request], list[Outcome]]:
        one = tiny(name)
        given = [some for some in methods.mixed(one) if bans or not some.generation_config.banned_phrases]
        given += [
            some for drafter in speculation.FEW for some in requests_for(one, f"guessed by {drafter}")[:1]
        ]
        return given, outcomes(one.model, on("dynamic", {}, given))

    return get


@pytest.mark.usefixtures("lossless")
@pytest.mark.parametrize("cache", CACHES)
def test_all_methods_share_a_session_on_every_cache(tiny, together, cache):
    """Every method at once: the rows of one fork, are cut and leave beside those of the others."""
    names, settings = CACHES[cache]
    one = tiny(names[0])
    given, expected = together(one.name, not cannot_rewind(cache, one.name, "banned"))
    schedule = Schedule.at_once(list(range(len(given)))[::-1])
    with small():
        found = outcomes(one.model, on(cache, settings, given), schedule)
    for place, (alone, other) in enumerate(zip(expected, found, strict=True)):
        same(alone, other, f"request {place} of {len(given)} on the {cache} cache")


# ------------------------------------------------------------------------ with little room
ALONE = ("greedy", "sampling-fanned", "beam-4", "contrastive", "constrained-groups", "guided", "dola-beams")


@pytest.mark.ci_cases("h2o", "quantized", "sliding_window")
@pytest.mark.parametrize("cache", TIGHT)
def test_other_rows_have_no_effect(tiny, cache):
    """A batch of N equals N batches of 1, admitted at any step, on an evicting or rounding cache."""
    name, settings = TIGHT[cache]
    given = [request for method in ALONE for request in requests_for(tiny(name), method)[1:2]]
    # In float64: one more bit of a key in float32 may round to the next of 16 levels.
    model = copy.deepcopy(tiny(name).model).double() if cache == "quantized" else tiny(name).model
    check_batch(model, on(cache, settings, given))
    check_admission(model, on(cache, settings, given), schedules=1)


@pytest.mark.parametrize("drafts", [one for one in DRAFTS if "adaptive" not in one and "shared" not in one])
@pytest.mark.parametrize("cache", TIGHT)
def test_drafts_change_nothing(tiny, cache, drafts):
    """Rejected drafts leave an evicting or rounding cache unchanged."""
    name, settings = TIGHT[cache]
    given = [
        replace(one, generation_config=one.generation_config.replace(logprobs=0))
        for one in requests_for(tiny(name), drafts)
    ]
    guessed = on(cache, settings, given)
    plain = [replace(one, generation_config=_plain(one.generation_config)) for one in guessed]
    plain = [replace(one, assistant_model=None) for one in plain]
    expected, found = (outcomes(tiny(name).model, given) for given in (plain, guessed))
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    for one, two in zip(found, expected, strict=True):
        for mine, wanted in zip(one.hypotheses, two.hypotheses, strict=True):
            torch.testing.assert_close(mine.logprobs.raw, wanted.logprobs.raw, rtol=0.0, atol=1e-4)
    reports = [one.speculation for some in found for one in some.hypotheses]
    assert sum(sum(one.accepted) for one in reports) > 0


def _plain(config: GenerationConfig) -> GenerationConfig:
    """The same without drafts."""
    fields = {name for drafter, _ in speculation.DRAFTERS.values() for name in drafter}
    return GenerationConfig(**{name: getattr(config, name) for name in config.given if name not in fields})


# ------------------------------------------------------------------------ what a model cannot have
@pytest.mark.parametrize(
    ("name", "cache", "lacks"),
    [
        ("llama", "mamba", "a model with a recurrent state"),
        ("llama", "sliding_window", "a model with sliding windows"),
        ("t5", "hybrid", "a model that takes position ids and attention masks"),
        ("gpt2", "sink", "a model with rotary position embeddings"),
        ("mistral", "sink", "a model without windows"),
        ("mistral", "h2o", "a model without windows"),
        ("mistral", "snapkv", "a model without windows"),
    ],
)
def test_an_unsupported_cache_is_an_error_with_a_reason(tiny, name, cache, lacks):
    with pytest.raises(ConfigError, match=rf"`cache_implementation` needs {lacks}.*got '{cache}'"):
        outcomes(tiny(name).model, on(cache, {}, requests_for(tiny(name), "greedy")))


RECURRENT: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "seed": 3, "num_return_sequences": 2},
    "beams": {"num_beams": 3},
    "groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0},
    "constrained": {"num_beams": 3, "force_words_ids": [[5, 6]]},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 3},
    "dola": {"dola_layers": "low"},
    "guided": {"guidance_scale": 1.5},
}


@pytest.mark.parametrize("method", RECURRENT)
def test_recurrent_models_have_theirs_by_name(method):
    subject = subject_of(representative("recurrent"))
    fields = {**RECURRENT[method], "max_new_tokens": 5}
    given = [
        Request(prompt["input_ids"][0].tolist(), GenerationConfig(**fields)) for prompt in subject.prompts[:2]
    ]
    expected = outcomes(subject.model, given)
    for cache in ("mamba", "dynamic", "hybrid"):
        found = outcomes(subject.model, on(cache, {}, given))
        for place, (alone, other) in enumerate(zip(expected, found, strict=True)):
            compare(alone, other, f"{method}, request {place}, on the {cache} cache")


@pytest.mark.parametrize("cache", [one for one in CACHES if one not in ("dynamic", "hybrid")])
def test_recurrent_models_have_no_other(cache):
    subject = subject_of(representative("recurrent"))
    given = [Request(subject.prompts[0]["input_ids"][0].tolist(), GenerationConfig(max_new_tokens=3))]
    with pytest.raises(ConfigError, match=f"needs a model without a recurrent state, got '{cache}'"):
        outcomes(subject.model, on(cache, {}, given))
