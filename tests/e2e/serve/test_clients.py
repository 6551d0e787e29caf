"""Client programs of others, unchanged, against a real server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.client_programs import ClientEnvironment
from tests.support.http_client import request, stream

PROGRAMS = Path(__file__).parent / "clients"
CHAT = {
    "model": "smol-draft",
    "messages": [{"role": "user", "content": "Say hello."}],
    "max_tokens": 8,
    "temperature": 0,
}
TEXT = {"model": "smol-draft", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    return ClientEnvironment(tmp_path_factory.mktemp("clients"))


@pytest.fixture(scope="module")
def chat_text(server):
    """What a plain HTTP request is answered with."""
    answer = request(server.port, "POST", "/v1/chat/completions", CHAT).json
    return answer["choices"][0]["message"]["content"]


def is_person(value):
    return set(value) == {"name", "age"} and len(value["name"]) <= 8 and 0 <= value["age"] <= 99


def test_litellm(server, programs, chat_text):
    found = json.loads(programs.run("python", PROGRAMS / "litellm_client.py", server.url))
    assert found["chat"] == found["stream"] == chat_text
    plain = request(server.port, "POST", "/v1/completions", TEXT).json
    assert found["text"] == plain["choices"][0]["text"]
    assert found["num_tokens"] == 41


def test_langchain(server, programs, chat_text):
    found = json.loads(programs.run("python", PROGRAMS / "langchain_client.py", server.url))
    assert found["chat"] == "".join(found["stream"]) == chat_text
    assert len(found["stream"]) >= 8
    assert set(found["structured"]) == {"json_schema", "function_calling"}
    assert all(map(is_person, found["structured"].values()))
    name, arguments = found["call"]
    assert name == "Person"
    assert is_person(arguments)


def test_instructor(server, programs):
    assert is_person(json.loads(programs.run("python", PROGRAMS / "instructor_client.py", server.url)))


def test_llm(server, programs, chat_text, tmp_path):
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: here\n  model_name: smol-draft\n  api_base: {server.url}/v1\n  supports_schema: true\n"
    )
    env = {"LLM_USER_PATH": str(tmp_path)}
    options = ("-m", "here", "--key", "none", "-o", "temperature", 0, "-o", "max_tokens")
    whole = programs.run("llm", *options, 8, "--no-stream", "Say hello.", env=env)
    streamed = programs.run("llm", *options, 8, "Say hello.", env=env)
    assert whole.rstrip("\n") == streamed.rstrip("\n") == chat_text
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    said = programs.run("llm", *options, 80, "--schema", json.dumps(schema), "Who is there?", env=env)
    assert is_person(json.loads(said))


def test_openai_for_node(server, programs, chat_text):
    cancelled = server.metric("descant_engine_cancelled_total")
    found = json.loads(programs.run("node", PROGRAMS / "openai_client.mjs", server.url))
    assert found["chat"] == found["stream"] == chat_text
    assert found["tokens"] == 41
    assert all(is_person(found[name]) for name in ("call", "streamedCall", "parsed"))
    assert found["call"] == found["streamedCall"]
    assert found["error"] == ["NotFoundError", 404, "model_not_found"]
    assert found["before"] == 3
    server.wait_for_metric("descant_engine_cancelled_total", cancelled + 1)


def test_lm_eval_has_the_results_of_its_own_backend(server, programs, model_folder):
    tasks = PROGRAMS / "lm_eval_tasks"
    printed = programs.run(
        "python", PROGRAMS / "lm_eval_client.py", server.url, model_folder, tasks, cwd=tasks
    )
    found = json.loads(printed.splitlines()[-1])
    ours, theirs = found["local-completions"], found["hf"]
    assert ours["scores"] == theirs["scores"]
    assert ours["responses"]["continuations"] == theirs["responses"]["continuations"]
    assert len(set(map(str, ours["responses"]["continuations"]))) > 3
    pairs = [
        [choice[0] for document in side["responses"]["endings"] for choice in document]
        for side in (ours, theirs)
    ]
    assert [is_greedy for _, is_greedy in pairs[0]] == [is_greedy for _, is_greedy in pairs[1]]
    assert [value for value, _ in pairs[0]] == pytest.approx([value for value, _ in pairs[1]], rel=1e-5)
    assert len(pairs[0]) == 13


def test_guidellm_runs_to_its_end(server, programs, model_folder, tmp_path):
    first = len(server.entries)
    programs.run(
        "guidellm",
        "run",
        *("--backend", f"kind=openai_http,target={server.url},model=smol-draft"),
        *("--profile", "kind=concurrent,streams=2"),
        *("--constraint", "kind=max_requests,count=6"),
        *("--tokenizer", f"kind=huggingface_auto,model={model_folder}"),
        *("--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8"),
        *("--output", f"kind=json,path={tmp_path / 'report.json'}"),
        "--disable-console",
    )
    [benchmark] = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    total = benchmark["metrics"]["request_totals"]
    answered = [entry for entry in server.entries[first:] if entry.get("path") == "/v1/chat/completions"]
    assert [(entry["status"], entry["output_tokens"]) for entry in answered] == [(200, 8)] * len(answered)
    assert (total["errored"], total["incomplete"]) == (0, 0)
    # On a busy machine one report in twenty has a request less, for a reason that is not known.
    assert 5 <= total["successful"] <= len(answered) <= 6
    assert benchmark["metrics"]["output_token_count"]["successful"]["mean"] == 8


def test_an_end_token_that_is_ignored_and_usage_in_every_chunk(server):
    """What load tools ask for."""
    ends = {**TEXT, "max_tokens": 6, "logit_bias": {"2": 100}}  # the end token, by far
    assert request(server.port, "POST", "/v1/completions", ends).json["usage"]["completion_tokens"] == 1
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**ends, "ignore_eos": True, "stream": True, "stream_options": options}
    *chunks, done = stream(server.port, "/v1/completions", body)
    assert done == "[DONE]"
    used = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert used == sorted(used)
    assert used[-1] == 6
    chat = {**CHAT, "stream": True, "stream_options": options}
    *chunks, _ = stream(server.port, "/v1/chat/completions", chat)
    assert [chunk["usage"]["prompt_tokens"] for chunk in chunks] == [33] * len(chunks)
    both = request(server.port, "POST", "/v1/completions", {**TEXT, "ignore_eos": True, "eos_token_id": 5})
    assert "together with `ignore_eos`" in both.json["error"]["message"]


def test_fields_that_clients_of_vllm_send(server):
    def post(**fields):
        answer = request(server.port, "POST", "/v1/completions", {**TEXT, **fields})
        assert answer.status == 200, answer.json
        return answer.json

    beams = [post(n=2, num_beams=4), post(n=2, use_beam_search=True, best_of=4, seed=-1)]
    assert beams[0]["choices"] == beams[1]["choices"]
    # Only the last tokens count, of texts and of ids.
    ids = request(server.port, "POST", "/tokenize", {"prompt": "A long story. Once upon a time"}).json[
        "tokens"
    ]
    cut = post(prompt="A long story. Once upon a time", truncate_prompt_tokens=4, return_token_ids=True)
    assert cut["choices"][0]["prompt_token_ids"] == ids[-4:]
    assert cut["usage"]["prompt_tokens"] == 4
    assert cut["choices"][0]["text"] == post(prompt=ids[-4:])["choices"][0]["text"]
    assert post(truncate_prompt_tokens=-1)["choices"] == post()["choices"]
