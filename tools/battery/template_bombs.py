"""Chat templates that attack the server, and messages that attack the chat template."""

from __future__ import annotations

import random
import re
import resource
import statistics
import tempfile
import threading
import time
from pathlib import Path

import jinja2

from descant.serve.model.prompts import RenderLimits, TemplateError, TemplateProcesses
from tests.support.server_process import ServerProcess
from tools.battery.client import Client
from tools.battery.outcome import Outcome, Size
from tools.battery.subject import CHAT_TEMPLATE, MODEL, completion, running_server
from tools.battery.template_attacks import BOMBS, COMPILE_BOMBS, INJECTIONS, random_template

__all__ = ["FULL", "SMALL", "run"]

FULL, SMALL = Size(2000), Size(60)  # random templates; a small run has every eighth of the others
CANARY = "canary-5f3a9c"
INSIDES = re.compile(r"<(class|module|function|frame|code|method)\b|__globals__|site-packages|environ\(")


def run(size: Size) -> Outcome:
    """Render all attacks alone, then on a server."""
    outcome, step = Outcome(), 1 if size.count >= 1000 else 8
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder) / "secret.txt"
        secret.write_text(CANARY)
        _render_alone(outcome, size.count, step, str(secret))
        _serve(outcome, step, str(secret), folder)
        left = [
            one.name for one in Path(folder).iterdir() if one.name not in ("secret.txt", "template.jinja")
        ]
        outcome.check(not left, f"files were written: {left}")
    return outcome


def _render_alone(outcome: Outcome, count: int, step: int, secret: str) -> None:
    rng, processes = random.Random(9), TemplateProcesses(1)
    attacks = [("injection", one.replace("SECRET", secret)) for one in INJECTIONS[::step]]
    attacks += [("bomb", "{% set n = messages|length %}" + one) for one in BOMBS[::step]]
    attacks += [("bomb", one) for one in COMPILE_BOMBS[::step]]
    attacks += [("random", "{% set n = messages|length %}" + random_template(rng)) for _ in range(count)]
    seconds, refused = [], 0
    try:
        for kind, source in attacks:
            began = time.monotonic()
            try:
                text = processes.render(source, {"messages": [{"role": "user", "content": "x"}]})
            except TemplateError as error:
                text, refused = str(error), refused + 1
                is_named = kind == "random" or "__" in text  # an error names what the template has asked for
                outcome.check(is_named or not INSIDES.search(text), f"{source[:200]}: {text[:200]}")
            else:
                outcome.check(kind != "injection" or not INSIDES.search(text), f"{source}: {text[:200]}")
                outcome.check(
                    len(text) <= RenderLimits().max_chars, f"{source[:200]}: {len(text)} characters"
                )
            outcome.check(CANARY not in text, f"the secret is in the text: {source}")
            seconds.append(time.monotonic() - began)
            outcome.check(
                seconds[-1] < RenderLimits().wall_seconds, f"{seconds[-1]:.1f} seconds: {source[:200]}"
            )
        alive = processes.render("{{ 1 + 1 }}", {"messages": []})
        outcome.check(alive == "2", f"the next text is {alive!r}")
    finally:
        processes.close()
    outcome.figures |= {
        "templates": len(attacks),
        "refused": refused,
        "seconds_median": statistics.median(seconds),
        "seconds_worst": max(seconds),
        "peak_mb": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024,
    }


def _serve(outcome: Outcome, step: int, secret: str, folder: str) -> None:
    """One template with all attacks in it, of which the message chooses one."""
    attacks = [one.replace("SECRET", secret) for one in (*INJECTIONS[::step], *BOMBS[:: 2 * step])]
    attacks = [
        one for one in attacks if not re.search(r"{% (extends|import|macro|call)", one) and _parses(one)
    ]
    branches = "".join(
        f"{{% elif messages[0].content == 'attack-{number}' %}}{one}" for number, one in enumerate(attacks)
    )
    source = (
        "{% set n = messages|length %}{% if false %}"
        + branches
        + "{% else %}"
        + CHAT_TEMPLATE
        + "{% endif %}"
    )
    path = Path(folder) / "template.jinja"
    path.write_text(source)
    env = {"BATTERY_CANARY": CANARY}
    with running_server("--kv-memory", "0.05", "--chat-template", str(path), env=env) as server:
        _attack_server(outcome, server, len(attacks))
        payloads = [*INJECTIONS[::step], *(one for one in BOMBS[::step])]
        _check_content(outcome, server, payloads)
        failed = [entry for entry in server.entries if "failure" in entry]
        outcome.check(not failed, f"failures in the log: {failed[:2]}")


def _parses(source: str) -> bool:
    try:
        jinja2.Environment().parse(source)
    except jinja2.TemplateSyntaxError:
        return False
    return True


def _attack_server(outcome: Outcome, server: ServerProcess, count: int) -> None:
    """Two clients attack, and others are answered meanwhile."""
    numbers = iter(range(count))
    lock, statuses = threading.Lock(), []

    def attack() -> None:
        client = Client(server.port)
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            messages = [{"role": "user", "content": f"attack-{number}"}]
            answer = client.send("POST", "/tokenize", {"messages": messages})
            statuses.append(answer.status)
            body = answer.body.decode("utf-8", "replace")
            outcome.check(answer.status in (200, 400), f"attack {number}: {answer.status} {body[:200]}")
            outcome.check(CANARY not in body, f"attack {number} has the secret")

    threads = [threading.Thread(target=attack) for _ in range(4)]
    for thread in threads:
        thread.start()
    client, chats, plain = Client(server.port), 0, 0
    while any(thread.is_alive() for thread in threads):
        answer = client.complete(completion(max_tokens=1, temperature=0))
        outcome.check(answer.status == 200, f"a completion beside attacks: {answer.status}")
        plain += 1
        if plain % 20 == 0:
            body = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
            answer = client.send("POST", "/v1/chat/completions", body)
            outcome.check(answer.status == 200, f"a chat beside attacks: {answer.body[:200]!r}")
            chats += 1
    outcome.check(plain > len(statuses) // 4, f"only {plain} completions beside {len(statuses)} attacks")
    outcome.figures |= {"served_attacks": len(statuses), "answered_meanwhile": plain + chats}


def _check_content(outcome: Outcome, server: ServerProcess, payloads: list[str]) -> None:
    """Templates in messages are texts like others; a variable without effect is refused."""
    client = Client(server.port)
    for payload in payloads:
        messages = [{"role": "user", "content": payload}]
        answer = client.send("POST", "/tokenize", {"messages": messages})
        text = client.send("POST", "/detokenize", {"tokens": answer.json.get("tokens", [])}).json["prompt"]
        outcome.check(text == f"<s>user\n{payload}</s><s>assistant\n", f"{payload} became {text[:200]!r}")
        body = {"messages": messages, "chat_template_kwargs": {"x": payload}}
        answer = client.send("POST", "/tokenize", body)
        outcome.check(answer.status == 400, f"a variable without effect: {answer.status}")
        function = {"name": "f", "description": payload, "parameters": {"title": payload}}
        body = {"messages": messages, "tools": [{"type": "function", "function": function}]}
        answer = client.send("POST", "/tokenize", body)
        outcome.check(answer.status == 200, f"{payload} in a tool: {answer.body[:200]!r}")
    outcome.figures["payloads_as_content"] = len(payloads)
