"""The contract of configs: roundtrips preserve them."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

from descant.config.generation_config import GenerationConfig


def check_config_roundtrip(config: GenerationConfig) -> None:
    """A config is preserved by roundtrips through a dict, a file, pickling and copying."""
    kind = type(config)
    factory, arguments = config.__reduce__()  # what another process is sent
    copies = {
        "to_dict and from_dict": kind.from_dict(config.to_dict()),
        "__reduce__": factory(*arguments),
        "copy.deepcopy": copy.deepcopy(config),
        "replace()": config.replace(),
    }
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder, "first"), Path(folder, "second")
        config.save_pretrained(first)
        copies["save_pretrained and from_pretrained"] = read = kind.from_pretrained(first)
        read.save_pretrained(second)
        files = [next(path.iterdir()).read_bytes() for path in (first, second)]
    if files[0] != files[1]:
        raise AssertionError(f"written, read and written again the file differs:\n{files[0]!r}\n{files[1]!r}")
    for method, other in copies.items():
        if other != config or hash(other) != hash(config) or other.given != config.given:
            raise AssertionError(f"by {method} the config became {other!r}, it was {config!r}")
        if other.to_diff_dict() != config.to_diff_dict():
            raise AssertionError(f"by {method} the difference became {other.to_diff_dict()}")
