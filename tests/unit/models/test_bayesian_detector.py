"""The Bayesian detector: Bayes' rule written out, its shapes, its folder, and what it refuses."""

from __future__ import annotations

import json
import math

import pytest
import torch
from transformers.utils import logging

from descant.config.watermarking_config import SynthIDTextWatermarkingConfig
from descant.errors import InputError
from descant.models.bayesian_detector import (
    BayesianDetectorConfig,
    BayesianDetectorModel,
    BayesianWatermarkDetectorModelOutput,
    load_detector,
    save_detector,
)

DEPTH = 4


def detector(depth=DEPTH, base_rate=0.5, seed=0):
    """A detector that has learnt something, whatever."""
    model = BayesianDetectorModel(BayesianDetectorConfig(depth, base_rate))
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for one in (model.likelihood_model_watermarked.beta, model.likelihood_model_watermarked.delta):
            one.copy_(torch.randn(one.shape, generator=chance))
    return model.eval()


def texts(count, length, depth=DEPTH, seed=1):
    chance = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 2, (count, length, depth), generator=chance)
    return values, torch.rand(count, length, generator=chance) < 0.7


def bayes(model, values, mask):
    """The posterior of one text as Bayes wrote it, round by round in double precision."""
    rounds = model.likelihood_model_watermarked
    beta, delta = rounds.beta[0, 0].double(), rounds.delta[0, 0].double()
    marked = unmarked = 1.0
    for coins, counts in zip(values.tolist(), mask.tolist(), strict=True):
        if not counts:
            continue
        for depth, coin in enumerate(coins):
            logit = beta[depth] + sum(delta[depth, before] * coins[before] for before in range(depth))
            differ = 1 / (1 + math.exp(-float(logit)))
            marked *= differ * (0.75 if coin else 0.25) + (1 - differ) * 0.5
            unmarked *= 0.5
    prior = float(model.prior)
    return prior * marked / (prior * marked + (1 - prior) * unmarked)


@pytest.mark.parametrize(("count", "length"), [(5, 9), (1, 9), (5, 1), (1, 1)])
@pytest.mark.parametrize("depth", [1, 2, DEPTH])
@torch.no_grad()
def test_it_is_bayes_rule(count, length, depth):
    model = detector(depth, base_rate=0.2)
    values, mask = texts(count, length, depth)
    (found,) = model(values, mask)
    assert found.shape == (count,)
    expected = [bayes(model, *one) for one in zip(values, mask, strict=True)]
    torch.testing.assert_close(found.double(), torch.tensor(expected).double(), rtol=2e-6, atol=2e-7)
    torch.testing.assert_close(model.log_odds(values, mask).sigmoid(), found)


@torch.no_grad()
def test_no_token_that_counts_leaves_the_prior():
    model = detector(base_rate=0.3)
    values, mask = texts(2, 5)
    torch.testing.assert_close(model(values, torch.zeros_like(mask))[0], torch.tensor([0.3, 0.3]))
    torch.testing.assert_close(model(values[:, :0], mask[:, :0])[0], torch.tensor([0.3, 0.3]))


@torch.no_grad()
def test_log_odds_tell_apart_where_posteriors_do_not():
    model = detector()
    values = torch.ones(2, 400, DEPTH)
    mask = torch.arange(400) < torch.tensor([[300], [400]])
    assert model(values, mask)[0].tolist() == [1.0, 1.0]
    near, far = model.log_odds(values, mask)
    assert far > near + 10


def test_the_loss_and_what_is_returned():
    model = detector()
    values, mask = texts(6, 8)
    labels = torch.tensor([1, 0, 1, 0, 1, 1])
    out, loss = model(values, mask, labels, 0.25)
    chance = torch.where(labels.bool(), out, 1 - out)
    penalty = 0.25 * (model.likelihood_model_watermarked.delta**2).sum()
    torch.testing.assert_close(loss, -chance.log().mean() + penalty)
    loss.backward()
    assert all(one.grad is not None and one.grad.isfinite().all() for one in model.parameters())
    record = model(values, mask, labels, 0.25, return_dict=True)
    assert isinstance(record, BayesianWatermarkDetectorModelOutput)
    assert torch.equal(record.loss, loss)
    assert torch.equal(record.posterior_probabilities, out)
    assert model(values, mask, return_dict=True).loss is None


@torch.no_grad()
def test_a_posterior_of_one_costs_no_infinity():
    model = detector()
    sure = torch.ones(1, 400, DEPTH), torch.ones(1, 400)
    _, loss = model(*sure, torch.tensor([0.0]), 0)
    assert math.isclose(float(loss), -math.log(1e-5), rel_tol=1e-2)


@torch.no_grad()
def test_half_precision_is_only_that_of_the_weights():
    model = detector()
    values, mask = texts(4, 100)
    found = detector().to(torch.bfloat16)(values, mask)[0]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, model(values, mask)[0], atol=0.1, rtol=0)


def test_a_new_one_draws_no_random_numbers_and_detects_nothing():
    state = torch.get_rng_state()
    first, second = (BayesianDetectorModel(BayesianDetectorConfig(3)) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name])
    with torch.no_grad():
        assert float(first(torch.zeros(1, 50, 3), torch.ones(1, 50))[0]) < 0.1


REFUSED = {
    "no depth": lambda: BayesianDetectorModel(BayesianDetectorConfig()),
    "depth": lambda: BayesianDetectorModel(BayesianDetectorConfig(0)),
    "sure before": lambda: BayesianDetectorModel(BayesianDetectorConfig(3, base_rate=1.0)),
    "rounds": lambda: detector()(torch.zeros(2, 5, DEPTH + 1), torch.ones(2, 5)),
    "one text": lambda: detector()(torch.zeros(5, DEPTH), torch.ones(5)),
    "mask": lambda: detector()(torch.zeros(2, 5, DEPTH), torch.ones(2, 4)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_refuses(case):
    with pytest.raises(InputError, match="must be"):
        REFUSED[case]()


# ------------------------------------------------------------------------ folders
@torch.no_grad()
def test_a_folder_holds_all_of_it(tmp_path):
    model = detector(base_rate=0.25)
    settings = SynthIDTextWatermarkingConfig(ngram_len=5, keys=(11, 22, 33, 44))
    model.config.set_detector_information("some/model", settings)
    model.config.key_fingerprint, model.config.threshold = "abcd", 0.75
    model.config.validation_metrics = {"overall": {"auc": 0.5}}
    model.save_pretrained(tmp_path)
    again = BayesianDetectorModel.from_pretrained(tmp_path)
    values, mask = texts(5, 9)
    assert torch.equal(again(values, mask)[0], model(values, mask)[0])
    config = again.config
    assert (config.watermarking_depth, config.base_rate) == (DEPTH, 0.25)
    assert (config.model_name, config.key_fingerprint, config.threshold) == ("some/model", "abcd", 0.75)
    assert config.validation_metrics == {"overall": {"auc": 0.5}}
    assert SynthIDTextWatermarkingConfig.from_dict(config.watermarking_config) == settings


def test_the_key_is_stored_only_where_it_was_given(tmp_path):
    model = detector()
    model.config.set_detector_information("some/model", None)
    save_detector(model, tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["watermarking_config"] is None
    assert "keys" not in (tmp_path / "config.json").read_text()


def test_reading_and_writing_are_quiet_and_leave_the_settings(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(logging, "_tqdm_active", True)
    monkeypatch.setattr(logging.hf_hub_utils, "enable_progress_bars", lambda: None)  # the environment forbids
    before = logging.get_verbosity()
    logging.set_verbosity_info()
    try:
        save_detector(detector(), tmp_path)
        assert not load_detector(tmp_path).training
        assert (logging.is_progress_bar_enabled(), logging.get_verbosity()) == (True, logging.INFO)
    finally:
        logging.set_verbosity(before)
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "")


@torch.no_grad()
def test_a_lost_weight_begins_anew_and_leaves_the_others(tmp_path):
    """`from_pretrained` goes on without some weights, as transformers does; `read_detector` does not."""
    model = detector(base_rate=0.25)
    whole = model.state_dict()
    model.save_pretrained(tmp_path, state_dict={k: v for k, v in whole.items() if not k.endswith("beta")})
    again = BayesianDetectorModel.from_pretrained(tmp_path).state_dict()
    new = BayesianDetectorModel(BayesianDetectorConfig(DEPTH)).state_dict()
    assert torch.equal(again["likelihood_model_watermarked.beta"], new["likelihood_model_watermarked.beta"])
    for name in ("prior", "likelihood_model_watermarked.delta"):
        assert torch.equal(again[name], whole[name])
    with pytest.raises(InputError, match=r"lacks likelihood_model_watermarked\.beta"):
        load_detector(tmp_path)


def test_what_is_no_detector_is_refused(tmp_path, tiny):
    with pytest.raises(InputError, match="trained Bayesian detector"):
        load_detector(tmp_path / "nowhere")
    with pytest.raises(InputError, match="trained Bayesian detector"):
        load_detector(tmp_path)
    with pytest.raises(InputError, match="watermarking_depth"):
        load_detector(tiny("llama").folder)
