"""The server under attack: a tiny random model with a byte-level tokenizer, which starts in seconds."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from tests.support import json_tokenizer, tiny_models
from tests.support.server_process import ServerProcess

__all__ = [
    "CHAT_TEMPLATE",
    "MODEL",
    "NUM_TOKENS",
    "completion",
    "model_folder",
    "plain_server",
    "running_server",
    "sharing",
]

MODEL = "tiny"
NUM_TOKENS = 276  # of the tokenizer
MAX_POSITIONS = 4096
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<s>' + message.role + '\n' + message.content + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)


@cache
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="battery-")


@cache
def model_folder() -> Path:
    """The model as a folder."""
    llama = tiny_models.ARCHITECTURES["llama"]
    config = {**llama.config, "vocab_size": NUM_TOKENS, "max_position_embeddings": MAX_POSITIONS}
    folder = tiny_models.build(replace(llama, config=config), Path(_temporary_folder().name) / MODEL)
    tokenizer = json_tokenizer.tokenizer()
    if len(tokenizer) != NUM_TOKENS:
        raise RuntimeError(f"the tokenizer has {len(tokenizer)} tokens, not {NUM_TOKENS}")
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


class _Sharing:
    """The server that attacks share, where they do."""

    stack: ExitStack | None = None
    server: ServerProcess | None = None


@contextmanager
def sharing() -> Iterator[None]:
    """Attacks inside share plain servers: starting one takes longer than a small attack."""
    with ExitStack() as _Sharing.stack:
        yield
    _Sharing.stack = _Sharing.server = None


@contextmanager
def running_server(*options: str, env: Mapping[str, str] | None = None) -> Iterator[ServerProcess]:
    """A server of the tiny model of its own."""
    with ServerProcess(model_folder(), "--served-model-name", MODEL, *options, env=env) as server:
        yield server


@contextmanager
def plain_server() -> Iterator[ServerProcess]:
    """A server for attacks that leave it as it was; it may be that of the attack before."""
    # With the prefix cache, blocks of ended requests would stay in use on purpose.
    options = ("--kv-memory", "0.05", "--no-prefix-cache", "--max-waiting", "2000")
    if _Sharing.stack is None:
        with running_server(*options) as server:
            yield server
        return
    if _Sharing.server is None:
        _Sharing.server = _Sharing.stack.enter_context(running_server(*options))
    yield _Sharing.server


def completion(prompt: str = "a ship", **extra: Any) -> dict[str, Any]:
    """The body of a request."""
    return {"model": MODEL, "prompt": prompt, "return_token_ids": True, **extra}
