"""A byte-level tokenizer of all bytes and some pairs that JSON is full of, for tiny models with grammars."""

from __future__ import annotations

import functools
from typing import Any

SPECIAL = ("<pad>", "<s>", "</s>")  # ids 0 to 2, as the toy model has them
_PAIRS = (
    ("{", '"'), ('"', ":"), ('":', " "), ('": ', '"'), ('"', ","), ('",', " "), ('", ', '"'), ('"', "}"),
    ("a", "b"), ("1", "2"), ("n", "a"), ("na", "me"), ("m", "e"), ("t", "r"), ("u", "e"), ("tr", "ue"),
    ("[", '"'),
)  # fmt: skip


@functools.cache
def tokenizer() -> Any:
    """The tokenizer; its first tokens are special."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    space = "\u0120"
    merges = [tuple(part.replace(" ", space) for part in pair) for pair in _PAIRS]
    merges.sort(key=lambda pair: len("".join(pair)))
    tokens = [*SPECIAL, *letters, *("".join(pair) for pair in merges)]
    made = Tokenizer(models.BPE({token: index for index, token in enumerate(dict.fromkeys(tokens))}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    pad, bos, eos = SPECIAL
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=pad, bos_token=bos, eos_token=eos
    )
