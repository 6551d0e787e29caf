"""Parameters that would stall a run are refused, with the bound, before anything is built."""

from __future__ import annotations

import time

import pytest

from descant import GenerationConfig
from descant.config.field_types import MAX_STOP_TOKENS, MAX_TEXT_BYTES, MAX_TEXTS
from descant.errors import ConfigError, InputError
from descant.tokenization.stop_strings import StopStringBuffer, normalize_stop_strings


@pytest.mark.parametrize("name", ["stop_token_ids", "eos_token_id"])
def test_stop_tokens(name: str) -> None:
    GenerationConfig(**{name: range(MAX_STOP_TOKENS)})
    began = time.process_time()
    with pytest.raises(ConfigError, match=rf"`{name}` must be at most 4096 token ids, and these are 1000000"):
        GenerationConfig(**{name: range(1_000_000)})
    assert time.process_time() - began < 1


@pytest.mark.parametrize("name", ["stop_strings", "dry_sequence_breakers"])
def test_texts(name: str) -> None:
    GenerationConfig(**{name: [f"{number:016}" for number in range(MAX_TEXTS)]})
    GenerationConfig(**{name: ["é" * (MAX_TEXT_BYTES // 2)]})
    with pytest.raises(ConfigError, match=rf"`{name}` must be at most 256 texts, and these are 5000"):
        GenerationConfig(**{name: [str(number) for number in range(5000)]})
    with pytest.raises(ConfigError, match=rf"`{name}` must be at most 4096 bytes of text .* these are 32000"):
        GenerationConfig(**{name: ["x" * 32_000]})


def test_phrases() -> None:
    GenerationConfig(banned_phrases=[f"{number:08}" for number in range(2048)])
    with pytest.raises(ConfigError, match=r"`banned_phrases` must be at most 2048 texts, and these are 5000"):
        GenerationConfig(banned_phrases=[str(number) for number in range(5000)])
    with pytest.raises(ConfigError, match=r"`banned_phrases` must be at most 16384 bytes of text in all"):
        GenerationConfig(banned_phrases="x" * 32_000)


def test_texts_given_to_the_parts() -> None:
    for texts in ("x" * 32_000, [str(number) for number in range(5000)]):
        for part in (normalize_stop_strings, StopStringBuffer):
            with pytest.raises(InputError, match="`stop_strings` must be at most"):
                part(texts)
