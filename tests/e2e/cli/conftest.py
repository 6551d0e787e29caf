"""A command line in this process, whose models are loaded once, and a folder with a chat template."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from descant.cli.application import build_app
from descant.models.loading import loading
from tests.support import pretrained

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

_load = functools.lru_cache(maxsize=4)(loading.load)


@pytest.fixture(scope="session")
def stories() -> str:
    """A small model with a real tokenizer, sentencepiece with bytes."""
    return str(pretrained.folder("stories15m"))


@pytest.fixture(scope="session")
def talker(stories: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same model with a chat template."""
    folder = tmp_path_factory.mktemp("talker")
    for file in Path(stories).iterdir():
        (folder / file.name).symlink_to(file.resolve())
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return str(folder)


@pytest.fixture
def descant(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`descant("generate", ...)`: the result of a command line."""
    monkeypatch.setattr(loading, "load", _load)
    monkeypatch.setattr(torch, "seed", lambda: 0)  # a command seeds its process, and this one is the tests'
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: object, **options: Any) -> Any:
        result = CliRunner().invoke(build_app(), [str(one) for one in arguments], **options)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


@pytest.fixture
def loaded() -> Callable[[str], tuple[Any, Any]]:
    """The model and tokenizer that a command line in this process uses."""
    return lambda folder: _load(folder, None, None)
