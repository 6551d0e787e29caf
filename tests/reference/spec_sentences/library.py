"""The library that a check sees: the names of one side, the tiny models and a tokenizer, the same on both.

Must not import descant: the reference's process imports it too.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.support.manual_forwards import MORE
from tests.support.tiny_models import ARCHITECTURES, Architecture, pad, prompts

ALL: dict[str, Architecture] = {**ARCHITECTURES, **MORE}


class Library:
    """The names of one side as attributes; `load` gives the model of a folder, ready for `model.generate`."""

    def __init__(self, root: Path, places: Sequence[Any], load: Callable[[str, dict[str, Any]], Any]) -> None:
        self.root, self.places, self._load = root, places, load

    def __getattr__(self, name: str) -> Any:
        for place in self.places:
            if hasattr(place, name):
                return getattr(place, name)
        raise AttributeError(f"the library has no {name}")

    @property
    def needs_cache_position(self) -> bool:
        """Whether forwards of the user's own have to be told where they write, as in transformers 4."""
        return transformers.__version__.startswith("4.")

    def arch(self, name: str) -> Architecture:
        """The tiny architecture of that name."""
        return ALL[name]

    def model(self, name: str = "llama", **options: Any) -> Any:
        """A tiny model; its `generate` is that of the library."""
        return self._load(str(self.root / name), options)

    def ids(self, name: str = "llama", length: int = 6, rows: int = 1, seed: int = 3) -> Tensor:
        """Prompts of one length [R, L]."""
        return torch.tensor(prompts(ALL[name], (length,) * rows, seed=seed))

    def batch(self, lengths: Sequence[int], name: str = "llama", seed: int = 3) -> dict[str, Tensor]:
        """Prompts padded at the left, with their mask."""
        arch = ALL[name]
        ids, mask = pad(
            prompts(arch, lengths, seed=seed), arch.pad, "right" if arch.encoder_decoder else "left"
        )
        return {"input_ids": ids, "attention_mask": mask}

    @functools.cached_property
    def tokenizer(self) -> Any:
        """A byte-level tokenizer for the tiny Llama, with the words of the documented stop strings."""
        return word_tokenizer()

    def greedy(self, ids: Tensor, count: int, name: str = "llama") -> Tensor:
        """The likeliest tokens after a prompt [1, L], by forwards without a cache."""
        model = self.model(name)
        for _ in range(count):
            ids = torch.cat((ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)), 1)
        return ids


SPECIAL = ("<pad>", "<s>", "</s>")  # ids 0 to 2, as the tiny Llama has them
WORDS = (
    "st", "op", "stop", "opera", "sto", "pper", "las", "topper", "to", "pped", "at", "tion", "one", "two",
)  # fmt: skip
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;!?-/()@#$%&*Ġ\u010a"


def word_tokenizer(words: Sequence[str] = WORDS) -> Any:
    """A tokenizer of special tokens, words and letters, 97 in all; text is encoded letter by letter."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {text: at for at, text in enumerate([*SPECIAL, *words, *LETTERS][:97])}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    pad_token, bos_token, eos_token = SPECIAL
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token=pad_token,
        bos_token=bos_token,
        eos_token=eos_token,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


@contextlib.contextmanager
def refused(*kinds: type[BaseException]) -> Iterator[None]:
    """A block that must raise an error of one of the kinds, by default any."""
    caught = kinds or (Exception,)
    try:
        yield
    except caught:
        return
    raise AssertionError("it was accepted")


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A folder that is removed afterwards."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """What is warned of in the block, as a warning or as a line in transformers' log."""
    import warnings

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    # `warning_once` remembers what it has said.
    transformers.utils.logging.warning_once.cache_clear()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield said
        said += [str(one.message) for one in caught]
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def ended(ids: Tensor, prompt: int = 6, end: int = 2) -> list[list[int]]:
    """The new tokens of rows up to their end token: 4.52.4 pads beams with the end token if padding is 0."""
    rows = ids[:, prompt:].tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def scores(rows: int = 2, vocab: int = 11, seed: int = 5) -> Tensor:
    """Scores to process [R, V], well apart."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator) * 2
