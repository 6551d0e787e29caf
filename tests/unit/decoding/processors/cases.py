"""Random calls of every documented processor: arguments, ids and scores that both sides can be given."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NEVER = -math.inf


@dataclass(frozen=True)
class Case:
    """One call: the processor's arguments, as the reference's pipe can carry them, and what it is given."""

    arguments: Mapping[str, Any]
    input_ids: Tensor  # [N, L]
    scores: Tensor  # [N, V]


class Draw:
    """A source of chance, and the shapes of the case it draws."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)
        self.torch = torch.Generator().manual_seed(self.random.randrange(2**31))
        self.lines = self.random.randint(1, 5)
        self.size = self.random.choice((2, 3, 5, 8, 16, 23, 40, 64))
        self.length = self.random.randint(1, 12)

    def whole(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def real(self, low: float, high: float) -> float:
        return self.random.uniform(low, high)

    def one(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def tokens(self, least: int = 1, low: int = 0) -> list[int]:
        """Some different tokens."""
        count = self.whole(least, max(least, min(5, self.size - low)))
        return self.random.sample(range(low, self.size), min(count, self.size - low))

    def ends(self) -> Any:
        """What may be given for `eos_token_id`."""
        some = self.tokens()
        return self.one(some, some[0], torch.tensor(some))

    def ids(self, length: int | None = None, lines: int | None = None) -> Tensor:
        """Ids of few kinds, so that they repeat, or of all kinds."""
        top = self.one(min(2, self.size), min(4, self.size), self.size)
        shape = (lines or self.lines, length or self.length)
        return torch.randint(0, top, shape, generator=self.torch)

    def scores(self, ruled_out: bool = True, hopeless: bool = True, lines: int | None = None) -> Tensor:
        """Scores: spread out, level, tied, or the logarithms of powers of two; some of them -inf."""
        shape = (lines or self.lines, self.size)
        kind = self.one("spread", "spread", "close", "tied", "level", "dyadic")
        chance = torch.randn(shape, generator=self.torch)
        scores = {
            "spread": chance * self.one(0.5, 3.0, 10.0),
            "close": chance * 1e-3 + 5.0,
            "tied": (chance * 1.5).round() / 2,
            "level": torch.full(shape, self.one(0.0, -3.5, 1e4)),
            "dyadic": (chance * 2).round() * math.log(2),
        }[kind]
        if ruled_out and self.one(True, False, False):
            gone = torch.rand(shape, generator=self.torch) < self.one(0.2, 0.7, 0.95)
            gone[torch.arange(len(scores)), scores.argmax(1)] = False
            if hopeless and self.one(True, False, False, False):
                gone[self.whole(0, len(scores) - 1)] = True  # a line with nothing left
            scores = scores.masked_fill(gone, NEVER)
        return scores

    def cut(self) -> dict[str, Any]:
        """The arguments that all filters share."""
        given: dict[str, Any] = {}
        if self.one(True, False):
            given["min_tokens_to_keep"] = self.whole(1, 4)
        if self.one(True, False, False):
            given["filter_value"] = self.one(-1.0, -1e9, 0.5, NEVER)
        return given


def _min_length(draw: Draw) -> dict[str, Any]:
    return {"min_length": draw.whole(0, 14), "eos_token_id": draw.ends()}


def _min_new_tokens(draw: Draw) -> dict[str, Any]:
    return {
        "prompt_length_to_skip": draw.whole(0, draw.length),
        "min_new_tokens": draw.whole(0, 8),
        "eos_token_id": draw.ends(),
    }


def _temperature(draw: Draw) -> dict[str, Any]:
    return {"temperature": draw.one(draw.real(0.01, 3.0), 1e-3, 100.0)}


def _repetition(draw: Draw) -> dict[str, Any]:
    ignored = {"prompt_ignore_length": draw.whole(0, 14)} if draw.one(True, False, False) else {}
    return {"penalty": draw.one(draw.real(0.05, 5.0), 1.0, 100.0), **ignored}


def _encoder_repetition(draw: Draw) -> dict[str, Any]:
    return {"penalty": draw.real(0.05, 5.0), "encoder_input_ids": draw.ids(draw.whole(1, 9))}


def _top_p(draw: Draw) -> dict[str, Any]:
    return {"top_p": draw.one(draw.real(0.0, 1.0), 0.0, 1.0, 0.5, 0.9, 0.999, 1e-6), **draw.cut()}


def _top_k(draw: Draw) -> dict[str, Any]:
    return {"top_k": draw.one(1, draw.whole(1, draw.size), draw.size + 7), **draw.cut()}


def _min_p(draw: Draw) -> dict[str, Any]:
    return {"min_p": draw.one(draw.real(0.0, 1.0), 0.0, 1.0, 1e-6, 0.5), **draw.cut()}


def _typical(draw: Draw) -> dict[str, Any]:
    return {"mass": draw.one(draw.real(0.01, 0.99), 1e-6, 0.999), **draw.cut()}


def _epsilon(draw: Draw) -> dict[str, Any]:
    return {"epsilon": draw.one(draw.real(0.001, 0.999), 1e-6, 0.01, 0.1, 1 / 16), **draw.cut()}


def _no_repeat(draw: Draw) -> dict[str, Any]:
    return {"ngram_size": draw.one(1, 2, 3, 4, draw.length + draw.whole(0, 3))}


def _encoder_no_repeat(draw: Draw) -> dict[str, Any]:
    size = draw.one(1, 2, 3, draw.length + draw.whole(0, 3))
    prompts = draw.one(*(n for n in range(1, draw.lines + 1) if draw.lines % n == 0))
    ids = draw.ids(draw.whole(1, 12), prompts)
    return {"encoder_ngram_size": size, "encoder_input_ids": ids[0] if prompts == 1 and size == 2 else ids}


def _word(draw: Draw, ids: Tensor, low: int = 0) -> list[int]:
    """A sequence, often one that a line is about to complete, never longer than the lines."""
    size = draw.whole(1, min(4, draw.length))
    if draw.one(True, True, False) and size > 1:
        line = ids[draw.whole(0, len(ids) - 1)].tolist()
        word = [*line[len(line) - size + 1 :], draw.whole(low, draw.size - 1)]
    else:
        word = [draw.whole(low, draw.size - 1) for _ in range(size)]
    return [max(low, token) for token in word]


def _sequence_bias(draw: Draw, ids: Tensor) -> dict[str, Any]:
    listed = draw.one(True, False)
    words = [_word(draw, ids, low=1 if listed else 0) for _ in range(draw.whole(1, 6))]
    biases = [draw.one(draw.real(-10, 10), -100.0, NEVER) for _ in words]
    if listed:
        return {"sequence_bias": [list(pair) for pair in zip(words, biases, strict=True)]}
    return {"sequence_bias": dict(zip(map(tuple, words), biases, strict=True))}


def _bad_words(draw: Draw, ids: Tensor) -> dict[str, Any]:
    words = [_word(draw, ids) for _ in range(draw.whole(1, 6))]
    ends = {"eos_token_id": draw.ends()} if draw.one(True, False) else {}
    return {"bad_words_ids": words, **ends}


def _prefix(draw: Draw) -> dict[str, Any]:
    beams = draw.one(*(n for n in range(1, draw.lines + 1) if draw.lines % n == 0))
    return {"prefix_allowed_tokens_fn": (draw.whole(0, 10**6), draw.size), "num_beams": beams}


def _forced_eos(draw: Draw) -> dict[str, Any]:
    return {"max_length": draw.one(draw.length + 1, draw.whole(1, 14)), "eos_token_id": draw.ends()}


def _decay(draw: Draw) -> dict[str, Any]:
    return {
        "exponential_decay_length_penalty": (draw.whole(0, 5), draw.real(0.5, 3.0)),
        "eos_token_id": draw.ends(),
        "input_ids_seq_length": draw.whole(0, draw.length),
    }


def _at_begin(draw: Draw) -> dict[str, Any]:
    index = draw.one(draw.length, draw.whole(0, 12))
    return {"begin_suppress_tokens": draw.tokens(), "begin_index": index}


def _whisper(draw: Draw) -> dict[str, Any]:
    mark = draw.whole(1, draw.size - 1)
    fields: dict[str, Any] = {"no_timestamps_token_id": mark, "eos_token_id": draw.whole(1, mark)}
    if draw.one(True, False):
        fields["max_initial_timestamp_index"] = draw.whole(0, 4)
    if draw.one(True, False, False, False):
        fields["_detect_timestamp_from_logprob"] = draw.one(True, False)
    given: dict[str, Any] = {"generate_config": fields}
    if draw.one(True, True, False):
        given["begin_index"] = draw.one(draw.length, draw.whole(1, draw.length))
    if draw.one(True, False, False):
        given["_detect_timestamp_from_logprob"] = draw.one(True, False)
    return given


def _codebooks(draw: Draw) -> dict[str, Any]:
    return {
        "input_start_len": draw.whole(0, 12),
        "semantic_vocab_size": draw.whole(0, draw.size),
        "codebook_size": draw.whole(0, draw.size),
    }


_MEMBERS: dict[str, Callable[[Draw], dict[str, Any]]] = {
    "RepetitionPenaltyLogitsProcessor": _repetition,
    "MinLengthLogitsProcessor": _min_length,
    "TemperatureLogitsWarper": _temperature,
    "TopKLogitsWarper": _top_k,
    "EpsilonLogitsWarper": _epsilon,
    "LogitNormalization": lambda draw: {},
}


def _members(draw: Draw) -> dict[str, Any]:
    names = draw.random.sample(list(_MEMBERS), draw.whole(1, 4))
    return {"members": [(name, _MEMBERS[name](draw)) for name in names]}


ARGUMENTS: dict[str, Callable[[Draw], dict[str, Any]]] = {
    "MinLengthLogitsProcessor": _min_length,
    "MinNewTokensLengthLogitsProcessor": _min_new_tokens,
    "TemperatureLogitsWarper": _temperature,
    "RepetitionPenaltyLogitsProcessor": _repetition,
    "EncoderRepetitionPenaltyLogitsProcessor": _encoder_repetition,
    "TopPLogitsWarper": _top_p,
    "TopKLogitsWarper": _top_k,
    "MinPLogitsWarper": _min_p,
    "TypicalLogitsWarper": _typical,
    "EpsilonLogitsWarper": _epsilon,
    "EtaLogitsWarper": _epsilon,
    "NoRepeatNGramLogitsProcessor": _no_repeat,
    "EncoderNoRepeatNGramLogitsProcessor": _encoder_no_repeat,
    "PrefixConstrainedLogitsProcessor": _prefix,
    "ForcedBOSTokenLogitsProcessor": lambda draw: {"bos_token_id": draw.whole(0, draw.size - 1)},
    "ForcedEOSTokenLogitsProcessor": _forced_eos,
    "InfNanRemoveLogitsProcessor": lambda draw: {},
    "ExponentialDecayLengthPenalty": _decay,
    "LogitNormalization": lambda draw: {},
    "SuppressTokensLogitsProcessor": lambda draw: {"suppress_tokens": draw.tokens()},
    "SuppressTokensAtBeginLogitsProcessor": _at_begin,
    "WhisperTimeStampLogitsProcessor": _whisper,
    "AlternatingCodebooksLogitsProcessor": _codebooks,
    "ClassifierFreeGuidanceLogitsProcessor": lambda draw: {"guidance_scale": draw.real(1.001, 9.0)},
    "LogitsProcessorList": _members,
}
AFTER_IDS: dict[str, Callable[[Draw, Tensor], dict[str, Any]]] = {
    "SequenceBiasLogitsProcessor": _sequence_bias,
    "NoBadWordsLogitsProcessor": _bad_words,
}
DOCUMENTED = (*ARGUMENTS, *AFTER_IDS)


def case(name: str, seed: int) -> Case:
    """The case of that number."""
    draw = Draw(f"{name} {seed}")
    if name == "ForcedBOSTokenLogitsProcessor":
        draw.length = draw.one(1, draw.length)
    ids = draw.ids()
    arguments = ARGUMENTS[name](draw) if name in ARGUMENTS else AFTER_IDS[name](draw, ids)
    # Where the reference cannot have -inf, or no line of it (see test_known_bugs), it is given none.
    plain = ("ExponentialDecayLengthPenalty", "ClassifierFreeGuidanceLogitsProcessor")
    doubled = 2 * draw.lines if name == "ClassifierFreeGuidanceLogitsProcessor" else None
    scores = draw.scores(name not in plain, name != "EtaLogitsWarper", doubled)
    if name == "InfNanRemoveLogitsProcessor":
        for value in (math.nan, math.inf, NEVER):
            scores = scores.masked_fill(torch.rand(scores.shape, generator=draw.torch) < 0.2, value)
    return Case(arguments, ids, scores)
