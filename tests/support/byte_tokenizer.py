"""A tokenizer for the tiny Llama whose tokens overlap: words, their parts, single bytes, special tokens."""

from __future__ import annotations

import functools
from typing import Any

from tests.contracts.configs import VOCAB

SPECIAL = ("<pad>", "<s>", "</s>")  # ids 0 to 2, as the tiny Llama has them
_WORDS = (
    " un", "ivers", " universe", " university", "iverse", "http", "https", ":", "://", "//", "/", "<", "é",
    "€", "x", "yz", "xyzzy", "the", " the", "\n", "\n\n", "!",
)  # fmt: skip
_BYTES = (b" ", b"\xc3", b"\xa9", b"\xe2", b"\x82", b"\xac")
_LETTERS = "abcdefghijklmnopqrstuvwyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,;-?"

TEXTS: tuple[bytes, ...] = tuple(
    [*(one.encode() for one in SPECIAL), *(one.encode() for one in _WORDS), *_BYTES]
    + [one.encode() for one in _LETTERS]
)[:VOCAB]
assert len(set(TEXTS)) == len(TEXTS) == VOCAB


@functools.cache
def tokenizer() -> Any:
    """A byte-level tokenizer of those texts, whose special tokens are special."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = _alphabet(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {
        text.decode() if at < len(SPECIAL) else "".join(alphabet[byte] for byte in text): at
        for at, text in enumerate(TEXTS)
    }
    made = Tokenizer(models.BPE(vocabulary, []))
    made.decoder = decoders.ByteLevel()
    pad, bos, eos = SPECIAL
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=pad, bos_token=bos, eos_token=eos
    )


def _alphabet(letters: list[str]) -> dict[int, str]:
    """The letter that a byte is written as: printable bytes as themselves, the rest in their order."""
    plain = {ord(one): one for one in letters if ord(one) < 256}
    rest = sorted((one for one in letters if ord(one) >= 256), key=ord)
    return plain | dict(zip((byte for byte in range(256) if byte not in plain), rest, strict=True))
