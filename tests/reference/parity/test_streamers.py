"""Streamed text equals the reference's piece by piece, except where that has a broken character."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from descant.api.compat.streamers import TextStreamer
from tests.support import pretrained

LOST = "\ufffd"
TOKENIZERS = (
    "smollm2",
    "minimind2-small",
    "stories15m",
    "gemma3-270m",
    "flan-t5-small-titles",
    "whisper-tiny.en",
)
WORDS = (
    "Hello world, this is a test of words. And  two spaces, a\ttab too.",
    "Once upon a time, in naïve cafés — “quoted” … it was 12.5 % o'clock!",
    "One line.\nThe next line.\n\nA new paragraph; the end.\n",
)
CJK = (
    "日本語のテキストと中文字符, 漢字 and words 한국어 단어 끝",
    "我们一起学习。今天天气很好！𠀀𠮷 is rare",
)
MARKS = (
    "👨‍👩‍👧‍👦 family 🇫🇷 flags 🏳️‍🌈! and more",
    "हिन्दी में पाठ, தமிழ் உரை, ภาษาไทยไม่มีช่องว่าง",
    "አማርኛ ጽሑፍ ok",
)


tokenizer = pretrained.tokenizer


class Collected(TextStreamer):
    """A user's own streamer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.texts: list[tuple[str, bool]] = []

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.texts.append((text, stream_end))


def runs(name: str, texts: tuple[str, ...], whole: bool = True) -> list[list[list[int]]]:
    """Prompts of several lengths and the steps after them; `whole`: none ends within a character."""
    found = []
    for text in texts:
        ids = tokenizer(name)(text)["input_ids"]
        for cut in sorted({1, len(ids) // 3, len(ids) // 2}):
            while whole and tokenizer(name).decode(ids[:cut]).endswith(LOST):
                cut += 1
            found.append([ids[:cut], *([one] for one in ids[cut:])])
    return found


def ours(name: str, run: list[list[int]], **arguments: Any) -> list[tuple[str, bool]]:
    streamer = Collected(tokenizer(name), **arguments)
    streamer.put(torch.tensor([run[0]]))
    for ids in run[1:]:
        streamer.put(torch.tensor(ids))
    streamer.end()
    return streamer.texts


def both(reference, name: str, texts: tuple[str, ...], whole: bool = True, **arguments: Any) -> list[Any]:
    """Each run with our pieces and the reference's."""
    # What the two versions clean up differs, and neither does unless a tokenizer's own config says so.
    arguments |= {"clean_up_tokenization_spaces": False}
    all_runs = runs(name, texts, whole)
    folder = str(pretrained.folder(name))
    theirs = reference.ask("streamer", tokenizer=folder, arguments=arguments, runs=all_runs)
    mine = [ours(name, run, **arguments) for run in all_runs]
    return list(zip(all_runs, mine, theirs, strict=True))


def joined(pieces: list[tuple[str, bool]]) -> str:
    return "".join(text for text, _ in pieces)


@pytest.mark.parametrize("options", [{}, {"skip_prompt": True}, {"skip_special_tokens": True}], ids=str)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_same_pieces(name, options, reference):
    """Word by word and ideograph by ideograph, one piece a put, empty ones among them."""
    texts = tuple(text for text in WORDS + CJK + MARKS if name != "stories15m" or "\n" not in text)
    for run, mine, theirs in both(reference, name, texts, **options):
        assert mine == theirs
        assert len(mine) == len(run) + (0 if "skip_prompt" in options else 1)
        assert [last for _, last in mine] == [False] * (len(mine) - 1) + [True]


@pytest.mark.parametrize("name", ["smollm2", "stories15m", "gemma3-270m"])
def test_the_same_pieces_of_random_tokens(name, reference):
    rng = random.Random(name)
    # Tokens that are text by themselves, line breaks apart (see below).
    fine = [one for one in range(300, 30000) if not {LOST, "\n"} & set(tokenizer(name).decode([one]))]
    all_runs = [[rng.choices(fine, k=5), *([one] for one in rng.choices(fine, k=60))] for _ in range(20)]
    folder = str(pretrained.folder(name))
    theirs = reference.ask("streamer", tokenizer=folder, arguments={}, runs=all_runs)
    assert [ours(name, run) for run in all_runs] == theirs


def test_a_line_break_does_not_cost_a_space(reference):
    """The reference decodes each line alone, where sentencepiece drops the space before its first word."""
    texts = ("one\n two\n three and four",)
    for run, mine, theirs in both(reference, "stories15m", texts):
        whole = [one for ids in run for one in ids]
        assert joined(mine) == tokenizer("stories15m").decode(whole)
        assert joined(theirs) != joined(mine)
        assert joined(theirs).replace(" ", "") == joined(mine).replace(" ", "")


@pytest.mark.parametrize("name", ["smollm2", "minimind2-small", "stories15m", "whisper-tiny.en"])
def test_a_prompt_that_ends_within_a_character(name, reference):
    """The reference skips the prompt and with it the first bytes; we show the character they begin."""
    broken = 0
    for run, mine, theirs in both(reference, name, MARKS, whole=False, skip_prompt=True):
        assert LOST not in joined(mine)
        whole = tokenizer(name).decode(
            [one for ids in run for one in ids], clean_up_tokenization_spaces=False
        )
        assert whole.endswith(joined(mine))
        broken += LOST in joined(theirs)
    assert broken, "what the reference breaks"
