"""The scores contract: log-probabilities of every token of every returned sequence, raw and processed."""

from __future__ import annotations

import pytest
import torch

from descant import (
    ConfigError,
    GenerationConfig,
    Request,
    Session,
    compute_transition_scores,
    generate,
)
from descant.engine.session import Finished
from tests.support.markov_model import Chain
from tests.support.tiny_models import pad, prompts

METHODS = {
    "greedy": {},
    "greedy-ruled": {"repetition_penalty": 1.5, "min_new_tokens": 3},
    "sampling": {"do_sample": True, "seed": 1, "temperature": 1.7, "top_k": 9},
    "fanned": {"do_sample": True, "seed": 2, "num_return_sequences": 3, "mirostat_tau": 3.0},
    "beams": {"num_beams": 4, "num_return_sequences": 3},
    "beams-ruled": {"num_beams": 3, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    "beam-sampling": {"num_beams": 3, "do_sample": True, "seed": 5, "temperature": 2.0},
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_they_equal_those_of_the_full_scores(tiny, name, method):
    """Of ragged prompts, rows that end early, and beams that were reordered on the way."""
    subject = tiny(name)
    ids, mask = pad(
        prompts(subject.arch, [3, 7, 5], 1), subject.arch.pad, "right" if subject.encoder_decoder else "left"
    )
    out = generate(
        subject.model, ids, attention_mask=mask, max_new_tokens=14, logprobs=4, return_dict_in_generate=True,
        output_scores=True, output_logits=True, **METHODS[method],
    )  # fmt: skip
    beams = out.get("beam_indices")
    laws = {"raw": out.logits, "processed": out.scores}
    told = {
        law: compute_transition_scores(subject.model, out.sequences, steps, beams, normalize_logits=True)
        for law, steps in laws.items()
    }
    assert len(out.logprobs) == len(out.sequences)
    assert name != "llama" or len({len(one.raw) for one in out.logprobs}) > 1  # some ended before others
    for line, one in enumerate(out.logprobs):
        size = len(one.raw)
        assert torch.allclose(one.raw, told["raw"][line, :size], atol=1e-4)
        assert torch.allclose(one.processed, told["processed"][line, :size], atol=1e-4)
        for place in range(size):
            row = line if beams is None else int(beams[line, place])
            raw, processed = (laws[law][place][row].log_softmax(-1) for law in laws)
            best = raw.topk(4)
            assert torch.equal(one.top[place], best.indices)
            assert torch.allclose(one.top_raw[place], best.values, atol=1e-4)
            assert torch.allclose(one.top_processed[place], processed[best.indices], atol=1e-4)


def test_more_alternatives_than_tokens_are_refused():
    model = Chain.chance(11, 3)
    with pytest.raises(ConfigError, match="`logprobs` must be <= 11, got 12"):
        Session(model).admit(Request([1], GenerationConfig(logprobs=12)))


def test_a_forced_token_is_certain_after_the_processors_and_keeps_its_own_before_them():
    model = Chain.chance(11, 3, spread=2.0)
    session = Session(model)
    session.admit(Request([1], GenerationConfig(max_new_tokens=2, forced_eos_token_id=7, logprobs=1)))
    (done,) = [event.hypotheses[0] for event in session.drain() if isinstance(event, Finished)]
    assert done.tokens[-1] == 7
    assert float(done.logprobs.processed[-1]) == 0.0
    assert float(done.logprobs.raw[-1]) == pytest.approx(
        float(model.after(2, int(done.tokens[0])).log_softmax(-1)[7]), abs=1e-5
    )
    if int(done.logprobs.top[-1, 0]) != 7:
        assert float(done.logprobs.top_processed[-1, 0]) == -torch.inf
