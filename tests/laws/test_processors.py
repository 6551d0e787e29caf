"""Every processor judges each line by itself and changes nothing."""

import pytest
import torch

import descant
from descant import processors
from descant.processors import LogitsProcessor
from descant.resolve import STAGES
from descant.testing import check_processor

KEEP, MORE = {"min_tokens_to_keep": 1}, {"min_tokens_to_keep": 4}
# Parameters of lines that share a batch: the columns the loop gives a processor.
PARAMS = {
    "RepetitionPenaltyLogitsProcessor": [{"repetition_penalty": 1.3}, {"repetition_penalty": 0.5}],
    "MinLengthLogitsProcessor": [{"min_length": 4, "eos": [2, 3]}, {"min_length": 8, "eos": [5]}],
    "MinNewTokensLengthLogitsProcessor": [
        {"min_new_tokens": 3, "eos": [2]},
        {"min_new_tokens": 1, "eos": [2, 5]},
    ],
    "ForcedBOSTokenLogitsProcessor": [{"forced_bos_token_id": 4}, {"forced_bos_token_id": 6}],
    "ForcedEOSTokenLogitsProcessor": [
        {"limit": 4, "forced_eos_token_id": [2, 3]},
        {"limit": 6, "forced_eos_token_id": [5]},
    ],
    "InfNanRemoveLogitsProcessor": [{}],
    "SuppressTokensLogitsProcessor": [{"suppress_tokens": [1, 2, 3]}, {"suppress_tokens": [4]}],
    "SuppressTokensAtBeginLogitsProcessor": [
        {"begin_suppress_tokens": [1, 2], "begin_index": 3},
        {"begin_suppress_tokens": [4], "begin_index": 1},
    ],
    "TemperatureLogitsWarper": [{"temperature": 0.7}, {"temperature": 1.9}],
    "TopKLogitsWarper": [{"top_k": 3, **KEEP}, {"top_k": 40, **KEEP}, {"top_k": 1, **MORE}],
    "TopPLogitsWarper": [{"tail": 0.1, **KEEP}, {"tail": 0.6, **KEEP}, {"tail": 1.0, **MORE}],
    "MinPLogitsWarper": [{"min_p": 0.1, **KEEP}, {"min_p": 0.5, **KEEP}, {"min_p": 1.0, **MORE}],
    "LogitNormalization": [{}],
}  # fmt: skip

BY_HAND = [
    processors.RepetitionPenaltyLogitsProcessor(1.2),
    processors.MinLengthLogitsProcessor(5, [2, 3]),
    processors.MinNewTokensLengthLogitsProcessor(2, 3, 4),
    processors.ForcedBOSTokenLogitsProcessor(4),
    processors.ForcedEOSTokenLogitsProcessor(6, 2),
    processors.InfNanRemoveLogitsProcessor(),
    processors.SuppressTokensLogitsProcessor([1, 2]),
    processors.SuppressTokensAtBeginLogitsProcessor([1, 2], 3),
    processors.TemperatureLogitsWarper(0.5),
    processors.TopKLogitsWarper(4),
    processors.TopPLogitsWarper(0.7),
    processors.MinPLogitsWarper(0.2),
    processors.LogitNormalization(),
]


def test_every_processor_is_tried():
    public = {
        name
        for name in dir(descant)
        if isinstance(getattr(descant, name), type)
        and issubclass(getattr(descant, name), LogitsProcessor)
        and getattr(descant, name) is not LogitsProcessor
    }
    assert set(PARAMS) == public == {type(one).__name__ for one in BY_HAND}
    assert {type(stage.processor).__name__ for stage in STAGES} <= public


@pytest.mark.parametrize("name", PARAMS)
def test_a_processor_with_a_column_of_parameters(name):
    check_processor(getattr(descant, name).bare(), PARAMS[name])


@pytest.mark.parametrize("processor", BY_HAND, ids=lambda one: type(one).__name__)
def test_a_processor_made_by_hand(processor):
    check_processor(processor)


def test_a_users_own_function():
    check_processor(lambda ids, scores: scores - scores.logsumexp(-1, keepdim=True))


# ------------------------------------------------------------------- the law itself can fail
class _Neighbourly:
    def process(self, context, scores):
        return scores - scores.nan_to_num(0.0, 0.0, 0.0).mean()


class _Destructive:
    def process(self, context, scores):
        return scores.mul_(0.5)


class _Rubbish:
    """Counts what lies beyond a row's end."""

    def process(self, context, scores):
        return scores + context._tokens.sum(1, keepdim=True)


class _Placed:
    def process(self, context, scores):
        return scores + torch.arange(len(scores))[:, None]


class _Counting:
    calls = 0

    def process(self, context, scores):
        self.calls += 1
        return scores + self.calls


class _Narrow:
    def process(self, context, scores):
        return scores[:, :-1]


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (_Neighbourly(), "differ"),
        (_Destructive(), "changed `scores` in place"),
        (_Rubbish(), "differ"),
        (_Placed(), "differ"),
        (_Counting(), "two answers"),
        (_Narrow(), "the answer is"),
    ],
)
def test_a_processor_that_breaks_the_law_is_found(broken, words):
    with pytest.raises(AssertionError, match=words):
        check_processor(broken)
