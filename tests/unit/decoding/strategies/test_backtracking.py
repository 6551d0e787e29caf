"""Phrase bans with backtracking: no phrase, the reference's tokens, and events that are never retracted."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch

from descant import ConfigError, GenerationConfig, InputError, Request, RowError, generate, stream
from descant.decoding.processors.truncation import MirostatLogitsWarper
from descant.engine.session import Finished, Session, Tokens
from descant.testing import outcomes
from tests.contracts.configs import TEXTS, tokenizer
from tests.support import byte_tokenizer as spelling
from tests.support.tiny_models import pad, prompts


def ids(text: str) -> list[int]:
    """A token for each character."""
    return [TEXTS.index(one) for one in text]


def text(tokens: list[int]) -> str:
    return "".join(TEXTS[at] for at in tokens if at < len(TEXTS))


class Wanting:
    """A processor that prefers the first of these texts, else the next, else 'z'."""

    def __init__(self, start: int, *texts: str) -> None:
        self.start, self.texts = start, texts

    def __call__(self, given, scores):
        banned, scores = scores == -torch.inf, torch.empty_like(scores)
        for line, row in enumerate(given.tolist()):
            said = text(row[self.start :])
            for at in range(scores.shape[1]):
                more = said + TEXTS[at]
                rank = next((n for n, one in enumerate(self.texts) if one.startswith(more)), None)
                # A longer token of the same text is wanted more.
                scores[line, at] = -90.0 - (TEXTS[at] != "z") if rank is None else len(TEXTS[at]) - 10 * rank
        return scores.masked_fill(banned, -torch.inf)


def request(prompt: list[int], phrases: Any, **given: Any) -> Request:
    config = GenerationConfig(**{"max_new_tokens": 8, "banned_phrases": phrases, **given})
    return Request(prompt, config, tokenizer=tokenizer())


def output_of(model, phrases: Any, *wanted: str, **given: Any) -> str:
    mind = Request(
        ids("Q"),
        GenerationConfig(**{"max_new_tokens": 8, "eos_token_id": None, "banned_phrases": phrases, **given}),
        logits_processor=[Wanting(1, *wanted)],
        tokenizer=tokenizer(),
    )
    found = outcomes(model, [mind])[0]
    assert found.error is None, found.error
    assert found.streamed_tokens == dict(enumerate(found.tokens))
    return text(found.tokens[0])


# ------------------------------------------------------------------------ output instead of a phrase
@pytest.mark.parametrize(
    ("phrases", "wanted", "expected"),
    [
        (["b"], ["abcd", "axcd"], "axcd"),  # inside one token
        (["the"], ["a the", "a xyz"], "a xyz"),  # the whole token, and then its letters t, h, e
        (["he"], ["a the", "a txyz"], "a txyz"),  # inside a longer token, and then across two
        (["bc"], ["abcd", "abyy", "axcd"], "axcd"),  # across tokens: the first of them goes
        (["ab"], ["abcd", "xbcd"], "xbcd"),  # at the very start
        (["ab", "xb"], ["abcd", "xbcd", "ybcd"], "ybcd"),  # several
        (["abc", "bcd"], ["abcd", "axcd"], "zzzz"),  # overlapping
        (["cd"], ["abcd", "abce", "abx"], "abxz"),
        (["b c"], ["ab cd", "ax cd"], "ax cd"),
        (["bz"], ["ab", "ac"], "aczz"),
        (["zz"], ["a"], "a!!z"),
        (["abcdefg"], ["abcdefgh", "abcdefxx", "qrs"], "qrszzzzzz"),  # a long way back
        ("bc", ["abc", "ax"], "axz"),  # one phrase by itself
        # 'b' is masked after 'a'; then 'c' completes another phrase there, and both are.
        (["bx", "cy"], ["abx", "acy", "adq"], "adq"),
        # 'x' was masked after 'ab' and that mask goes when 'b' does: 'x' may come after 'ac'.
        (["xq", "by"], ["abxq", "aby", "acx"], "acxz"),
        # After "xab" nothing that began with 'x' is under way; but "bz" would lead back to "xa".
        (["xaq", "bz"], ["xabz", "xaq", "yy"], "yyzz"),
        (["bcd"], ["abcd"], "abc"),  # the end is inside the phrase: it may stay
    ],
)
def test_the_output_instead_of_a_phrase(tiny, phrases, wanted, expected):
    found = output_of(tiny("llama").model, phrases, *wanted, max_new_tokens=len(expected))
    assert not any(one in found for one in phrases)
    assert found == expected


def test_the_prompt_may_have_a_phrase_and_its_beginning(tiny):
    model = tiny("llama").model
    mind = Wanting(2, "bcab", "bcxx")
    given = Request(
        ids("Qa"),
        GenerationConfig(max_new_tokens=4, eos_token_id=None, banned_phrases=["ab"]),
        logits_processor=[mind],
        tokenizer=tokenizer(),
    )
    assert text(outcomes(model, [given])[0].tokens[0]) == "bcxx"


def test_the_common_prefix_is_never_taken_back(tiny):
    session = Session(tiny("llama").model)
    for wanted in (("abcd", "axcd"), ("abcd", "abcx")):
        given = request(ids("Q"), ["bcd"], max_new_tokens=6, eos_token_id=None)
        session.admit(replace(given, logits_processor=[Wanting(1, *wanted)]))
    session.admit(Request(ids("Q"), GenerationConfig(max_new_tokens=6, eos_token_id=None)))
    prefixes, final = defaultdict(list), {}
    while len(session):
        for event in session.step():
            if isinstance(event, Finished):
                final[event.request] = event.hypotheses[0].tokens.tolist()
        for number in {0, 1, 2} - final.keys():
            prefixes[number].append(session.common_prefix(number).tolist())
    for number, found in prefixes.items():
        assert all(final[number][: len(one)] == one for one in found)
    assert [text(one) for one in prefixes[0]][:4] == ["a", "a", "a", "a"]  # "bc" may go, and goes
    assert [len(one) for one in prefixes[2]] == [1, 2, 3, 4, 5]


# ------------------------------------------------------------------------ against a reference
def reference(model, prompt: list[int], phrases: list[str], given: dict[str, Any]) -> list[int]:
    """Restarts whenever a phrase is complete, with the bans so far."""
    masks: dict[tuple[int, ...], set[int]] = defaultdict(set)

    def ruled(row, scores):
        scores = scores.clone()
        scores[:, list(masks.get(tuple(row[0, len(prompt) :].tolist()), ()))] = -torch.inf
        return scores

    for _ in range(2000):
        plain = Request(prompt, GenerationConfig(**given), logits_processor=[ruled], tokenizer=tokenizer())
        found = outcomes(model, [plain])[0]
        if found.error is not None:
            raise found.error
        new = found.tokens[0]
        cut = _first(new, phrases)
        if cut is None:
            return new
        for place in [one for one in masks if len(one) > cut]:
            del masks[place]
        masks[tuple(new[:cut])].add(new[cut])
    raise AssertionError("no end")


def _first(new: list[int], phrases: list[str]) -> int | None:
    """The token in which the phrase begins that is completed first; of several, the one that begins last."""
    for size in range(1, len(new) + 1):
        whole, before = text(new[:size]), text(new[: size - 1])
        starts = [
            at
            for one in phrases
            for at in range(len(whole) - len(one) + 1)
            if whole[at : at + len(one)] == one and at + len(one) > len(before)
        ]
        if starts:
            return max(place for place in range(size) if len(text(new[:place])) <= max(starts))
    return None


def _cases(tiny, count: int, **given: Any):
    """Prompts with phrases that the model would generate."""
    model = tiny("llama")
    for number in range(count):
        rng = random.Random(number)
        prompt = prompts(model.arch, [rng.randint(1, 6)], number)[0]
        config = {"max_new_tokens": rng.randint(4, 14), **given}
        if given.get("do_sample"):
            config["seed"] = number
        plain = text(outcomes(model.model, [Request(prompt, GenerationConfig(**config))])[0].tokens[0])
        phrases = []
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(max(1, len(plain)))
            phrases.append(plain[at : at + rng.randint(1, 4)] or "x")
        yield prompt, phrases, config


@pytest.mark.ci_cases("12-given0", "12-given1", "12-given3")
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"do_sample": True, "temperature": 1.5},
        {"do_sample": True, "top_p": 0.6},
        {"suppress_tokens": [2]},
    ],
)
@pytest.mark.parametrize("count", [12, pytest.param(60, marks=pytest.mark.slow)])
def test_it_equals_starting_from_scratch(tiny, given, count):
    model = tiny("llama").model
    changed = 0
    for prompt, phrases, config in _cases(tiny, count, **given):
        found = outcomes(model, [request(prompt, phrases, **config)])[0]
        assert found.tokens == [reference(model, prompt, phrases, config)], (prompt, phrases, config)
        assert not any(one in text(found.tokens[0]) for one in phrases)
        assert found.streamed_tokens == {0: found.tokens[0]}
        changed += 1
    assert changed == count


def test_no_phrase_and_nothing_taken_back_in_a_crowd(tiny):
    # Many at once, so that rows rewind while others go on, come and leave.
    model = tiny("llama").model
    cases = [*_cases(tiny, 60), *_cases(tiny, 60, do_sample=True, num_return_sequences=3, temperature=2.0)]
    rng = random.Random(0)
    session, todo, whose, shown = Session(model), list(range(len(cases))), {}, defaultdict(list)
    ended = {}
    while todo or len(session):
        for _ in range(min(len(todo), rng.randint(0, 9))):
            at = todo.pop()
            prompt, phrases, config = cases[at]
            whose[session.admit(request(prompt, phrases, **config))[0]] = at
        for event in session.step():
            if isinstance(event, Tokens):
                for number, slot, token in zip(
                    event.request.tolist(), event.slot.tolist(), event.token.tolist(), strict=True
                ):
                    shown[whose[number], slot].append(token)
            else:
                assert isinstance(event, Finished)
                ended[whose[event.request]] = [one.tokens.tolist() for one in event.hypotheses]
    count = 0
    for at, (_, phrases, _) in enumerate(cases):
        for slot, new in enumerate(ended[at]):
            assert not any(one in text(new) for one in phrases)
            assert shown[at, slot] == new
            count += 1
    assert count >= 200


# ------------------------------------------------------------------------ the laws


def test_healed_tokens_belong_to_the_prompt(tiny):
    model, spelt = tiny("llama").model, spelling.tokenizer()
    prompt = [spelling.TEXTS.index(one) for one in (b"a", b"d", b"http")]

    def new(*phrases: str) -> bytes:
        config = GenerationConfig(max_new_tokens=5, token_healing=True, banned_phrases=phrases or None)
        found = outcomes(model, [Request(prompt, config, tokenizer=spelt)])[0]
        assert found.streamed_tokens == {0: found.tokens[0]}
        return b"".join(spelling.TEXTS[at] for at in found.tokens[0])

    assert new().startswith(b"http")
    assert new("http", "tp") == new()
    # Whichever of "http" and "https" it is, the other is generated once the continuation is banned.
    first = "s" if new().startswith(b"https") else new()[4:].decode(errors="ignore")[:1]
    other = new(first)
    assert other.startswith(b"http")
    assert first.encode() not in other[4:]


# ------------------------------------------------------------------------ ends, stops, events
@pytest.mark.parametrize(
    ("phrases", "wanted", "given", "expected"),
    [
        # "xb" would stop the row, but its 'b' is banned; 'x' stays and 'c' follows.
        (["b"], ["axb", "axcd"], {"stop_strings": "xb"}, "axcd"),
        # The state of the stop string "bc" must not keep a 'b' that was retracted.
        (["bx"], ["abx", "acde"], {"stop_strings": "bc"}, "acde"),
        (["bx"], ["abx", "abcd", "aabc"], {"stop_strings": "bc"}, "aabc"),
        (["cx"], ["abcx", "abcd", "abe", "abd"], {"stop_strings": "bd", "max_new_tokens": 6}, "abezzz"),
        (["bcd"], ["abc!"], {"eos_token_id": TEXTS.index("!"), "max_new_tokens": 8}, "abc!"),
        # With one token left to draw from, a mask after top-k would leave none.
        (["b", "x"], ["abcd", "axcd", "aycd"], {"do_sample": True, "seed": 1, "top_k": 1}, "aycd"),
    ],
)
def test_ends_stops_and_samplers_see_what_stays(tiny, phrases, wanted, given, expected):
    found = output_of(tiny("llama").model, phrases, *wanted, **{"max_new_tokens": 4, **given})
    assert found == expected


def test_tokens_are_held_back_no_longer_than_they_must(tiny):
    model = tiny("llama").model
    mind = Wanting(1, "abcqr")
    config = GenerationConfig(max_new_tokens=5, eos_token_id=None, banned_phrases=["bcd"])
    session = Session(model)
    session.admit(Request(ids("Q"), config, logits_processor=[mind], tokenizer=tokenizer()))
    told = []
    while len(session):
        told.append("".join(text(one.token.tolist()) for one in session.step() if isinstance(one, Tokens)))
    assert told == ["a", "", "", "bcq", "r"]


def test_generate_and_stream(tiny):
    model = tiny("llama").model
    cases = list(_cases(tiny, 6))
    phrases = sorted({one for _, some, _ in cases for one in some})
    rows, mask = pad([prompt for prompt, _, _ in cases], 0, "left")
    given = {"attention_mask": mask, "banned_phrases": phrases, "max_new_tokens": 9, "logprobs": 2}
    out = generate(model, rows, tokenizer=tokenizer(), return_dict_in_generate=True, **given)
    with stream(model, rows, tokenizer(), **given) as events:
        told = list(events)
    for line in range(len(rows)):
        mine = [event for event in told if event.row == line]
        new = [token for event in mine for token in event.token_ids]
        alone = outcomes(model, [request(cases[line][0], phrases, max_new_tokens=9)])[0].tokens[0]
        assert new == alone
        assert out.sequences[line, rows.shape[1] :].tolist()[: len(new)] == new
        laws = out.logprobs[line]
        assert torch.allclose(
            torch.tensor([one for event in mine for one in event.raw_logprob]), laws.raw, atol=1e-5
        )
        assert torch.allclose(
            torch.tensor([one for event in mine for one in event.logprob]), laws.processed, atol=1e-5
        )
        # And the record is that of the tokens that stayed.
        whole = torch.tensor([[*cases[line][0], *new]])
        law = model(whole).logits[0].log_softmax(-1)
        first = len(cases[line][0])
        fresh = torch.stack([law[first - 1 + at, token] for at, token in enumerate(new)])
        assert torch.allclose(fresh, laws.raw, atol=1e-4)


@pytest.mark.parametrize("copies", [1, 3])
def test_the_record_is_of_what_stayed(tiny, copies):
    model = tiny("llama").model
    cases = list(_cases(tiny, 8))
    phrases = sorted({one for _, some, _ in cases for one in some} | {"a", "b"})
    rows, mask = pad([prompt for prompt, _, _ in cases], 0, "left")
    given = {"do_sample": True, "seed": 3, "num_return_sequences": copies, "temperature": 1.5}
    out = generate(
        model,
        rows,
        attention_mask=mask,
        tokenizer=tokenizer(),
        banned_phrases=phrases,
        max_new_tokens=9,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        output_hidden_states=True,
        **given,
    )
    new = out.sequences[:, rows.shape[1] :]
    assert len(out.scores) == len(out.logits) == len(out.hidden_states) == new.shape[1]
    for line in range(len(new)):
        prompt = cases[line // copies][0]
        size = int((new[line] != 0).sum())
        whole = model(torch.tensor([[*prompt, *new[line].tolist()]]), output_hidden_states=True)
        for at in range(new.shape[1]):
            if at < size:
                fresh = whole.logits[0, len(prompt) - 1 + at]
                assert torch.allclose(out.logits[at][line], fresh, atol=1e-4)
                assert out.scores[at][line, new[line, at]] > -torch.inf
                states = whole.hidden_states[-1][0, len(prompt) - 1 + at]
                assert torch.allclose(out.hidden_states[at][-1][line, -1], states, atol=1e-4)
            else:
                assert out.scores[at][line].argmax() == 0
                assert not out.hidden_states[at][-1][line].any()


@pytest.mark.parametrize("others", [0, 1])
def test_a_record_does_not_keep_the_retracted_length(tiny, others):
    # The first row generates six tokens, retracts five and ends; another continues.
    model, end = tiny("llama").model, TEXTS.index("!")
    shared = {"max_new_tokens": 8, "eos_token_id": end, "pad_token_id": 0, "return_dict_in_generate": True}
    shared |= {"output_scores": True, "output_hidden_states": True}
    configs = [GenerationConfig(banned_phrases=["bcdef"], **shared), GenerationConfig(**shared)]
    out = generate(
        model,
        torch.tensor([ids("Q")] * (1 + others)),
        configs[: 1 + others],
        logits_processor=[Wanting(1, "abcdefgh", "a!")],
        tokenizer=tokenizer(),
    )
    wide = 8 if others else 2
    assert text(out.sequences[0, 1:3].tolist()) == "a!"
    assert len(out.scores) == len(out.hidden_states) == wide == out.sequences.shape[1] - 1
    for at in range(2, wide):
        assert out.scores[at][0].tolist() == [0.0] + [-torch.inf] * 96
        assert not out.hidden_states[at][-1][0].any()
        assert out.hidden_states[at][-1][1].any()


# ------------------------------------------------------------------------ refusals
def test_a_row_with_no_way_out_fails_by_name(tiny):
    # At the second place every token is ruled out in turn, for "a" is all that may come first.
    model = tiny("llama").model

    def only(given, scores):
        keep = torch.full_like(scores, -torch.inf)
        keep[:, ids("ab")] = 0.0
        return scores + keep

    given = Request(
        ids("Q"),
        GenerationConfig(max_new_tokens=4, banned_phrases=["a", "b"]),
        logits_processor=[only],
        tokenizer=tokenizer(),
    )
    error = outcomes(model, [given])[0].error
    assert isinstance(error, RowError)
    assert "`banned_phrases`" in str(error)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"do_sample": True, "mirostat_tau": 3.0}, "mirostat_tau"),
        ({"do_sample": True, "adaptive_p_target": 0.5}, "adaptive_p_target"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha"),
    ],
)
def test_what_cannot_take_back_is_refused(tiny, given, name):
    with pytest.raises(ConfigError, match=name):
        outcomes(tiny("llama").model, [request([5], ["a"], **given)])


def test_a_processor_with_a_state_is_refused(tiny):
    given = Request(
        [5],
        GenerationConfig(do_sample=True, seed=1, banned_phrases=["a"]),
        logits_processor=[MirostatLogitsWarper(3.0, 0.1)],
        tokenizer=tokenizer(),
    )
    with pytest.raises(InputError, match="`logits_processor` must not hold a processor with a state"):
        Session(tiny("llama").model).admit(given)


def test_it_needs_a_tokenizer(tiny):
    with pytest.raises(InputError, match="`tokenizer` must be given with `banned_phrases`"):
        generate(tiny("llama").model, torch.tensor([[5, 6]]), banned_phrases=["a"])
