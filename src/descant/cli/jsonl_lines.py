"""Lines of `descant generate --input`: reading and checking them."""

from __future__ import annotations

import difflib
import json
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import fstat
from typing import Any, BinaryIO, Final

from descant.config.fields import RedactedMap
from descant.config.generation_config import FIELDS
from descant.errors import InputError

__all__ = ["RUN_KEY", "InputLine", "InputLines", "check_names", "echo_line"]

RUN_KEY: Final = "run"  # what a row of an output file was made from, as a digest
RESULT_KEYS: Final = ("completions", "error", RUN_KEY)  # added to a line of output
PROMPT_KEYS: Final = ("prompt", "messages")
# Must not be set in a line. Lines may be untrusted, and a step is compiled for a session, not for a line.
JOB_ONLY_KEYS: Final = {
    "recipe": "give --recipe",
    "custom_generate": "give --recipe",
    "trust_remote_code": "give --recipe",
    "compile_config": "give --compile-config or --config",
}
# Names of the same parameters in other programs.
FOREIGN_NAMES: Final = {
    "stop": "stop_strings",
    "temp": "temperature",
}
MIN_SIMILARITY: Final = (
    0.81  # of a misspelt name; `prompt_id`, a name of the user's own, is 0.8 like `prompt`
)


@dataclass(frozen=True)
class InputLine:
    """One line that is not blank: its index among those, its number in the file, its bytes."""

    index: int
    number: int
    data: bytes


@dataclass(frozen=True)
class InputLines:
    """Lines of a file or a pipe, and their number, if known."""

    lines: Iterable[bytes]
    count: int | None = None

    @classmethod
    def from_prompt(cls, prompt: str) -> InputLines:
        """A single prompt as one line."""
        return cls([json.dumps({"prompt": prompt}).encode()], 1)

    @classmethod
    def from_file(cls, file: BinaryIO) -> InputLines:
        """The lines of an open file, counted if it is a regular file."""
        if not stat.S_ISREG(fstat(file.fileno()).st_mode):
            return cls(file)
        count = sum(1 for line in file if line.strip())
        file.seek(0)
        return cls(file, count)

    def __iter__(self) -> Iterator[InputLine]:
        index = 0
        for number, data in enumerate(self.lines, 1):
            if data.strip():
                yield InputLine(index, number, data)
                index += 1


def check_names(data: Mapping[str, Any]) -> None:
    """Raise InputError for what a line must not set, and for a name that is nearly a known one."""
    for name, advice in JOB_ONLY_KEYS.items():
        if data.get(name) is not None:
            raise InputError(name, "applies to all lines and must not be set in one", data[name], advice)
    for name, value in data.items():
        if name not in FIELDS and name not in (*PROMPT_KEYS, *RESULT_KEYS, *JOB_ONLY_KEYS):
            meant = _similar_name(name)
            if meant is not None:
                requirement = "must be a generation parameter, or a name that is not nearly one"
                raise InputError(name, requirement, value, f"did you mean `{meant}`?")


def echo_line(data: Mapping[str, Any]) -> dict[str, Any]:
    """The data of a line as written back: without results of an earlier run, and without watermark keys."""
    kept = {name: value for name, value in data.items() if name not in RESULT_KEYS}
    if isinstance(kept.get("watermarking_config"), Mapping):
        kept["watermarking_config"] = RedactedMap(kept["watermarking_config"]).without_secrets()
    return kept


def _similar_name(name: str) -> str | None:
    """The known name that a misspelt one stands for; None: it is a name of the user's own."""
    known = (*FIELDS, *PROMPT_KEYS)
    if name in FOREIGN_NAMES:
        return FOREIGN_NAMES[name]
    plain = _plain(name)
    equal = next((one for one in known if _plain(one) == plain), None)
    if equal is not None:
        return equal
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=MIN_SIMILARITY)), None)


def _plain(name: str) -> str:
    return name.casefold().replace("_", "").replace("-", "").replace(" ", "")
