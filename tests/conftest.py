"""Fixtures of the whole suite: one thread, no network, the oracle, tiny models and pretrained ones."""

from __future__ import annotations

import os

# Before torch and transformers are imported: both read the environment at import.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests import pretrained
from tests import tiny as tiny_models
from tests.oracle.client import Oracle

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def oracle() -> Iterator[Oracle]:
    """transformers 4.52.4; its process starts at the first question."""
    client = Oracle()
    yield client
    client.close()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tiny_models.Tiny]:
    """`tiny(name)`: a tiny random model, built once per run; keywords go to `from_pretrained`."""
    root = tmp_path_factory.mktemp("tiny")
    loaded: dict[Any, tiny_models.Tiny] = {}

    def get(name: str, **options: Any) -> tiny_models.Tiny:
        key = name, *sorted(options.items())
        if key not in loaded:
            if not (root / name).exists():
                tiny_models.build(name, root / name)
            loaded[key] = tiny_models.load(name, root / name, **options)
        return loaded[key]

    return get


@pytest.fixture(scope="session")
def real() -> Callable[[str], pretrained.Pretrained]:
    """`real(name)`: a pretrained model; fails with the command that builds it when it is missing."""
    return pretrained.load
