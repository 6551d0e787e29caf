"""One browser for the tests of this folder, sheets of it that are closed after each test, and real runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from tests.e2e.browser import chromium
from tests.e2e.browser.chromium import Sheet
from tests.e2e.browser.runs import Runs
from tests.support.pretrained import Pretrained


# No longer than this folder: Playwright leaves an event loop running, and tests elsewhere start their own.
@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Chromium, started once."""
    with chromium.started() as found:
        yield found


@pytest.fixture
def sheet(browser: Browser) -> Iterator[Callable[..., Sheet]]:
    """`sheet(path)`: a file opened in a page of its own; keywords go to its context."""
    contexts = []

    def opened(path: Path, **given: Any) -> Sheet:
        context = browser.new_context(**chromium.options(**given))
        contexts.append(context)
        return chromium.sheet(context).open(path)

    yield opened
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def runs(real: Callable[[str], Pretrained], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Traced runs of SmolLM2."""
    return Runs(lambda: real("smollm2"), tmp_path_factory.mktemp("runs"))
