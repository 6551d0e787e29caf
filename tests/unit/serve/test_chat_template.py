"""Chat templates in processes of their own: the text of `apply_chat_template`, and limits of its cost."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from descant.serve.http.errors import ApiError
from descant.serve.model.prompts import ChatTemplate, RenderLimits, TemplateError, TemplateProcesses
from tests.support import json_tokenizer, pretrained

PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "f", "arguments": {"city": "Zürich", "n": [1, 2.5]}},
}
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "Ünïcode", "parameters": {"type": "object", "properties": {}}},
}
CONVERSATIONS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "Hello"}],
    [
        {"role": "system", "content": "Be <brief>."},
        {"role": "user", "content": "{{ 7 * 7 }} {% raw %} & é\ud7ff"},
    ],
    [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        {"role": "assistant", "content": "Sunny.", "reasoning_content": "It says so."},
        {"role": "user", "content": "Thanks\n"},
    ],
)
# What templates use: trimmed blocks, loop controls, namespaces, macros, filters, tests, added functions.
SNIPPETS = (
    PLAIN,
    "{% generation %}\n  {{ messages[0].content }}\n{% endgeneration %} end",
    "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ loop.last }}{% endfor %}",
    "{%- set ns = namespace(n=0) -%}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{% macro show(x, y=2) %}[{{ x|upper }}{{ y }}]{% endmacro %}{{ show(messages[0].role) }}{{ show('a') }}",
    "{{ messages | tojson }}{{ messages | tojson(indent=2, sort_keys=true, ensure_ascii=true) }}",
    "{{ tools }}{{ tools is none }}{{ documents is defined }}{{ add_generation_prompt }}{{ bos_token }}",
    "{{ messages[-1].reasoning_content }}{{ messages[3].thinking }}{{ unknown }}{{ messages[0].none }}",
    "{{ dict(a=1) }}{{ dict.fromkeys('ab', 1) }}{{ 'a,b'.split(',') }}{{ '%05.1f'|format(2.2) }}{{ 'x'~1 }}",
    "{{ messages | map(attribute='role') | unique | join('|') }}{{ messages | length }}{{ 'é'|urlencode }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | count }}{{ 1.0 }}{{ 1e30 }}{{ 10**20 }}",
    "{{ enable_thinking is defined and enable_thinking }}{{ '{}-{}'.format(1, 'a') }}{{ ' a '|trim }}",
)


@pytest.fixture(scope="module")
def processes() -> Iterator[TemplateProcesses]:
    processes = TemplateProcesses()
    yield processes
    processes.close()


def check_same(tokenizer: Any, source: str | None, processes: TemplateProcesses) -> int:
    """Compare the texts of all conversations; returns how many there were."""
    template, count = ChatTemplate(tokenizer, source, processes), 0
    for messages in CONVERSATIONS:
        for tools in (None, [TOOL]):
            for variables in ({}, {"enable_thinking": True, "extra": {"a": [None, 1.5]}}):
                arguments = {"tools": tools, "tokenize": False, "chat_template": source, **variables}
                try:
                    expected = tokenizer.apply_chat_template(
                        messages, add_generation_prompt=True, **arguments
                    )
                except Exception:
                    with pytest.raises(ApiError):
                        template.render(messages, tools, variables=variables)
                    continue
                assert template.render(messages, tools, variables=variables) == expected
                count += 1
    return count


@pytest.mark.parametrize("name", ["smollm2", "smol-draft", "minimind2-small"])
def test_real_templates_have_the_tokenizers_text(name, processes):
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(pretrained.folder(name))
    assert check_same(tokenizer, None, processes) >= 8


@pytest.mark.parametrize("source", SNIPPETS)
def test_parts_of_templates_have_the_tokenizers_text(source, processes):
    assert check_same(json_tokenizer.tokenizer(), source, processes) >= 1


def test_templates_by_name(processes):
    class Tokenizer:
        chat_template: ClassVar = {"default": "plain", "tool_use": "tools"}

    template = ChatTemplate(Tokenizer(), None, processes)
    assert template.render(CONVERSATIONS[0]) == "plain"
    assert template.render(CONVERSATIONS[0], [TOOL]) == "tools"


@pytest.mark.parametrize("name", ["messages", "tools", "bos_token", "_x", "a b", "chat_template"])
def test_reserved_variables(name, processes):
    with pytest.raises(ApiError, match="chat_template_kwargs"):
        ChatTemplate(json_tokenizer.tokenizer(), PLAIN, processes).render(
            CONVERSATIONS[0], variables={name: 1}
        )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "too long"),
        ("{{ 'x' * 10 ** 10 }}", "too much memory"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nested too deeply"),
        # Not a constant, which is compiled into the program: that takes most of the permitted time.
        ("{{ 'x' * (17000000 + messages|length) }}", "at most 16777216 characters"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for %}", "Expected an expression"),
        ("{{ raise_exception('no\nsuch role') }}", "no"),
        ("{% include '/etc/passwd' %}", "no loader"),
    ],
)
def test_what_a_template_must_not_do(source, expected, processes):
    with pytest.raises(TemplateError, match=expected):
        processes.render(source, {"messages": []})
    assert processes.render("a{{ 1 }}", {"messages": []}) == "a1"


def test_other_texts_go_on_while_one_takes_long(processes):
    ended: list[float] = []

    def burn() -> None:
        with pytest.raises(TemplateError):
            processes.render(
                "{% for a in range(99999) %}{{ range(99999)|sum }}{% endfor %}", {"messages": []}
            )
        ended.append(time.monotonic())

    for one in processes._all:  # starting one takes longer than what follows may
        one.render(json.dumps({"template": "", "variables": {"messages": []}}).encode())
    thread = threading.Thread(target=burn)
    thread.start()
    times = []
    while thread.is_alive():
        processes.render("a", {"messages": []})
        times.append(time.monotonic())
    assert sum(one < ended[0] for one in times) > 5


def test_a_process_has_nothing_of_the_server(monkeypatch):
    monkeypatch.setenv("DESCANT_API_KEYS", "canary-canary-canary")
    processes = TemplateProcesses(1, RenderLimits(cpu_seconds=5.0))
    try:
        processes.render("", {"messages": []})
        process = processes._all[0]._process
        own = Path(f"/proc/{process.pid}")
        assert b"canary" not in (own / "environ").read_bytes()
        limits = (own / "limits").read_text().splitlines()
        assert next(line for line in limits if line.startswith("Max open files")).split()[3:5] == ["3", "3"]
    finally:
        processes.close()


def test_messages_that_json_cannot_hold(processes):
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(TemplateError, match="nested too deeply"):
        processes.render("", {"messages": [], "deep": deep})
    with pytest.raises(TemplateError, match="too long"):
        processes.render("", {"messages": [], "text": "x" * (65 * 2**20)})
    assert json.loads(processes.render("{{ [s, 1.5]|tojson }}", {"messages": [], "s": "\ud800"})) == [
        "\ud800",
        1.5,
    ]
