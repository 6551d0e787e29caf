"""One server for the tests of this folder, with a small pretrained model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import pretrained
from tests.support.server_process import ServerProcess

KEYS = {"alice": "alice-key-of-the-tests", "bob": "bob-key-of-the-tests-2"}


@pytest.fixture(scope="session")
def model_folder() -> str:
    return str(pretrained.folder("smol-draft"))


@pytest.fixture(scope="session")
def server(model_folder: str) -> Iterator[ServerProcess]:
    """A server without keys, with traces."""
    with ServerProcess(model_folder, "--traces", "8", "--kv-memory", "0.5") as running:
        yield running


@pytest.fixture(scope="session")
def keyed_server(model_folder: str) -> Iterator[ServerProcess]:
    """A server with two keys."""
    keys = ",".join(f"{name}={key}" for name, key in KEYS.items())
    with ServerProcess(
        model_folder, "--traces", "8", "--kv-memory", "0.5", env={"DESCANT_API_KEYS": keys}
    ) as running:
        yield running
