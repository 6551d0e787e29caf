"""`vllm serve` with OpenAI's client: fields by `vllm_xargs`, the tokens of the engine without a server."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import openai
import pytest
from vllm import SamplingParams

from tests.support import pretrained
from tests.vllm.engines import MODEL, merged, session_tokens

PROMPT = [504, 3035, 282, 260, 6376]
FIELDS = {
    "sampled": {"do_sample": True, "mirostat_tau": 3.0, "dry_multiplier": 0.8},
    "watermark": {"do_sample": True, "watermarking_config": {"key": 271828182845, "context_width": 2}},
    "grammar": {"do_sample": True, "grammar": {"choice": ["red", "blue", "green"]}},
}


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture(scope="module")
def client():
    """A client of a server on the same model, which ends with the tests of this file."""
    port = free_port()
    options = "--dtype float32 --enforce-eager --max-model-len 128 --max-num-seqs 8 --host 127.0.0.1"
    program = Path(sys.executable).with_name("vllm")
    command = [program, "serve", pretrained.folder(MODEL), "--served-model-name", MODEL, *options.split()]
    command += ["--port", str(port)]
    command += ["--kv-cache-memory-bytes", str(64 << 20), "--disable-uvicorn-access-log"]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    server = subprocess.Popen(command, env=environment)
    try:
        wait_for(server, f"http://127.0.0.1:{port}/health")
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-", max_retries=0) as found:
            yield found
    finally:
        server.terminate()
        server.wait(60)


def wait_for(server, url, seconds=600):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert server.poll() is None, "the server has ended"
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    pytest.fail("the server has not started")


def options_of(fields):
    """Arguments of a completion."""
    body = {"vllm_xargs": {"descant": json.dumps(fields)}, "return_token_ids": True}
    return {"model": MODEL, "prompt": PROMPT, "max_tokens": 16, "seed": 5, "extra_body": body}


@pytest.mark.parametrize("name", FIELDS)
def test_completions(client, engines, target, name):
    """Streamed or not, they are those of an engine without a server and of a session."""
    fields = FIELDS[name]
    params = SamplingParams(seed=5, max_tokens=16, extra_args={"descant": fields})
    [offline] = engines().generate([{"prompt_token_ids": PROMPT}], [params], use_tqdm=False)
    expected = list(offline.outputs[0].token_ids)
    config = merged(**fields, top_k=0, seed=5, max_new_tokens=16, eos_token_id=target.tokenizer.eos_token_id)
    assert session_tokens(target, [(PROMPT, config)]) == [[expected]]
    whole = client.completions.create(**options_of(fields)).choices[0]
    assert whole.token_ids == expected
    parts = [chunk.choices[0] for chunk in client.completions.create(**options_of(fields), stream=True)]
    assert [token for part in parts for token in part.token_ids or ()] == expected
    assert "".join(part.text for part in parts) == whole.text
    assert len(parts) > 1


@pytest.mark.parametrize(
    ("name", "others"),
    [("use_beam_search", {"use_beam_search": True, "n": 2}), ("num_beamz", {"num_beamz": 3})],
)
def test_fields_that_vllm_would_leave_out(client, name, others):
    """Its beam search runs no logits processor, and its server ignores fields that it does not know."""
    options = options_of({"grammar": {"choice": ["red", "blue"]}})
    options["extra_body"] |= others
    options.pop("seed")
    with pytest.raises(openai.BadRequestError, match=f"`{name}`"):
        client.completions.create(**options)
    del options["prompt"]
    messages = [{"role": "user", "content": "The sea"}]
    with pytest.raises(openai.BadRequestError, match=f"`{name}`"):
        client.chat.completions.create(messages=messages, **options)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("top_hh", {"top_hh": 0.5}),
        ("num_beams", {"num_beams": 2}),
        ("stop_strings", {"stop_strings": ["a"]}),
        ("suppress_tokens", {"suppress_tokens": [10**6]}),
        ("grammar", {"grammar": {"regex": "(a"}}),
    ],
)
def test_invalid_fields(client, name, fields):
    """They are the client's error, with the name."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**options_of(fields))
    assert f"`{name}`" in str(caught.value)
    assert client.completions.create(**options_of({"top_k": 5})).choices[0].text
