"""With and without drafts a call returns the same scores, states and streams; it reports the drafts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import descant
from tests.contracts.configs import tokenizer
from tests.contracts.speculation import DRAFTERS, FEW, NEW, close, drafted, few_words, inputs, same_call, seen
from tests.support.tiny_models import ARCHITECTURES

METHODS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded, fanned": {"do_sample": True, "seed": 13, "num_return_sequences": 3},
}
SLOW = pytest.mark.slow


@pytest.mark.parametrize("method", ["greedy", "seeded, fanned"])
@pytest.mark.parametrize("drafter", FEW)
def test_logprobs(drafter, method, tiny):
    model = tiny("llama")
    options = {**few_words(model), **METHODS[method], "logprobs": 3, "repetition_penalty": 1.1}
    plain, guessed = same_call(model.model, inputs(model), options, drafted(model.model, drafter))
    assert seen(guessed).right > 0
    for one, two in zip(plain.logprobs, guessed.logprobs, strict=True):
        for name in ("raw", "processed", "top_raw", "top_processed"):
            close(getattr(one, name), getattr(two, name), name)
        assert one.top.tolist() == two.top.tolist()


STATED = [
    pytest.param(name, drafter, marks=() if name in ("llama", "mistral", "t5") else SLOW)
    for name in ("llama", "mistral", "t5", "gpt2", "bart")
    for drafter in FEW
    if drafter != "early exit" or not ARCHITECTURES[name].encoder_decoder
]


@pytest.mark.parametrize(("name", "drafter"), STATED)
def test_states_and_attentions(name, drafter, tiny):
    model = tiny(name, attn_implementation="eager")
    options = {
        **few_words(model),
        "output_hidden_states": True,
        "output_attentions": True,
        "max_new_tokens": 12,
    }
    plain, guessed = same_call(model.model, inputs(model), options, drafted(model.model, drafter))
    assert seen(guessed).tried > 0
    names = [one for one in plain if one.endswith(("hidden_states", "attentions"))]
    assert len(names) == (5 if model.encoder_decoder else 2)
    for field in names:
        close(plain[field], guessed[field], field)


@pytest.mark.parametrize("method", ["greedy", "seeded, fanned"])
@pytest.mark.parametrize("drafter", FEW)
def test_streams_add_up(drafter, method, tiny):
    """Events hold the same tokens, text and log-probabilities, and tell the drafts that are reported."""
    model = tiny("llama")
    options = {**few_words(model), **METHODS[method], "max_new_tokens": NEW, "tokenizer": tokenizer()}
    heard = []
    for drafts in ({}, drafted(model.model, drafter)):
        events: dict[tuple[int, int], list[Any]] = {}
        for event in descant.stream(model.model, **inputs(model), **options, **drafts):
            events.setdefault((event.row, event.sequence), []).append(event)
        heard.append(events)
    plain, guessed = heard
    assert plain.keys() == guessed.keys()
    wide = 0
    for key, events in guessed.items():
        for name in ("token_ids", "text"):
            one, two = (
                [part for event in some for part in getattr(event, name)] for some in (plain[key], events)
            )
            assert one == two, f"{name} of {key}"
        for name in ("logprob", "raw_logprob"):
            one, two = (
                torch.tensor([part for event in some for part in getattr(event, name)])
                for some in (plain[key], events)
            )
            torch.testing.assert_close(one, two, rtol=0, atol=1e-4)
        assert events[-1].finish_reason == plain[key][-1].finish_reason
        report = events[-1].hypothesis.speculation
        assert sum(event.num_drafts for event in events) == sum(report.drafted)
        assert sum(event.accepted for event in events) == sum(report.accepted) == report.saved_forwards
        assert len(events) == report.forwards
        assert all(len(event.token_ids) <= event.accepted + 1 <= event.num_drafts + 1 for event in events)
        wide = max(wide, *(len(event.token_ids) for event in events))
    assert wide > 1, "no event has more than one token"
    assert all(event.num_drafts == event.accepted == 0 for events in plain.values() for event in events)


class Abreast:
    """A streamer that keeps what it is shown."""

    def __init__(self) -> None:
        self.shown: list[Any] = []
        self.over = 0

    def put(self, value: torch.Tensor) -> None:
        """Keep it."""
        self.shown.append(value.tolist())

    def end(self) -> None:
        """Count it."""
        self.over += 1


@pytest.mark.parametrize("method", ["greedy", "seeded, fanned"])
@pytest.mark.parametrize("drafter", FEW)
def test_a_streamer_sees_one_token_of_every_line(drafter, method, tiny):
    """Also where some rows run ahead of others."""
    model = tiny("llama")
    options = {**few_words(model), **METHODS[method], "max_new_tokens": NEW}
    shown = []
    for drafts in ({}, drafted(model.model, drafter)):
        streamer = Abreast()
        whole = descant.generate(model.model, **inputs(model), **options, **drafts, streamer=streamer)
        assert streamer.over == 1
        new = torch.tensor(streamer.shown[1:]).T
        assert new.tolist() == whole[:, inputs(model)["input_ids"].shape[1] :].tolist()
        shown.append(streamer.shown)
    assert shown[0] == shown[1]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_report_adds_up(drafter, tiny):
    """Tokens are forwards and what they saved; no place of a run is tried more often than the one before."""
    model = tiny("llama")
    given = inputs(model)
    out = descant.generate(
        model.model, **given, **few_words(model), **drafted(model.model, drafter), max_new_tokens=NEW,
        return_dict_in_generate=True,
    )  # fmt: skip
    for line, report in zip(
        out.sequences[:, given["input_ids"].shape[1] :].tolist(), out.speculation, strict=True
    ):
        count = line.index(model.eos) + 1 if model.eos in line else len(line)
        # The last run may end before its last token.
        assert report.forwards + report.saved_forwards - count in (0, 1)
        assert list(report.drafted) == sorted(report.drafted, reverse=True)
        assert list(report.accepted) == sorted(report.accepted, reverse=True)
        assert all(right <= tried for right, tried in zip(report.accepted, report.drafted, strict=True))
        assert report.acceptance_rate == pytest.approx(report.saved_forwards / max(sum(report.drafted), 1))
