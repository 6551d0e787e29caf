"""Public records and interfaces: the objects of the loop have every documented member."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import descant
from descant import parts
from descant.core.sampling_noise import SamplingNoise
from descant.decoding.stopping import StopChecker
from descant.decoding.watermark.green_list import WatermarkDetector
from descant.engine.planning.planner import as_model
from descant.models.distributed import TorchRankGroup
from descant.testing import toy

IDS = torch.tensor([[5, 6, 7]])
MORE = {"max_new_tokens": 4, "eos_token_id": None}


@pytest.fixture(scope="module")
def model() -> Any:
    return toy()


def test_an_estimate_holds_its_own_kind(model: Any) -> None:
    estimate = descant.estimate(model, prompt_length=64, max_new_tokens=16, num_beams=2)
    assert isinstance(estimate, descant.Estimate)
    assert estimate.rows == 2
    assert estimate.bytes == estimate.total_bytes[estimate.cache_name]


def test_a_report_counts_what_runs_and_what_was_found(model: Any) -> None:
    session = descant.Session(model, prefix_cache=descant.PrefixCache(block=4))
    config = descant.GenerationConfig(**MORE)
    for _ in range(2):
        session.admit(descant.Request(list(range(5, 15)), config))
        report = session.report()
        assert isinstance(report, descant.Report)
        assert (report.requests, report.rows) == (1, 1)
        list(session.drain())
    prefixes = session.report().prefixes
    assert isinstance(prefixes, descant.PrefixReport)
    assert (prefixes.hits, prefixes.misses, prefixes.tokens_found) == (1, 1, 8)


def test_a_prompt_cache_stays_as_it_is(model: Any) -> None:
    known = descant.prefill(model, IDS)
    assert isinstance(known, descant.PromptCache)
    first = descant.generate(model, IDS, past_key_values=known, **MORE)
    assert known.get_seq_length() == 3
    assert descant.generate(model, IDS, past_key_values=known, **MORE).tolist() == first.tolist()


def test_log_probabilities_are_those_of_the_model(model: Any) -> None:
    out = descant.generate(model, IDS, **MORE, return_dict_in_generate=True, output_logits=True, logprobs=1)
    estimate = out.logprobs[0]
    assert isinstance(estimate, descant.Logprobs)
    logits = torch.stack(out.logits, dim=1)[0].log_softmax(-1)
    expected = logits.gather(1, out.sequences[0, 3:, None]).squeeze(1)
    assert torch.as_tensor(estimate.raw).tolist() == pytest.approx(expected.tolist(), abs=1e-5)


def test_the_documented_detector_answers_with_its_record(model: Any) -> None:
    key = descant.WatermarkingConfig(hashing_key=77)
    texts = torch.randint(3, 61, (2, 40), generator=torch.Generator().manual_seed(0))
    said = WatermarkDetector(model.config, "cpu", key)(texts, return_dict=True)
    assert isinstance(said, descant.WatermarkDetectorOutput)
    assert said.z_score is not None
    assert said.z_score.shape == (2,)


@pytest.mark.parametrize(
    ("port", "made"),
    [
        (parts.Model, as_model),
        (parts.Wrapper, lambda model: parts.ModelWrapper(as_model(model))),
        (parts.Strategy, lambda model: parts.Sampling(SamplingNoise(), StopChecker())),
        (parts.Processor, lambda model: descant.TopKLogitsWarper(3)),
        (parts.NoiseSource, lambda model: SamplingNoise()),
        (parts.StopCondition, lambda model: StopChecker()),
        (parts.RankGroup, lambda model: TorchRankGroup),
    ],
)
def test_what_the_loop_runs_has_what_its_port_asks(port: Any, made: Any, model: Any) -> None:
    kinds = [kind for kind in port.__mro__ if getattr(kind, "_is_protocol", False)]
    asked = {name for kind in kinds for name in (*vars(kind), *getattr(kind, "__annotations__", {}))}
    asked = {name for name in asked if not name.startswith("_")}
    thing = made(model)
    assert asked
    assert [name for name in sorted(asked) if not hasattr(thing, name)] == []
