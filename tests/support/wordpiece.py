"""A WordPiece tokenizer, made on the spot: no model of ours has one."""

from __future__ import annotations

from typing import Any

TEXT = [
    "The stopper stopped at the end of the operation, and everybody stood still.",
    "Do not stop! Can't you see? It's the last station; they're waiting for a topping.",
    "Endless words end where sentences end. Human: answer the question, please.",
    "naïve café déjà vu 日本 語 문 Ω",
]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
WORDS = ["stop", "end", "the", "top", "st", "Human", "oper", "las", "at", "still", "sto", "wait", "'s", "n't"]
PIECES = ["per", "pped", "ped", "op", "to", "ation", "ing", "ed", "less", "es", "top", "topper", "pping", "s"]


def tokenizer(cleanup: bool = True) -> Any:
    """One of the letters of `TEXT` and some pieces of words, as transformers wraps it."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # Spelled out, because a trainer settles ties in another way every time.
    letters = sorted({letter for text in TEXT for letter in text} - {" "})
    tokens = [*SPECIAL, *letters, *WORDS, *(f"##{piece}" for piece in [*letters, *PIECES])]
    vocabulary = {token: at for at, token in enumerate(dict.fromkeys(tokens))}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(prefix="##", cleanup=cleanup)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
