"""The Bayesian detector gives the same as the reference's, and each reads the folders of the other."""

from __future__ import annotations

import pytest
import torch

from descant.models.bayesian_detector import BayesianDetectorConfig, BayesianDetectorModel

PARTS = "likelihood_model_watermarked"
SETTINGS = {"ngram_len": 5, "keys": [654, 400, 836], "context_history_size": 1024}
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}


def state(depth, seed=0):
    """Weights as training leaves them, and beyond."""
    chance = torch.Generator().manual_seed(seed)
    return {
        "prior": torch.rand(1, generator=chance),
        f"{PARTS}.beta": 2 * torch.randn(1, 1, depth, generator=chance) - 1,
        f"{PARTS}.delta": torch.randn(1, 1, depth, depth, generator=chance),
    }


def calls(depth, shapes, seed=0):
    chance = torch.Generator().manual_seed(seed)
    made = []
    for count, length in shapes:
        values = torch.randint(0, 2, (count, length, depth), generator=chance)
        mask = (torch.rand(count, length, generator=chance) < 0.8).long()
        labels = torch.randint(0, 2, (count,), generator=chance).float()
        made += [{"g_values": values, "mask": mask}]
        made += [{"g_values": values, "mask": mask, "labels": labels, "loss_batch_weight": 0.01}]
    return made


def ours(model, asked):
    with torch.no_grad():
        return [model(**one) for one in asked]


def same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert mine.shape == theirs.shape
            torch.testing.assert_close(mine, theirs, **TOLERANCE)


@pytest.mark.parametrize("depth", [2, 9, 30])
def test_posteriors_and_losses(depth, reference):
    asked = calls(depth, [(4, 12), (1, 12), (3, 2), (5, 100)], seed=depth)
    weights = state(depth, seed=depth)
    theirs = reference.ask("bayesian", calls=asked, config={"watermarking_depth": depth}, state=weights)
    model = BayesianDetectorModel(BayesianDetectorConfig(depth))
    model.load_state_dict(weights)
    found = ours(model, asked)
    assert len({round(float(one), 3) for out in found for one in out[0]}) > 4, "too alike to show it"
    same(found, theirs["outputs"])


def test_a_folder_of_theirs(reference, tmp_path):
    asked = calls(3, [(4, 12)])
    theirs = reference.ask(
        "bayesian",
        calls=asked,
        config={"watermarking_depth": 3, "base_rate": 0.25},
        information=["some/model", SETTINGS],
        state=state(3),
        save=str(tmp_path),
    )
    model = BayesianDetectorModel.from_pretrained(tmp_path)
    same(ours(model, asked), theirs["outputs"])
    assert theirs["config"]["watermarking_config"] == SETTINGS
    for name, value in theirs["config"].items():
        assert getattr(model.config, name) == value


def test_a_folder_of_ours(reference, tmp_path):
    asked = calls(3, [(4, 12)])
    model = BayesianDetectorModel(BayesianDetectorConfig(3, base_rate=0.25))
    model.load_state_dict(state(3))
    model.config.set_detector_information("some/model", SETTINGS)
    model.config.key_fingerprint, model.config.threshold = "abcd", 0.9
    model.config.validation_metrics = {"auc": 1.0}
    model.save_pretrained(tmp_path)
    theirs = reference.ask("bayesian", calls=asked, folder=str(tmp_path))
    same(ours(model, asked), theirs["outputs"])
    expected = {"watermarking_depth": 3, "base_rate": 0.25, "model_name": "some/model"}
    assert theirs["config"] == {**expected, "watermarking_config": SETTINGS}


@pytest.mark.parametrize(("depth", "count", "length"), [(3, 4, 1), (1, 4, 4)])
def test_theirs_mixes_texts_of_one_token_or_one_round(depth, count, length, reference):
    """Their `squeeze` drops any axis of one: the g-values of one text then decide about the others."""
    asked = calls(depth, [(count, length)])[:1]
    asked[0]["mask"] = torch.ones_like(asked[0]["mask"])
    weights = {**state(depth), f"{PARTS}.delta": 2 * torch.ones(1, 1, depth, depth)}
    alone = [{name: value[row : row + 1] for name, value in asked[0].items()} for row in range(count)]
    theirs = reference.ask(
        "bayesian", calls=[*asked, *alone], config={"watermarking_depth": depth}, state=weights
    )
    together, *single = (out[0] for out in theirs["outputs"])
    if depth > 1:  # a text of one round is wrong even alone
        assert (together - torch.cat(single)).abs().max() > 1e-3

    model = BayesianDetectorModel(BayesianDetectorConfig(depth))
    model.load_state_dict(weights)
    found = ours(model, asked)[0][0]
    torch.testing.assert_close(found, torch.cat([out[0] for out in ours(model, alone)]))
    assert (found - together).abs().max() > 1e-3
