"""Detection from text alone, with the tokenizers of pretrained models: byte-level and sentencepiece."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import numpy as np
import pytest
import torch

import descant
from descant.config.watermarking_config import (
    BaseWatermarkingConfig,
    GumbelWatermarkingConfig,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from descant.decoding.watermark import detection
from descant.decoding.watermark.detection import (
    MARKED,
    TOO_SHORT,
    Detection,
    Detector,
    build_schemes,
    retokenizations,
)
from descant.errors import InputError
from tests.support.pretrained import folder, load
from tests.unit.decoding.watermark.fakes import Counting

TOKENIZERS = ["smollm2", "stories15m"]
SETTINGS = {
    "lefthash": WatermarkingConfig(hashing_key=99991),
    "selfhash": WatermarkingConfig(hashing_key=99991, seeding_scheme="selfhash", context_width=3),
    "synthid": SynthIDTextWatermarkingConfig(ngram_len=4, keys=tuple(range(101, 121))),
    "gumbel": GumbelWatermarkingConfig(key=77, nonces=4),
}
GREEN = SETTINGS["lefthash"]


class Words:
    """Texts of words that are one token each, drawn freely or such as a watermark likes."""

    def __init__(self, name: str) -> None:
        import transformers

        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder(name))
        self.vocabulary = len(self.tokenizer)
        found = {
            word[1:]: place
            for word, place in self.tokenizer.get_vocab().items()
            if re.fullmatch("[\u0120\u2581][a-z]{3,8}", word)
        }
        self.words = sorted(found)
        self.places = [found[word] for word in self.words]

    def drawn(self, seed: int, count: int) -> str:
        rng = np.random.default_rng(seed)
        return " ".join(self.words[at] for at in rng.integers(0, len(self.words), count))

    def marked(
        self, settings: BaseWatermarkingConfig, seed: int, count: int, before: str = "", choice: int = 3
    ) -> str:
        """Each word the best of three, or of another choice."""
        rng = np.random.default_rng(seed)
        scheme = build_schemes(settings, self.vocabulary)[-1]
        words = before.split()
        run = [self.places[self.words.index(word)] for word in words]
        for _ in range(count):
            some = rng.integers(0, len(self.words), choice)
            tail = run[max(0, len(run) - scheme.context_size) :]
            values = [scheme.score_tokens(np.array([*tail, self.places[at]])).values[-1] for at in some]
            best = some[int(np.argmax(values))]
            run.append(self.places[best])
            words.append(self.words[best])
        return " ".join(words[len(before.split()) :])


@functools.cache
def words(name: str) -> Words:
    return Words(name)


@functools.cache
def detector(name: str, label: str) -> Detector:
    source = words(name)
    return Detector(SETTINGS[label], source.vocabulary, source.tokenizer)


def _magnitude(found: Detection) -> float:
    return math.log10(found.p_value)


# ------------------------------------------------------------------------------ text alone
@pytest.mark.parametrize("label", SETTINGS)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_marked_text_is_found_by_its_letters(name: str, label: str) -> None:
    source = words(name)
    text = source.marked(SETTINGS[label], 1, 100)
    found = detector(name, label).text(text)
    assert found.verdict == MARKED
    assert found.p_value < 1e-4
    assert found.tokens >= 100
    assert found.ids == tuple(source.tokenizer(text, add_special_tokens=False)["input_ids"])
    assert found.offsets is not None
    assert [text[begin:end].strip() for begin, end in found.offsets[5:]] == text.split()[
        -len(found.ids) + 5 :
    ]
    assert not detector(name, label).text(source.drawn(2, 100)).marked
    # The start cut off inside a word, and inside the fourth.
    for cut in (1, len(" ".join(text.split()[:3])) + 2):
        chopped = detector(name, label).text(text[cut:])
        assert chopped.marked
        assert _magnitude(chopped) < 0.75 * _magnitude(found)
        assert chopped.tests == found.tests  # no other reading is worth being tried


@pytest.mark.parametrize("label", SETTINGS)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_prompt_in_the_text_is_left_aside(name: str, label: str) -> None:
    source = words(name)
    prompt = source.drawn(3, 300)
    new = source.marked(SETTINGS[label], 3, 60, prompt)
    asked = detector(name, label)
    alone, with_prompt = asked.text(f"{prompt} {new}"), asked.text(f"{prompt} {new}", prompt=prompt)
    assert with_prompt.marked
    assert with_prompt.p_value < alone.p_value
    assert with_prompt.tokens == 60
    assert with_prompt.offsets is not None
    assert len(with_prompt.ids) == len(with_prompt.offsets) == len(with_prompt.evidence.mask)
    hidden = len(with_prompt.ids) - 60
    assert not with_prompt.evidence.mask[:hidden].any()
    assert f"{prompt} {new}"[with_prompt.offsets[hidden][0] :].strip() == new
    # The prompt beside the text says as much, and white space about it nothing.
    new = " " + new if name == "smollm2" else new  # sentencepiece begins with a space by itself
    beside = asked.text(new, prompt=f"{prompt}\n")
    assert beside.tokens == 60
    assert beside.marked
    context = (
        0
        if label in ("synthid", "gumbel")
        else build_schemes(SETTINGS[label], source.vocabulary)[0].context_size
    )
    assert beside.scored - asked.text(new).scored == context


@pytest.mark.parametrize("label", ["lefthash", "gumbel"])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_passage_is_shown_in_the_text(name: str, label: str) -> None:
    source = words(name)
    before, after = source.drawn(6, 200), source.drawn(7, 150)
    passage = source.marked(SETTINGS[label], 6, 90, choice=6)
    text = f"{before} {passage} {after}"
    found = detector(name, label).text(text, windows=True)
    assert found.marked
    assert found.span is not None
    assert found.characters is not None
    begin, end = len(before), len(before) + len(passage) + 1
    low, high = found.characters
    assert (min(high, end) - max(low, begin)) / (max(high, end) - min(low, begin)) > 0.75


def test_the_whole_way_from_a_model() -> None:
    model = load("stories15m")
    prompt = "Once upon a time there was a little dog who"
    ids = torch.tensor([model.tokens(prompt)])
    # Children's stories leave little to choose: the green list needs a strong bias to show in a few lines.
    green = WatermarkingConfig(hashing_key=99991, bias=6.0)
    for settings in (green, SETTINGS["synthid"], SETTINGS["gumbel"]):
        out = descant.generate(
            model.model, ids, max_new_tokens=50, min_new_tokens=50, do_sample=True, seed=4,
            watermarking_config=settings,
        )  # fmt: skip
        new = out[0, ids.shape[1] :]
        text = model.tokenizer.decode(new)
        keys = {"ours": settings, "other": WatermarkingConfig(hashing_key=5)}
        asked = Detector(keys, model.model, model.tokenizer)
        for found in (asked.ids(new), asked.text(text), asked.text(f"{prompt} {text}", prompt=prompt)):
            assert found.verdict == MARKED
            assert found.key == "ours"
            assert 45 <= found.tokens <= 52


# ------------------------------------------------------------------------- other readings
def test_typography_is_read_as_it_was_typed() -> None:
    source = words("smollm2")
    typed = source.marked(GREEN, 8, 60).replace(" ", '" ', 8)  # quotes behind the first words
    plain = source.marked(GREEN, 9, 60)
    asked = detector("smollm2", "lefthash")
    spaced = re.sub(r" (?=[a-m])", "\u00a0", plain)
    assert Detector(GREEN, source.vocabulary, source.tokenizer).ids(
        source.tokenizer(spaced, add_special_tokens=False)["input_ids"]
    ).p_value > 100 * asked.text(plain).p_value  # fmt: skip
    found = asked.text(spaced)
    assert found.marked
    assert found.tests == 2
    assert found.p_value == pytest.approx(2 * asked.text(plain).p_value)
    assert found.ids == asked.text(plain).ids
    curly = typed.replace('"', "\u201d")
    assert asked.text(curly).uncorrected == pytest.approx(asked.text(typed).uncorrected)


class Pairs:
    """A slow tokenizer of two letters a token, in which a shift by one changes every token."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        assert not add_special_tokens
        pairs = [text[at : at + 2] for at in range(0, len(text), 2)]
        return {"input_ids": [int.from_bytes(pair.encode()[:2].ljust(2), "big") % 5000 for pair in pairs]}


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> Detector:
    monkeypatch.setattr(detection, "build_schemes", lambda settings, _: [Counting(settings.hashing_key)])
    return Detector(WatermarkingConfig(hashing_key=3), 5000, Pairs())


def _spelt(seed: int, count: int) -> str:
    """A text whose pairs of letters are marked."""
    rng, scheme, out = np.random.default_rng(seed), Counting(3), ["ab"]
    read = Pairs()
    while len(out) < count:
        last = read(out[-1], add_special_tokens=False)["input_ids"]
        pair = "".join(chr(97 + int(one)) for one in rng.integers(0, 26, 2))
        if scheme.member(tuple(last), read(pair, add_special_tokens=False)["input_ids"][0]):
            out.append(pair)
    return "".join(out)


def test_a_shift_that_changes_everything_is_tried(pairs: Detector) -> None:
    text = _spelt(10, 60)
    assert pairs.text(text).tests == 2  # itself, and with a space before it
    found = pairs.text(text[1:])
    assert found.marked
    assert found.tests == 2
    assert found.tokens == 60  # with the space that stands for the letter cut off
    assert not pairs.ids(Pairs()(text[1:], add_special_tokens=False)["input_ids"]).marked
    stripped = pairs.text(" " + text)
    assert stripped.marked
    assert stripped.ids == pairs.text(text).ids
    worded = pairs.text("abc " + text)  # the start trimmed to the next word makes it even again
    assert worded.marked


def test_without_offsets_there_are_no_characters(pairs: Detector) -> None:
    found = pairs.text(_spelt(11, 60), windows=True)
    assert found.marked
    assert found.span is not None
    assert found.offsets is found.characters is None
    with_prompt = pairs.text("xyzw" + _spelt(12, 40), prompt="xyzw")
    assert with_prompt.tokens == 40
    assert with_prompt.scored == 40
    assert len(with_prompt.evidence.mask) == 42


class FastPairs(Pairs):
    """The same, telling where its tokens stand."""

    is_fast = True

    def __call__(self, text: str, add_special_tokens: bool = True, **asked: bool) -> dict[str, list[Any]]:
        assert asked == {"return_offsets_mapping": True}
        with_prompt: dict[str, list[Any]] = {**super().__call__(text, add_special_tokens)}
        with_prompt["offset_mapping"] = [(at, min(at + 2, len(text))) for at in range(0, len(text), 2)]
        return with_prompt


def test_offsets_are_those_in_the_text_whatever_the_reading() -> None:
    scheme = Counting()

    def split_texts(text: str, prompt: str | None = None) -> list[list[str]]:
        found = retokenizations(FastPairs(), text, prompt, scheme)
        assert all(len(one.offsets or ()) == len(one.ids) for one in found)
        return [[text[begin:end] for begin, end in one.offsets or ()] for one in found]

    assert split_texts("abcdefghijklm") == [
        ["ab", "cd", "ef", "gh", "ij", "kl", "m"],
        ["a", "bc", "de", "fg", "hi", "jk", "lm"],
    ]
    assert split_texts(" abcdefghijkl")[1] == ["ab", "cd", "ef", "gh", "ij", "kl"]
    lines = [letter + "\r\n" for letter in "abcdefg"]
    assert split_texts("".join(lines))[-1] == lines
    # The continuation by itself.
    assert split_texts("prompt!abcdefghijklmn", "prompt!")[1] == ["ab", "cd", "ef", "gh", "ij", "kl", "mn"]


def test_readings_that_say_the_same_are_one() -> None:
    source = words("stories15m")
    scheme = build_schemes(GREEN, source.vocabulary)[0]
    for text in (source.drawn(14, 50), " " + source.drawn(14, 50), "", " ", "one"):
        (only,) = retokenizations(source.tokenizer, text, None, scheme)
        assert list(only.ids) == source.tokenizer(text, add_special_tokens=False)["input_ids"]


# ------------------------------------------------------------------------------ too little
@pytest.mark.parametrize("label", SETTINGS)
@pytest.mark.parametrize("text", ["", " ", "\n", "dog", "the dog"])
def test_next_to_nothing_is_too_short(text: str, label: str) -> None:
    for prompt in (None, "", "the", text):
        found = detector("smollm2", label).text(text, prompt=prompt, windows=True)
        assert found.verdict == TOO_SHORT
        assert found.p_value > 0.01


def test_what_is_no_text() -> None:
    asked = detector("smollm2", "lefthash")
    with pytest.raises(InputError, match="`text` must be a string, got 3: pass token ids to `ids`"):
        asked.text(3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="`prompt` must be a string, like the text, got 3"):
        asked.text("a text", prompt=3)  # type: ignore[arg-type]
