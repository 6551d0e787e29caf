"""Tokenizers built from bare vocabularies: sentencepiece-style BPE and byte-level BPE."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

SPACE = "\u2581"  # how sentencepiece writes a space

QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Kind(IntEnum):
    """The type of a vocabulary entry; the numbers are those of sentencepiece and GGUF."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """The entries of a vocabulary in id order."""

    pieces: Sequence[str]
    kinds: Sequence[int]

    def of_kind(self, *kinds: Kind) -> list[int]:
        """The ids of all entries of these kinds."""
        return [index for index, kind in enumerate(self.kinds) if kind in kinds]

    def ids(self) -> dict[str, int]:
        """Piece to id, without the entries that only pad the embedding matrix."""
        used = self.of_kind(*(kind for kind in Kind if kind != Kind.UNUSED))
        return {self.pieces[index]: index for index in used}

    def declare(self, tokenizer: Tokenizer) -> None:
        """Make special and user-defined entries match whole, ahead of the merges."""
        tokenizer.add_tokens(
            [
                AddedToken(
                    self.pieces[index], special=self.kinds[index] != Kind.USER_DEFINED, normalized=False
                )
                for index in self.of_kind(Kind.UNKNOWN, Kind.CONTROL, Kind.USER_DEFINED)
            ]
        )


def sentencepiece_bpe(vocabulary: Vocabulary, scores: Sequence[float], space_prefix: bool) -> Tokenizer:
    """BPE over sentencepiece pieces; the score of a piece ranks the merges that make it."""
    ids = vocabulary.ids()
    tokenizer = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=_merges(vocabulary, ids, scores),
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", SPACE)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if space_prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(steps)
    vocabulary.declare(tokenizer)
    return tokenizer


def byte_level_bpe(vocabulary: Vocabulary, merges: Sequence[str], split: str) -> Tokenizer:
    """BPE over bytes; `split` names how text is cut before the merges (as GGUF names it)."""
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary.ids(), merges=pairs))
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if split == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, gpt2])
    elif split == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
        cut = pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, whole])
    else:
        raise ValueError(f"`split` must be 'smollm' or 'qwen2', got {split!r}")
    tokenizer.decoder = decoders.ByteLevel()
    vocabulary.declare(tokenizer)
    return tokenizer


def begin_with(tokenizer: Tokenizer, token: str) -> None:
    """Put a beginning-of-sequence token before every text."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token}:0 $A:0",
        pair=f"{token}:0 $A:0 {token}:1 $B:1",
        special_tokens=[(token, tokenizer.token_to_id(token))],
    )


def _merges(vocabulary: Vocabulary, ids: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, best first; sentencepiece stores no merges.

    A user-defined piece (a run of spaces, say) is taken ahead of any score, the longest first.
    """
    ranked: list[tuple[float, float, float, int, int]] = []
    for index in vocabulary.of_kind(Kind.NORMAL, Kind.USER_DEFINED):
        piece, given = vocabulary.pieces[index], vocabulary.kinds[index] == Kind.USER_DEFINED
        for cut in range(1, len(piece)):
            left, right = ids.get(piece[:cut]), ids.get(piece[cut:])
            if left is not None and right is not None:
                rank = (0, -cut, cut - len(piece)) if given else (1, -scores[index], 0)
                ranked.append((*rank, left, right))
    ranked.sort()
    return [(vocabulary.pieces[left], vocabulary.pieces[right]) for *_, left, right in ranked]
