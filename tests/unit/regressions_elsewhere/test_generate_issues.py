"""Known wounds of other decoders, each shown to be none here. One test a wound."""

from __future__ import annotations

import copy
import functools
import math
import warnings
from dataclasses import replace

import pytest
import torch
import transformers

import descant
import descant as made
from descant import (
    ConfigError,
    Failed,
    Finished,
    GenerationConfig,
    InputError,
    Request,
    RowError,
    Session,
    Tokens,
)
from descant.core.records import ForwardOutput
from descant.testing import outcomes
from tests.reference.parity.compare import batch
from tests.support import pretrained
from tests.support.markov_model import Chain
from tests.support.tiny_models import prompts

NAN, INF = math.nan, math.inf


class Script(Chain):
    """A scripted model: the row whose prompt is token `n` gets script `n`.

    A script is the tokens to come; a place of it may instead be a line of logits.
    """

    def __init__(self, scripts, vocabulary):
        super().__init__(torch.zeros(1, 1, vocabulary))
        self.traits = replace(self.traits, vocab_size=vocabulary)
        self.scripts, self.vocabulary = scripts, vocabulary

    def forward(self, rows, proposal, cache):
        self.fed.append(len(rows))
        lines = torch.full((len(rows), 1, self.vocabulary), -10.0)
        for row in range(len(rows)):
            script = self.scripts[int(rows.tokens[row, 0])]
            said = script[min(int(rows.length[row]) - 1, len(script) - 1)]
            if isinstance(said, int):
                lines[row, 0, said] = 10.0
            else:
                lines[row, 0] = torch.as_tensor(said)
        return ForwardOutput(lines)


def config(**given):
    return GenerationConfig(**{"max_new_tokens": 8, **given})


def record(model, inputs, **given):
    given = {"max_new_tokens": 10, "return_dict_in_generate": True, "output_scores": True, **given}
    return descant.generate(model, **inputs, **given)


# ----------------------------------------------------------------------------------------------- padding
PENALTIES = {
    "repetition_penalty": {"repetition_penalty": 1.8},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "a window of n-grams": {"no_repeat_ngram_size": 2, "no_repeat_ngram_window": 14},
    "presence_penalty": {"presence_penalty": 1.9},
    "frequency_penalty": {"frequency_penalty": 1.1},
    "dry": {"dry_multiplier": 3.0, "dry_allowed_length": 1},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 2.0},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
}


@pytest.mark.parametrize("mode", [{}, {"num_beams": 3}, {"do_sample": True, "seed": 5, "top_k": 0}], ids=str)
@pytest.mark.parametrize("option", PENALTIES)
@pytest.mark.parametrize("name", ["llama", "bart"])
def test_padding_is_penalised(name, option, mode, tiny):
    """A padded row, of the prompt or of the encoder's input, is scored as alone (TGI#1765)."""
    model = tiny(name)
    rows = batch(model, prompts(model.arch, (3, 12), seed=304))
    given = {**PENALTIES[option], **mode, "min_new_tokens": 6, "max_new_tokens": 6}
    together = record(model.model, rows.inputs, **given)
    beams = mode.get("num_beams", 1)
    for i in range(len(rows.rows)):
        alone = record(model.model, rows.only(i).inputs, **given)
        assert together.sequences[i, -6:].tolist() == alone.sequences[0, -6:].tolist()
        for step, (ours, theirs) in enumerate(zip(together.scores, alone.scores, strict=True)):
            torch.testing.assert_close(
                ours[i * beams : (i + 1) * beams], theirs, rtol=0, atol=1e-4, msg=f"row {i}, step {step}"
            )
    # Precondition of the assertions above: the pad token has a score of its own to lose.
    assert model.pad not in {token for row in rows.rows for token in row}
    assert together.scores[0][0, model.pad].isfinite()


# --------------------------------------------------------------------------------------------- penalties
@pytest.mark.parametrize("mode", [{}, {"num_beams": 2}], ids=str)
@pytest.mark.parametrize("sign", [-1, 1])
def test_a_penalty_favours_negative_logits(sign, mode):
    """Dividing a negative logit would raise it: repeats must become less likely (transformers#2302)."""
    logits = torch.full((4, 4), -9.0 if sign < 0 else 0.1)
    logits[:, 1], logits[:, 2] = (-1.0, -1.2) if sign < 0 else (3.0, 2.8)
    model = Chain(logits)
    plain, penalised = (
        outcomes(model, [Request([1], config(max_new_tokens=1, repetition_penalty=penalty, **mode))])[
            0
        ].tokens[0]
        for penalty in (1.0, 1.5)
    )
    assert (plain, penalised) == ([1], [2])


@pytest.mark.parametrize("field", ["presence_penalty", "frequency_penalty"])
def test_a_penalty_counts_the_prompt(field):
    """OpenAI's penalties count what was generated, and the prompt is not."""
    logits = torch.zeros(5, 5)
    logits[:, 3], logits[:, 4] = 2.0, 1.5
    said = outcomes(Chain(logits), [Request([3, 3, 3], config(max_new_tokens=3, **{field: 1.0}))])[0].tokens[
        0
    ]
    assert said[:2] == [3, 4]


# ------------------------------------------------------------------------------------- leftover settings
def test_leftover_temperature_is_used_or_warned_about(tiny, monkeypatch):
    """A model's own sampling fields have no effect, and no warning, in greedy search (transformers#33480)."""
    model = tiny("llama").model
    inputs = batch(tiny("llama"), prompts(tiny("llama").arch, (6, 4), seed=8)).inputs
    greedy = descant.generate(model, **inputs, max_new_tokens=10)
    own = transformers.GenerationConfig(
        temperature=0.01,
        top_p=0.3,
        top_k=2,
        typical_p=0.2,
        min_p=0.5,
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=1,
    )
    monkeypatch.setattr(model, "generation_config", own)
    before = copy.deepcopy(own.to_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(descant.generate(model, **inputs, max_new_tokens=10, do_sample=False), greedy)
        assert torch.equal(descant.generate(model, **inputs, max_new_tokens=10, num_beams=1), greedy)
    assert own.to_dict() == before
    # They count as soon as there is sampling, ...
    drawn = [
        descant.generate(model, **inputs, max_new_tokens=10, do_sample=True, seed=seed, **given)
        for given in ({}, {"temperature": 1.5, "top_p": 1.0, "top_k": 0, "typical_p": 1.0, "min_p": 0.0})
        for seed in range(3)
    ]
    assert all(torch.equal(drawn[0], one) for one in drawn[:3])
    assert not torch.equal(drawn[3], drawn[4])
    # ... and setting them without it is an error.
    for knob in ({"temperature": 0.5}, {"top_p": 0.5}, {"mirostat_tau": 3.0}, {"xtc_probability": 0.5}):
        with pytest.raises(ConfigError, match=next(iter(knob))):
            descant.generate(model, **inputs, max_new_tokens=10, do_sample=False, **knob)


def test_temperature_zero_divides_by_zero(tiny):
    """Temperature 0 is greedy, or with sampling refused by name; it is never a division (vLLM#1211)."""
    model = tiny("llama").model
    inputs = batch(tiny("llama"), prompts(tiny("llama").arch, (6, 4), seed=8)).inputs
    greedy = descant.generate(model, **inputs, max_new_tokens=10)
    assert torch.equal(descant.generate(model, **inputs, max_new_tokens=10, temperature=0.0), greedy)
    with pytest.raises(ConfigError, match=r"`temperature`.*do_sample"):
        descant.generate(model, **inputs, max_new_tokens=10, temperature=0.0, do_sample=True)
    # Beside a row of temperature 0 one that samples, and one so cold that it is as good as greedy.
    mixed = [
        GenerationConfig(max_new_tokens=10, temperature=0.0),
        GenerationConfig(max_new_tokens=10, temperature=1e-30, do_sample=True, seed=4),
    ]
    assert torch.equal(descant.generate(model, **inputs, generation_config=mixed), greedy)


def test_temperature_after_truncation():
    """Temperature comes before top-p unless `processor_order` says otherwise (transformers#8686)."""
    model = Chain(torch.tensor([0.60, 0.25, 0.10, 0.05]).log().repeat(4, 1))
    given = {"max_new_tokens": 1, "do_sample": True, "temperature": 3.0, "top_p": 0.8, "top_k": 0}

    def sampled_tokens(**more):
        requests = [Request([0], GenerationConfig(**given, **more, seed=seed)) for seed in range(200)]
        return {one.tokens[0][0] for one in outcomes(model, requests)}

    assert sampled_tokens() == {0, 1, 2}  # hot first: the first two of them have less than 0.8
    assert sampled_tokens(processor_order=["top_p", "temperature"]) == {0, 1}


# ------------------------------------------------------------------------------------------------- reuse
REUSED = {
    "mirostat": lambda: made.MirostatLogitsWarper(2.0, 0.9),
    "adaptive-p": lambda: made.AdaptivePLogitsWarper(0.3, 0.5),
    "dry": lambda: made.DRYLogitsProcessor(2.0, dry_allowed_length=1),
    "n-grams": lambda: made.NoRepeatNGramLogitsProcessor(1),
    "repetition": lambda: made.RepetitionPenaltyLogitsProcessor(1.7),
    "words": lambda: made.NoBadWordsLogitsProcessor([[n] for n in range(40, 90)], eos_token_id=2),
    "xtc": lambda: made.XTCLogitsWarper(0.7, 0.05),
    "thinking": lambda: made.ThinkingBudgetLogitsProcessor(3, [30, 31]),
}


@pytest.mark.ci_cases("dry", "mirostat", "thinking")
@pytest.mark.parametrize("kind", REUSED)
def test_a_processor_remembers_the_last_call(kind, tiny):
    """An object given to several calls and sessions, also at once, is as new each time."""
    model = tiny("llama")
    rows = batch(model, prompts(model.arch, (6, 4, 9), seed=9))
    rows.rows[0][:] = [20, 21, 20, 21, 20, 21]  # something to repeat
    ways = [
        {"do_sample": True, "seed": 3, "top_k": 0},
        {"num_beams": 2, "do_sample": True, "seed": 4, "top_k": 0},
    ]
    ways += [{}] if kind in ("dry", "n-grams", "repetition", "words") else []
    for way in ways:
        given = {**way, "max_new_tokens": 12, "min_new_tokens": 12}
        used, fresh = REUSED[kind](), REUSED[kind]()
        before = copy.deepcopy(vars(used))
        wanted = record(model.model, rows.inputs, logits_processor=[fresh], **given)
        plain = record(model.model, rows.inputs, **given)
        assert not all(map(torch.equal, plain.scores, wanted.scores)), "it changes nothing here"
        for _ in range(2):
            found = record(model.model, rows.inputs, logits_processor=[used], **given)
            assert torch.equal(found.sequences, wanted.sequences)
            assert all(map(torch.equal, found.scores, wanted.scores))
        # In two sessions a step apart, twice in one of them.
        request = Request(rows.rows[2], GenerationConfig(**given), logits_processor=[used])
        alone = outcomes(
            model.model, [Request(rows.rows[2], GenerationConfig(**given), logits_processor=[fresh])]
        )
        sessions = [Session(model.model), Session(model.model)]
        sessions[0].admit(request)
        sessions[0].step()
        sessions[1].admit(request)
        sessions[1].step()
        sessions[0].admit(request)
        found = []
        while any(len(one) for one in sessions):
            for session in sessions:
                found += [e.hypotheses[0].tokens.tolist() for e in session.step() if isinstance(e, Finished)]
        assert found == [alone[0].tokens[0]] * 3
        assert vars(used) == before


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (made.MirostatLogitsWarper, {"mirostat_tau": 2.0}),
        (made.AdaptivePLogitsWarper, {"adaptive_p_target": 0.4}),
    ],
)
def test_two_of_a_kind_share_their_memory(kind, field):
    """What two would write to one column is refused, by hand or beside the field; one of them is not."""
    model = Chain.chance(40, 4, spread=2.0)
    given = {"do_sample": True, "seed": 11, "max_new_tokens": 20, "top_k": 0}
    value = next(iter(field.values()))

    def output_of(*some, **more):
        request = Request([1], GenerationConfig(**given, **more), logits_processor=some)
        return outcomes(model, [request])[0].tokens[0]

    assert output_of(kind(value)) == output_of(**field) != output_of()
    for some, more in (((kind(value), kind(value / 2)), {}), ((kind(value),), field)):
        with pytest.raises(InputError, match="logits_processor"):
            output_of(*some, **more)
    # Neither does another row share it.
    pair = [
        Request([1], GenerationConfig(**given), logits_processor=[kind(one)]) for one in (value, value / 2)
    ]
    assert [one.tokens[0] for one in outcomes(model, pair)] == [
        output_of(kind(value)),
        output_of(kind(value / 2)),
    ]


# ------------------------------------------------------------------------------------------------- seeds


# ----------------------------------------------------------------------------------------------- stops
TOKENIZERS = ("minimind2-small", "stories15m", "flan-t5-small-titles")


@functools.cache
def tokenizer_of(name):
    return transformers.AutoTokenizer.from_pretrained(pretrained.folder(name))


def stopped_output(name, pieces, stops, **given):
    """The output of a model with these pieces of text, each tokenised separately."""
    tokenizer = tokenizer_of(name)
    tokens = [
        token
        for piece in pieces
        for token in (piece if isinstance(piece, list) else tokenizer.encode(piece, add_special_tokens=False))
    ]
    model = Script({1: tokens, 3: tokens[::-1]}, len(tokenizer))
    asked = GenerationConfig(stop_strings=stops, max_new_tokens=len(tokens), **given)
    mate = GenerationConfig(max_new_tokens=len(tokens))
    found = outcomes(model, [Request([1], asked, tokenizer=tokenizer), Request([3], mate)])
    assert found[1].tokens == [tokens[::-1]]
    return tokenizer, tokens, found[0]


@pytest.mark.parametrize("given", [{}, {"num_beams": 2}, {"do_sample": True, "seed": 1, "top_k": 1}], ids=str)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_stop_string_across_token_borders_is_missed(name, given):
    """A string ends the row at the token that completes it, however tokens cut it (transformers#40520)."""
    tokenizer = tokenizer_of(name)
    text = "The answer is forty-two, of course. Nothing else matters."
    tokens = tokenizer.encode(text, add_special_tokens=False)
    for stop in ("wer is for", "y-two, o", "rse. N", "of", "."):
        _, _, found = stopped_output(name, [text], ["never", stop], **given)
        said = found.tokens[0]
        end = next(n for n in range(1, len(tokens) + 1) if stop in tokenizer.decode(tokens[:n]))
        assert said == tokens[:end], stop
        assert found.reasons == ["stop"]


@pytest.mark.parametrize("given", [{}, {"num_beams": 2}], ids=str)
@pytest.mark.parametrize("name", TOKENIZERS[:2])
def test_a_stop_string_inside_a_character_is_missed(name, given):
    """A character that comes as several tokens of bytes ends the row with its last one, and no other does."""
    tokenizer = tokenizer_of(name)
    want, other = "🦜", "🦛"  # equal except for the last byte
    emoji, near = (_bytes_of(tokenizer, one) for one in (want, other))
    assert len(emoji) > 1
    assert emoji[:-1] == near[:-1]
    _, tokens, found = stopped_output(name, ["so ", near, " and ", emoji, " again"], [want], **given)
    end = next(n for n in range(len(tokens)) if tokens[n : n + len(emoji)] == emoji) + len(emoji)
    assert found.tokens[0] == tokens[:end]
    assert found.reasons == ["stop"]
    assert tokenizer.decode(found.tokens[0]).endswith(want)
    # A string that begins inside of what a token says and ends inside a character's bytes.
    _, tokens, found = stopped_output(name, ["so ", near, " and ", emoji, " again"], ["d " + want], **given)
    assert found.tokens[0] == tokens[:end]
    # Only a piece of it: the row goes on.
    _, tokens, found = stopped_output(name, ["so ", near[:-1], near, " and ", emoji[:-1]], [want], **given)
    assert found.tokens[0] == tokens
    assert found.reasons == ["length"]


def _bytes_of(tokenizer, character):
    """The tokens of a character alone, without a space that the tokenizer puts before it."""
    plain = tokenizer.encode("a", add_special_tokens=False)
    ids = tokenizer.encode(f"a{character}", add_special_tokens=False)
    return ids[len(plain) :]


def test_a_stop_string_of_another_row_stops():
    """Each row has its own strings."""
    tokenizer = tokenizer_of("minimind2-small")
    tokens = tokenizer.encode("one two three four five six", add_special_tokens=False)
    model = Script({1: tokens}, len(tokenizer))
    stops = [["two"], ["e f", "six"], None, ["never"], ["o"]]
    found = outcomes(
        model,
        [
            Request([1], GenerationConfig(stop_strings=one, max_new_tokens=len(tokens)), tokenizer=tokenizer)
            for one in stops
        ],
    )
    texts = [tokenizer.decode(one.tokens[0]).strip() for one in found]
    assert texts[0].endswith("two")
    assert texts[1].startswith("one two three f")
    assert "fiv" not in texts[1]
    assert texts[2] == texts[3] == "one two three four five six"
    assert texts[4].startswith("o")
    assert "tw" not in texts[4]


# ------------------------------------------------------------------------------------------ hopeless rows
HOPELESS = {
    "NaN": ([NAN] * 8, {}, "the model"),
    "one NaN": ([0.0, NAN, *[0.0] * 6], {}, "the model"),
    "-inf": ([-INF] * 8, {}, "the model"),
    "two infinite": ([INF, INF, *[0.0] * 6], {"do_sample": True, "seed": 3}, "the model"),  # softmax: NaN
    "words": ([0.0] * 8, {"bad_words_ids": [[n] for n in range(8)]}, "`bad_words_ids`"),
    "prefix": (
        [0.0] * 8,
        {"prefix_allowed_tokens_fn": lambda batch, ids: [1, 3][len(ids) - 1 : len(ids)]},
        "`prefix_allowed_tokens_fn`",
    ),
    "n-grams": (
        [0.0] * 8,
        {"no_repeat_ngram_size": 1, "suppress_tokens": [2, 4, 5, 6, 7]},
        "`no_repeat_ngram_size`",
    ),
    "suppressed": (
        [0.0] * 8,
        {"suppress_tokens": [0, 1, 2], "bad_words_ids": [[n] for n in range(3, 8)]},
        "`suppress_tokens`",
    ),
}  # fmt: skip


@pytest.mark.parametrize("method", [{}, {"do_sample": True, "seed": 2}, {"num_beams": 2}], ids=str)
@pytest.mark.parametrize("kind", HOPELESS)
def test_a_hopeless_row_spoils_its_batch(kind, method):
    """Rows of NaN, or with nothing left, fail with an error that says what did it; the others finish."""
    line, given, named = HOPELESS[kind]
    scripts = {0: [1, 3, line], 1: [4, 5, 6, 7], 2: [5, 6, 5, 7]}
    mates = [
        Request([1], config(max_new_tokens=6, **method)),
        Request([2], config(max_new_tokens=6, do_sample=True, seed=9)),
    ]
    alone = [outcomes(Script(scripts, 8), [mate])[0].tokens for mate in mates]
    bad = Request([0], config(**{**method, **given}))
    session = Session(Script(scripts, 8))
    numbers = session.admit(mates[0], bad, mates[1])
    events = list(session.drain())
    done = {event.request: event for event in events if isinstance(event, Finished | Failed)}
    assert isinstance(done[numbers[1]], Failed)
    error = done[numbers[1]].error
    assert isinstance(error, RowError)
    assert error.request == numbers[1]
    assert named in str(error)
    assert "got " in str(error)
    for number, wanted in zip((numbers[0], numbers[2]), alone, strict=True):
        assert [one.tokens.tolist() for one in done[number].hypotheses] == wanted
    assert (len(session), session.rows) == (0, 0)


def test_a_hopeless_row_still_says_something():
    """A row without candidates emits no token: a stream must not show an impossible one."""
    scripts = {0: [1, 3, [NAN] * 8], 1: [4]}
    session = Session(Script(scripts, 8))
    numbers = session.admit(Request([0], config()), Request([1], config(max_new_tokens=6)))
    said = []
    for event in session.drain():
        if isinstance(event, Tokens):
            mine = event.request == numbers[0]
            said += event.token[mine].tolist()
    assert said == [1, 3]


def test_invalid_values_may_be_removed():
    """With `remove_invalid_values` a NaN or infinite logit is one like another."""
    scripts = {0: [[0.0, NAN, 3.0, -INF, 0.0, 0.0, 0.0, 0.0], [0.0, NAN, INF, -INF, 0.0, 0.0, 0.0, 0.0]]}
    for method in ({}, {"do_sample": True, "seed": 2, "top_k": 1}):
        asked = config(max_new_tokens=3, remove_invalid_values=True, **method)
        assert outcomes(Script(scripts, 8), [Request([0], asked)])[0].tokens == [[2, 2, 2]]
