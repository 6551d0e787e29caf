"""GGUF files as models: which file a name means, and how transformers reads it.

A GGUF file holds weights, config and tokenizer, and no code. transformers dequantizes the weights.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from tokenizers.processors import TemplateProcessing
from transformers.utils.hub import cached_file

from descant.errors import InputError, MissingExtra
from descant.models.gguf_header import GgufHeader, MalformedGguf
from descant.models.weight_files import WeightFiles, check_no_adapter

__all__ = ["GgufFile"]

_SUFFIX: Final = ".gguf"
_CONFIG: Final = "config.json"


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file as transformers takes it: its folder, and its name in the folder."""

    folder: str
    file: str

    @classmethod
    def find(cls, name: str) -> GgufFile | None:
        """The GGUF file that a model's name means; None for models of other formats.

        It is a file, the only one of a folder without a config, or OWNER/NAME/FILE.gguf on the Hub.
        """
        path = Path(name).expanduser()
        if name.endswith(_SUFFIX):
            return cls._checked(path if path.is_file() else _hub_file(name))
        if not path.is_dir() or (path / _CONFIG).exists():
            return None
        files = sorted(file for file in path.iterdir() if file.suffix == _SUFFIX)
        if len(files) > 1:
            do = f"give one of them: {files[0]}"
            must = "must have one GGUF file, or a config.json"
            raise InputError("model", must, [file.name for file in files], do)
        return cls._checked(files[0]) if files else None

    @classmethod
    def _checked(cls, path: Path) -> GgufFile:
        if importlib.util.find_spec("gguf") is None:
            raise MissingExtra("gguf", f"loading {path.name}")
        return cls(str(path.parent), path.name)

    @property
    def path(self) -> Path:
        """The path of the file."""
        return Path(self.folder) / self.file

    @cached_property
    def header(self) -> GgufHeader:
        """The checked header of the file."""
        check_no_adapter(self.folder)
        try:
            return GgufHeader.read(self.path)
        except (MalformedGguf, OSError) as error:
            raise InputError("model", f"must be a GGUF file ({error})", str(self.path)) from error

    def weights(self) -> WeightFiles:
        """The file with the number and the size of its tensors."""
        return WeightFiles(str(self.path), (self.path,), self.header.num_tensors, self.header.num_bytes)

    def complete_tokenizer(self, tokenizer: Any) -> Any:
        """A tokenizer as the file describes it: transformers leaves out the token that prompts begin with."""
        bos, bos_id = tokenizer.bos_token, tokenizer.bos_token_id
        if not self.header.adds_bos or bos is None or tokenizer("")["input_ids"][:1] == [bos_id]:
            return tokenizer
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
        )
        return tokenizer


def _hub_file(name: str) -> Path:
    """The local copy of OWNER/NAME/FILE.gguf on the Hub."""
    owner, _, rest = name.partition("/")
    repository, _, file = rest.partition("/")
    if name.startswith((".", "/", "~")) or not (owner and repository and file):
        must = "must be a GGUF file that exists, or OWNER/NAME/FILE.gguf on the Hub"
        raise InputError("model", must, name)
    return Path(str(cached_file(f"{owner}/{repository}", file)))
