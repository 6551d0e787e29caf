"""Forks: the state of a processor for a hypothesis equals its state for that hypothesis alone."""

from __future__ import annotations

import math

import pytest
import torch

from descant import GenerationConfig, Request, Session
from descant.core.context import PromptInfo, columns_from_rows
from descant.core.records import Context, Observation
from descant.decoding.pipeline import PROCESSOR_SPECS
from descant.engine.planning.planner import make_plan
from descant.engine.step.strategy_group import as_stateful
from tests.support.markov_model import Chain

VOCABULARY = 13

# Every processor whose output depends on a row's history: a state, or its tokens.
ASKED = {
    "mirostat": {"mirostat_tau": 1.5, "mirostat_eta": 0.7},
    "adaptive-p": {"adaptive_p_target": 0.4, "adaptive_p_decay": 0.5},
    "both": {"mirostat_tau": 2.5, "mirostat_eta": 0.5, "adaptive_p_target": 0.3, "temperature": 1.5},
    "dry": {"dry_multiplier": 1.5, "dry_allowed_length": 1},
    "presence": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    "n-grams": {"no_repeat_ngram_size": 2, "no_repeat_ngram_window": 6, "bad_words_ids": [[1, 2], [3]]},
    "thinking": {"thinking_budget": 3, "thinking_end": [5, 6], "thinking_start": [2]},
    "sequence-bias": {"sequence_bias": {(1, 2): 3.0, (4, 4, 4): -2.0}},
}


def reference_state(law, tokens, config):
    """mu of mirostat and the average of adaptive-p after `tokens`, in float64, from nothing but them.

    `law(done)` holds the scores that the first of the two is given after the first `done` tokens.
    """
    tau, eta = config.mirostat_tau, config.mirostat_eta
    target, decay = config.adaptive_p_target, config.adaptive_p_decay
    mu = None if tau is None else 2 * tau
    total, weight = (None, None) if target is None else (target / (1 - decay), 1 / (1 - decay))
    for done, token in enumerate(tokens):
        scores = law(done).double()
        if mu is not None:
            bits = -scores.log_softmax(-1) / math.log(2)
            kept = (bits <= mu) | (scores == scores.max())
            mu -= eta * (float(bits[token]) - tau)
            scores = scores.masked_fill(~kept, -torch.inf)
        if target is not None:
            total = float(scores.softmax(-1)[token]) + decay * total
            weight = 1 + decay * weight
    return mu, total, weight


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("name", ["mirostat", "adaptive-p", "both"])
def test_a_state_equals_one_worked_out_from_the_hypothesis(name, beams):
    """At every step of every beam."""
    model = Chain.chance(VOCABULARY, 7, spread=2.0)
    config = GenerationConfig(
        **ASKED[name], do_sample=True, seed=3, num_beams=beams, max_new_tokens=12,
        num_return_sequences=3, top_k=0,
    )  # fmt: skip
    seen: list[Observation] = []
    session = Session(model, observe=seen.append)
    prompts = [[1], [2, 3, 4], [5, 5]]
    session.admit(*(Request(prompt, config.replace(seed=at)) for at, prompt in enumerate(prompts)))
    list(session.drain())
    forks = checked = 0
    for step in seen:
        rows = step.rows
        for row in range(len(rows)):
            start, length = int(rows.prompt_length[row]), int(rows.length[row])
            tokens = rows.tokens[row, :length].tolist()

            def law(done, tokens=tokens, start=start):
                scores = model.after(start + done, tokens[start + done - 1])
                scores = scores.log_softmax(-1) if beams > 1 else scores
                return scores / config.temperature

            mu, total, weight = reference_state(law, tokens[start:], config)
            if mu is not None and length > start:
                assert float(rows.column("mirostat_mu")[row]) == pytest.approx(mu, abs=1e-4)
            if total is not None and length > start:
                assert float(rows.column("adaptive_p_sum")[row]) == pytest.approx(total, abs=1e-4)
                assert float(rows.column("adaptive_p_weight")[row]) == pytest.approx(weight, abs=1e-4)
            checked += length > start
        state = rows.column(next(iter(set(rows.columns) & {"mirostat_mu", "adaptive_p_sum"})))
        forks += len(set(state.tolist())) > len(prompts)
    assert checked > 50
    assert beams == 1 or forks > 5  # beams of one request do differ in their state


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("beams", [1, 4])
def test_scores_equal_those_of_a_session_with_forced_tokens(name, beams):
    """The scores of every hypothesis that a beam search looked at, against one that had no siblings."""
    model = Chain.chance(VOCABULARY, 9, spread=2.0)
    draws = {"do_sample": True, "seed": 4, "top_k": 0} if name != "dry" else {}
    config = GenerationConfig(**ASKED[name], **draws, num_beams=beams, max_new_tokens=8)
    seen: list[Observation] = []
    session = Session(model, observe=seen.append)
    session.admit(Request([1, 2, 1], config), Request([3], config))
    list(session.drain())
    made = make_plan(GenerationConfig.merge({}, config), model.traits)
    checked = 0
    for step in seen[:: 2 if beams > 1 else 1]:
        rows = step.rows
        for row in range(len(rows)):
            start, length = int(rows.prompt_length[row]), int(rows.length[row])
            tokens = rows.tokens[row, :length].tolist()
            expected = replayed(model, made, tokens, start, beams > 1)
            assert torch.equal(expected.isfinite(), step.scores[row, 0].isfinite())
            assert torch.allclose(expected, step.scores[row, 0], atol=1e-4)
            checked += 1
    assert checked > 10


def replayed(model, made, tokens, start, normalised):
    """The processed scores after `tokens`, of a row that went there alone, one token at a time [V]."""
    params = columns_from_rows([made.row_params(_prompt(tokens[:start]), model.traits)])
    states: dict[str, torch.Tensor] = {}
    for length in range(start, len(tokens) + 1):
        scores = model.after(length, tokens[length - 1])[None]
        scores = scores.log_softmax(-1) if normalised else scores
        where = (torch.tensor(one) for one in ([tokens[:length]], [length], [start]))
        context = Context(*where, params, states=states)
        for _, stage in sorted(made.processors, key=lambda entry: entry[0]):
            before, scores = scores, stage.processor.process(context, scores)
            if as_stateful(stage.processor) and length < len(tokens):
                states = states | stage.processor.advance(
                    context, before, scores, torch.tensor([tokens[length]])
                )
    return scores[0]


def _prompt(tokens):
    return PromptInfo(len(tokens), source_ids=lambda: list(tokens))


def test_every_processor_with_a_state_is_tried():
    kept = {type(stage.processor).__name__ for stage in PROCESSOR_SPECS if as_stateful(stage.processor)}
    assert kept == {"MirostatLogitsWarper", "AdaptivePLogitsWarper"}
