"""300 schemas under four methods on a model with random weights: every finished text is valid.

CI runs a slice; `pytest tests/contracts/test_grammar_methods.py -m slow -s` runs all and prints the counts.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from typing import Any

import jsonschema
import pytest

import descant
from descant import GenerationConfig, Request
from descant.models.loading.tiny_llama import toy
from tests.support.grammar_texts import BACKENDS
from tests.support.json_tokenizer import tokenizer
from tests.support.schema_cases import schemas

EOS, BATCH = 2, 50
METHODS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_p": 0.95},
    "beam 4": {"num_beams": 4},
    "prompt lookup": {"prompt_lookup_num_tokens": 5},
}


@cache
def model() -> Any:
    return toy(vocab_size=len(tokenizer()), seed=2)


def run(backend: str, method: str, cases: list[dict[str, Any]]) -> Counter[str]:
    """How the requests of these schemas end; a finished text that is not valid raises."""
    endings: Counter[str] = Counter()
    for start in range(0, len(cases), BATCH):
        batch = cases[start : start + BATCH]
        requests = [
            Request(
                [5 + index, 40, 41],
                GenerationConfig(
                    **METHODS[method], max_new_tokens=120, eos_token_id=EOS, pad_token_id=0,
                    grammar={"json_schema": schema, "backend": backend},
                    **({"seed": index} if method == "sampling" else {}),
                ),
                tokenizer=tokenizer(),
            )
            for index, schema in enumerate(batch)
        ]  # fmt: skip
        session = descant.Session(model())
        session.admit(*requests)
        for event in session.drain():
            assert not isinstance(event, descant.Failed), event.error
            if isinstance(event, descant.Finished):
                best = event.hypotheses[0]
                endings[best.reason] += 1
                if best.reason == "eos":
                    text = tokenizer().decode(best.tokens.tolist(), skip_special_tokens=True)
                    jsonschema.validate(json.loads(text), batch[event.request])
    return endings


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", METHODS)
def test_finished_texts_are_valid(backend, method):
    cases = schemas(300, plain=backend == "xgrammar")[::12]
    endings = run(backend, method, cases)
    assert endings.total() == len(cases)
    assert endings["eos"] >= 0.3 * len(cases)  # the digits of a number have no bound
    assert set(endings) <= {"eos", "length"}  # a text that is cut says so


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_finished_texts_of_300_schemas_are_valid(backend):
    for method in METHODS:
        endings = run(backend, method, schemas(300, plain=backend == "xgrammar"))
        print(f"{backend}, {method}: {dict(endings)}")
        assert endings.total() == 300
