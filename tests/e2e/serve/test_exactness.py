"""Under load every request has the tokens of `descant.generate` alone."""

from __future__ import annotations

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import descant
from tests.support import pretrained
from tests.support.http_client import request, stream
from tests.support.request_cases import RequestCase, request_cases

# All 500 take minutes: `DESCANT_EXACT_REQUESTS=500 pytest tests/e2e/serve/test_exactness.py`.
COUNT = int(os.environ.get("DESCANT_EXACT_REQUESTS", "60"))
PATH = "/v1/completions"


def served_tokens(port: int, case: RequestCase, seed: int) -> list[list[int]] | None:
    """The tokens of each choice; None: the client has left."""
    rng = random.Random(seed)
    time.sleep(rng.uniform(0, COUNT / 20))
    body, kind = case.body("smol-draft"), rng.randrange(4)
    if kind == 0:  # leaves after a few events
        events = stream(port, PATH, {**body, "stream": True})
        for _ in zip(range(rng.randint(0, 4)), events, strict=False):
            pass
        events.close()
        return None
    if kind == 1:
        return [choice["token_ids"] for choice in request(port, "POST", PATH, body).json["choices"]]
    tokens: dict[int, list[int]] = {}
    for event in stream(port, PATH, {**body, "stream": True}):
        if event != "[DONE]":
            for choice in event["choices"]:
                tokens.setdefault(choice["index"], []).extend(choice["token_ids"])
    return [tokens[index] for index in sorted(tokens)]


def test_requests_under_load_equal_requests_alone(server):
    model = pretrained.load("smol-draft")
    cases = request_cases(COUNT)
    with ThreadPoolExecutor(32) as pool:
        served = list(pool.map(lambda pair: served_tokens(server.port, pair[1], pair[0]), enumerate(cases)))
    compared = 0
    for case, found in zip(cases, served, strict=True):
        if found is None:
            continue
        ids = torch.tensor([model.tokens(case.prompt)])
        output = descant.generate(
            model.model, ids, tokenizer=model.tokenizer, return_dict_in_generate=True, **case.arguments()
        )
        expected = [_without_padding(row, model) for row in output.sequences[:, ids.shape[1] :].tolist()]
        assert [_without_padding(row, model) for row in found] == expected, case
        compared += 1
    assert compared > COUNT // 2
    server.wait_for_metric("descant_rows", 0)
    server.wait_for_metric("descant:kv_cache_usage_perc", 0)


def _without_padding(row: list[int], model: pretrained.Pretrained) -> list[int]:
    """The tokens up to the first end token."""
    ends = {model.eos} if isinstance(model.eos, int) else set(model.eos)
    cut = next((index for index, token in enumerate(row) if token in ends), len(row))
    return row[:cut]


def test_a_seed_is_needed_for_equal_samples_only(server):
    body = {"model": "smol-draft", "prompt": "Once", "max_tokens": 12, "return_token_ids": True}
    seeded = [request(server.port, "POST", PATH, {**body, "seed": 7}).json for _ in range(2)]
    free = [request(server.port, "POST", PATH, body).json for _ in range(3)]
    ids = [[answer["choices"][0]["token_ids"] for answer in answers] for answers in (seeded, free)]
    assert ids[0][0] == ids[0][1]
    assert len({tuple(one) for one in ids[1]}) > 1


@pytest.mark.parametrize("case", request_cases(3, seed=1))
def test_chats_have_the_tokens_of_their_template(server, case):
    model = pretrained.load("smol-draft")
    messages = [{"role": "user", "content": case.prompt}]
    body = {
        "model": "smol-draft",
        "messages": messages,
        "max_tokens": 4,
        "temperature": 0,
        "return_token_ids": True,
    }
    answer = request(server.port, "POST", "/v1/chat/completions", body).json
    expected = model.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert answer["prompt_token_ids"] == expected
