"""The stopping criteria by themselves: their verdicts, and what they refuse."""

import random
import re
import time

import pytest
import torch
import transformers

import descant
from descant import InputError
from descant.decoding import stopping
from descant.decoding.stopping import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopRegexCriteria,
    StopStringCriteria,
)
from tests.support import pretrained, wordpiece


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(pretrained.folder("minimind2-small"))


def batch(tokenizer, *texts, pad=None):
    """The texts as rows, padded in front."""
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    wide = max(map(len, rows))
    pad = tokenizer.pad_token_id if pad is None else pad
    return torch.tensor([[pad] * (wide - len(row)) + row for row in rows])


def test_the_base_says_what_to_define():
    class Mine(StoppingCriteria):
        pass

    with pytest.raises(NotImplementedError, match="Mine must define `__call__`"):
        Mine()(torch.zeros(1, 1, dtype=torch.long), None)


def test_length():
    ids = torch.zeros(3, 5, dtype=torch.long)
    for limit, ended in ((4, True), (5, True), (6, False)):
        verdict = MaxLengthCriteria(limit, max_position_embeddings=8)(ids, None)
        assert verdict.tolist() == [ended] * 3
        assert verdict.dtype == torch.bool


def test_rows_beyond_the_model_give_one_warning(recwarn):
    criterion = MaxLengthCriteria(10, max_position_embeddings=8)
    for length in (7, 8, 9, 10):
        ids = torch.zeros(1, length, dtype=torch.long)
        assert criterion(ids, None).tolist() == [length == 10]
        assert len(recwarn) == (length >= 8)
    assert "rows of 8 tokens have reached the 8 positions of the model" in str(recwarn[0].message)
    MaxLengthCriteria(8, max_position_embeddings=8)(torch.zeros(1, 8, dtype=torch.long), None)
    assert len(recwarn) == 1
    with pytest.raises(InputError, match="max_position_embeddings"):
        MaxLengthCriteria(9, max_position_embeddings=-1)


def test_time_by_its_other_name(monkeypatch):
    monkeypatch.setattr(stopping.time, "time", lambda: 100.0)
    assert MaxTimeCriteria(3.0, initial_time=96.0)(torch.zeros(1, 1), None).tolist() == [True]
    assert MaxTimeCriteria(3.0, initial_time=98.0).initial_timestamp == 98.0
    with pytest.raises(InputError, match="`initial_time` must not be given with"):
        MaxTimeCriteria(3.0, 98.0, initial_time=98.0)


def test_time(monkeypatch):
    ids = torch.zeros(2, 1, dtype=torch.long)
    monkeypatch.setattr(stopping.time, "time", lambda: 100.0)
    since_now, since_then = MaxTimeCriteria(5), MaxTimeCriteria(5, initial_timestamp=90.0)
    assert since_now(ids, None).tolist() == [False, False]
    assert since_then(ids, None).tolist() == [True, True]
    monkeypatch.setattr(stopping.time, "time", lambda: 105.0)
    assert since_now(ids, None).tolist() == [False, False], "not before it is over"
    monkeypatch.setattr(stopping.time, "time", lambda: 105.1)
    assert since_now(ids, None).tolist() == [True, True]


@pytest.mark.parametrize("eos", [2, [2], (2, 9), torch.tensor(2), torch.tensor([9, 2], dtype=torch.int32)])
def test_end_tokens(eos):
    ids = torch.tensor([[1, 2], [2, 1], [5, 2]])
    assert EosTokenCriteria(eos)(ids, None).tolist() == [True, False, True]
    assert EosTokenCriteria(eos)(ids[:, :0], None).tolist() == [False] * 3


def test_any_of_a_list_ends_a_row():
    ids = torch.tensor([[1, 2], [2, 1], [3, 3]])
    some = StoppingCriteriaList([EosTokenCriteria(2), EosTokenCriteria(3), lambda ids, scores, **more: False])
    assert some(ids, None).tolist() == [True, False, True]
    assert some.max_length is None
    some.append(MaxLengthCriteria(2))
    some.append(MaxLengthCriteria(9))
    assert some(ids, None).tolist() == [True] * 3
    assert some.max_length == 2
    assert StoppingCriteriaList()(ids, None).tolist() == [False] * 3


def test_a_list_hands_on_what_it_is_given():
    seen = []
    scores = torch.ones(1, 4)
    mine = StoppingCriteriaList([lambda ids, scores, **more: seen.append((scores, more)) or True])
    assert mine(torch.tensor([[1]]), scores, answer=42).tolist() == [True]
    assert seen == [(scores, {"answer": 42})]


@pytest.mark.parametrize("verdict", [None, 1, torch.tensor([1, 0]), torch.tensor([True] * 3), "yes"])
def test_a_verdict_that_is_none_is_refused(verdict):
    with pytest.raises(InputError, match="must return a bool, or a bool tensor with one entry per row"):
        StoppingCriteriaList([lambda ids, scores: verdict])(torch.zeros(2, 1, dtype=torch.long), None)


def test_stop_strings(tokenizer):
    ids = batch(tokenizer, "we stop", "we stop at", "unstoppable stop", "top", "stop")
    assert StopStringCriteria(tokenizer, "stop")(ids, None).tolist() == [True, False, True, False, True]
    both = StopStringCriteria(tokenizer, ["stop", "at"])
    assert both(ids, None).tolist() == [True, True, True, False, True]
    assert both.stop_strings == ("stop", "at")


@pytest.mark.parametrize("make", [wordpiece.tokenizer, None])
def test_padding_in_front_does_not_matter(make, tokenizer):
    tokenizer = make() if make else tokenizer
    # What padding would begin, if it were text, and any first token completes.
    strings = [tokenizer.pad_token + letter for letter in " aest"] + ["stop", "e"]
    criterion, draw = StopStringCriteria(tokenizer, strings), random.Random(3)
    for _ in range(50):
        rows = [[draw.randrange(5, len(tokenizer)) for _ in range(draw.randint(1, 6))] for _ in range(4)]
        alone = [bool(criterion(torch.tensor([row]), None)) for row in rows]
        for extra in (0, 1, 9):
            wide = max(map(len, rows)) + extra
            padded = torch.tensor([[tokenizer.pad_token_id] * (wide - len(row)) + row for row in rows])
            assert criterion(padded, None).tolist() == alone


def test_a_pad_token_that_is_text_is_text(tokenizer):
    """Where the end token pads, and is waited for by name."""
    pad, criterion = tokenizer.pad_token_id, StopStringCriteria(tokenizer, tokenizer.pad_token)
    assert criterion(torch.tensor([[pad, 100, pad]]), None).tolist() == [True]
    assert criterion(torch.tensor([[pad]]), None).tolist() == [True], "the last token is never padding"
    assert criterion(torch.tensor([[pad, 100]]), None).tolist() == [False]
    after = StopStringCriteria(tokenizer, tokenizer.pad_token + "s")
    stop = batch(tokenizer, "stop").tolist()[0][:1]
    assert after(torch.tensor([[pad, 100, pad, *stop]]), None).tolist() == [True], "no padding inside a row"
    assert after(torch.tensor([[pad, pad, *stop]]), None).tolist() == [False]


def test_ids_are_left_alone(tokenizer):
    ids = batch(tokenizer, "stop", "a long way to go")
    before = ids.clone()
    StopStringCriteria(tokenizer, "stop")(ids, None)
    StopRegexCriteria(tokenizer, "stop")(ids, None)
    assert torch.equal(ids, before)


def test_regular_expressions(tokenizer):
    ids = batch(tokenizer, "The answer is 42.", "The answer is", "42 it is, is it?")
    assert StopRegexCriteria(tokenizer, r"\d+")(ids, None).tolist() == [True, False, True]
    assert StopRegexCriteria(tokenizer, re.compile(r"ANSWER IS \d", re.I))(ids, None).tolist() == [
        True,
        False,
        False,
    ]
    assert StopRegexCriteria(tokenizer, "^42")(ids, None).tolist() == [False, False, True], (
        "no padding before it"
    )


def test_only_what_is_new_is_searched(tokenizer):
    prompt = batch(tokenizer, "What is 6 x 7?").tolist()[0]
    ids = torch.tensor([prompt + batch(tokenizer, " It is").tolist()[0]])
    assert StopRegexCriteria(tokenizer, r"\d")(ids, None).tolist() == [True]
    assert StopRegexCriteria(tokenizer, r"\d", prompt_length=len(prompt))(ids, None).tolist() == [False]
    assert StopRegexCriteria(tokenizer, r"^ It", prompt_length=len(prompt))(ids, None).tolist() == [True]


def test_half_a_character_is_not_there_yet(tokenizer):
    ids = batch(tokenizer, "𐍈")
    assert ids.shape[1] > 1
    criterion = StopRegexCriteria(tokenizer, ".")
    assert [criterion(ids[:, :n], None).item() for n in range(1, ids.shape[1] + 1)][-2:] == [False, True]


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda _: MaxLengthCriteria(-1), "max_length"),
        (lambda _: MaxLengthCriteria(2.5), "max_length"),
        (lambda _: MaxTimeCriteria("soon"), "max_time"),
        (lambda _: MaxTimeCriteria(-1.0), "max_time"),
        (lambda _: MaxTimeCriteria(float("nan")), "max_time"),
        (lambda _: EosTokenCriteria([]), "eos_token_id"),
        (lambda _: EosTokenCriteria("</s>"), "eos_token_id"),
        (lambda _: EosTokenCriteria(2.0), "eos_token_id"),
        (lambda _: EosTokenCriteria(True), "eos_token_id"),
        (lambda tokenizer: StopStringCriteria(tokenizer, []), "stop_strings"),
        (lambda _: StopStringCriteria(None, "stop"), "tokenizer"),
        (lambda tokenizer: StopRegexCriteria(tokenizer, "("), "pattern"),
        (lambda tokenizer: StopRegexCriteria(tokenizer, None), "pattern"),
        (lambda tokenizer: StopRegexCriteria(tokenizer, "a", -1), "prompt_length"),
    ],
)
def test_wrong_arguments_are_named(make, field, tokenizer):
    with pytest.raises(InputError) as caught:
        make(tokenizer)
    assert caught.value.field == field


def test_the_clock_is_that_of_the_wall():
    assert abs(MaxTimeCriteria(1.0).initial_timestamp - time.time()) < 5


def test_a_length_given_by_hand_replaces_the_configs(tiny):
    """As in transformers 4.x, where MaxLengthCriteria was the way to say it."""
    model = tiny("llama").model
    ids = torch.tensor([[5, 6, 7], [0, 8, 9]])
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
    for given in ({}, {"max_new_tokens": 2}, {"max_length": 4}):
        found = descant.generate(
            model,
            ids,
            attention_mask=mask,
            eos_token_id=None,
            stopping_criteria=[MaxLengthCriteria(31)],
            **given,
        )
        assert found.shape == (2, 31)


def test_a_list_is_completed_with_a_length():
    given = StoppingCriteriaList([EosTokenCriteria(2)])
    complete = descant.validate_stopping_criteria(given, 9)
    assert (complete.max_length, len(given), given.max_length) == (9, 1, None)
    assert descant.validate_stopping_criteria(complete, 9) is not complete
    with pytest.warns(UserWarning, match="9 in the stopping criteria, 5"):
        assert descant.validate_stopping_criteria(complete, 5).max_length == 9


def test_the_start_has_its_documented_name():
    ids = torch.zeros(2, 3, dtype=torch.long)
    assert MaxTimeCriteria(5.0, initial_time=time.time() - 9)(ids, None).tolist() == [True, True]
    assert MaxTimeCriteria(5.0, initial_time=time.time())(ids, None).tolist() == [False, False]
    with pytest.raises(InputError, match="the same argument"):
        MaxTimeCriteria(5.0, 1.0, initial_time=2.0)
