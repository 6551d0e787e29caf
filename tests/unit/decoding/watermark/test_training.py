"""Training: what it learns, its own random state, and the correctness of its figures."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from descant.decoding.watermark.synthid import mean_score
from descant.decoding.watermark.training import (
    DetectorTrainingConfig,
    GValueBatch,
    compute_metrics,
    evaluate_detector,
    train_detector,
)
from descant.errors import InputError
from descant.models.bayesian_detector import BayesianDetectorConfig, BayesianDetectorModel

DEPTH, LENGTH = 6, 60
QUICK = DetectorTrainingConfig(
    epochs=12, patience=3, learning_rate=0.05, delta_penalties=(0.0, 0.01), validation_lengths=(20, 40)
)


def coins(count, marked, seed, length=LENGTH):
    """Texts as a tournament leaves them: two in three tokens have no choice, and of the rest a round won
    makes the later ones matter less.
    """
    chance = torch.Generator().manual_seed(seed)
    differ = (torch.rand(count, length, generator=chance) < 0.35) * 0.9 * float(marked)
    values = []
    for _ in range(DEPTH):
        values.append((torch.rand(count, length, generator=chance) < 0.5 + 0.25 * differ).to(torch.uint8))
        differ = differ * (0.9 - 0.3 * values[-1])
    ends = torch.randint(length // 2, length + 1, (count, 1), generator=chance)
    return GValueBatch(torch.stack(values, 2), torch.arange(length) < ends)


def detector():
    model = BayesianDetectorModel(BayesianDetectorConfig(DEPTH))
    model.prior.requires_grad_(False)
    return model


@pytest.fixture(scope="module")
def pairs():
    return coins(300, True, 1), coins(400, False, 2)


@pytest.fixture(scope="module")
def trained(pairs):
    return train_detector(detector(), *pairs, QUICK)


def test_it_beats_the_mean_on_texts_that_it_has_not_seen(trained):
    model = detector()
    model.load_state_dict(trained.state_dict)
    fresh = coins(1500, True, 3), coins(1500, False, 4)
    learnt, _ = evaluate_detector(model.log_odds, *fresh, (20, 40))
    mean, _ = evaluate_detector(mean_score, *fresh, (20, 40))
    begun, _ = evaluate_detector(detector().log_odds, *fresh, (20, 40))
    assert learnt.auc > mean.auc + 0.01
    assert learnt.auc > begun.auc + 0.005
    assert learnt.true_positives > mean.true_positives + 0.02


def test_the_figures_are_those_of_the_held_out_texts(trained, pairs):
    model = detector()
    model.load_state_dict(trained.state_dict)
    with torch.no_grad():
        scores = [model(*texts)[0] for texts in trained.held_out]
    assert compute_metrics(*scores) == trained.by_length["whole"]
    assert list(trained.by_length) == ["20", "40", "whole"]
    assert [len(texts.mask) for texts in trained.held_out] == [90, 120]
    assert trained.overall.marked == sum(one.marked for one in trained.by_length.values())
    for texts, held in zip(pairs, trained.held_out, strict=True):
        known = {tuple(row.flatten().tolist()) for row in texts.g_values}
        assert all(tuple(row.flatten().tolist()) in known for row in held.g_values)
    json.dumps(trained.to_dict())
    assert trained.penalty in QUICK.delta_penalties
    assert 1 <= trained.best_epoch <= QUICK.epochs


def test_a_seed_says_all_and_nothing_of_the_caller_is_touched(pairs):
    plan = DetectorTrainingConfig(epochs=2, delta_penalties=(0.0,), seed=5)
    model = detector()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    given = [texts.g_values.clone() for texts in pairs]
    one = train_detector(model, *pairs, plan)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(123)
    other = train_detector(model, *pairs, plan)
    torch.set_rng_state(state)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert all(torch.equal(texts.g_values, old) for texts, old in zip(pairs, given, strict=True))
    assert all(torch.equal(one.state_dict[name], value) for name, value in other.state_dict.items())
    assert one.to_dict() == other.to_dict()
    third = train_detector(model, *pairs, DetectorTrainingConfig(epochs=2, delta_penalties=(0.0,), seed=6))
    assert any(not torch.equal(one.state_dict[name], value) for name, value in third.state_dict.items())


def test_what_is_not_to_be_learnt_stays(trained):
    assert trained.state_dict["prior"].tolist() == [0.5]


class Scripted(torch.nn.Module):
    """A detector whose validation gets better for so many epochs, then worse."""

    def __init__(self, good):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.good = good
        self.penalties = []

    def forward(self, g_values, mask, labels=None, loss_batch_weight=1, return_dict=False):
        sure = 1 - 0.1 * (self.weight - self.good) ** 2 / self.good**2
        truth = g_values[:, 0, 0].float()
        posterior = 0.5 + (truth - 0.5) * (0.8 * sure)
        if labels is None:
            return (posterior,)
        assert labels.tolist() == truth.tolist()
        self.penalties.append(loss_batch_weight)
        return posterior, -self.weight  # whose gradient makes Adam go on by its rate


def test_it_stops_when_validation_says_so_and_keeps_the_best():
    sure = [
        GValueBatch(torch.full((5, 3, 1), kind), torch.ones(5, 3).bool()) for kind in (1, 0)
    ]  # one step an epoch
    plan = DetectorTrainingConfig(
        epochs=50,
        patience=3,
        learning_rate=1.0,
        batch_size=64,
        validation_share=0.3,
        delta_penalties=(0.5,),
        validation_lengths=(),
    )
    told = []
    found = train_detector(Scripted(5), *sure, plan, lambda *one: told.append(one))
    assert [epoch for _, epoch, _ in told] == list(range(1, 9)), "five better ones, three worse"
    assert found.best_epoch == 5
    assert round(float(found.state_dict["weight"]), 3) == 5
    least = min(told, key=lambda one: one[2])
    assert least[:2] == (0.5, 5)


def test_a_penalty_is_evaluated_at_its_best_state_not_its_last():
    class Passing(Scripted):
        """Perfect where its weight is 0.3, which a penalty drives it past and without one it never nears."""

        def forward(self, g_values, mask, labels=None, loss_batch_weight=1, return_dict=False):
            if labels is not None:
                return torch.ones(len(labels)), -self.weight * loss_batch_weight
            noise = (mask.sum(1).float() * 0.618) % 1
            trust = (2 * (self.weight - 0.3).abs()).clamp(max=1)
            return ((1 - trust) * g_values[:, 0, 0].float() + trust * noise,)

    chance = torch.Generator().manual_seed(0)
    masks = [torch.arange(40) < torch.randint(5, 40, (60, 1), generator=chance) for _ in range(2)]
    texts = [
        GValueBatch(torch.full((60, 40, 1), kind), mask) for kind, mask in zip((1, 0), masks, strict=True)
    ]
    steps = 11  # of an epoch: 42 texts to learn from, 4 a batch
    plan = DetectorTrainingConfig(
        epochs=6, patience=6, learning_rate=0.3 / steps, delta_penalties=(0.0, 1.0), validation_lengths=()
    )
    found = train_detector(Passing(1), *texts, plan)
    assert (found.penalty, found.best_epoch) == (1.0, 1)
    assert found.overall.true_positives == 1.0


def test_batches_are_half_marked_whatever_the_numbers():
    seen = []

    class Watching(Scripted):
        def forward(self, g_values, mask, labels=None, **more):
            if labels is not None:
                seen.append((labels.tolist(), mask.sum(1).tolist()))
            return super().forward(g_values, mask, labels, **more)

    few = GValueBatch(torch.ones(8, 30, 1), torch.ones(8, 30).bool())
    many = GValueBatch(torch.zeros(400, 30, 1), torch.ones(400, 30).bool())
    train_detector(
        Watching(5),
        few,
        many,
        DetectorTrainingConfig(
            epochs=1, batch_size=20, validation_share=0.5, delta_penalties=(0.0,), min_length=7
        ),
    )
    assert [sum(labels) for labels, _ in seen] == [10.0] * 20
    assert all(len(labels) == 20 for labels, _ in seen)
    lengths = [length for _, counts in seen for length in counts]
    assert min(lengths) >= 7
    assert max(lengths) <= 30
    assert len(set(lengths)) > 10, "texts are cut anew each time"

    seen.clear()
    train_detector(
        Watching(5),
        few,
        GValueBatch(*(one[:100] for one in many)),
        DetectorTrainingConfig(epochs=1, validation_share=0.5, delta_penalties=(0.0,)),
    )
    assert [sum(labels) for labels, _ in seen] == [5.0] * 10, "few texts are still ten steps"


# ------------------------------------------------------------------------ figures
def test_figures_by_hand():
    found = compute_metrics(torch.tensor([0.2, 0.5, 0.9, 0.9]), torch.tensor([0.1, 0.5, 0.3]))
    assert found.auc == pytest.approx((1 + 2.5 + 3 + 3) / 12)
    assert (found.threshold, found.true_positives) == (0.5, 0.5)
    assert (found.marked, found.unmarked) == (4, 3)


@pytest.mark.parametrize("count", [50, 99, 100, 101, 250, 1000])
def test_at_most_one_percent_are_above_the_threshold_and_below_it_more(count):
    scores = torch.rand(count, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
    threshold = compute_metrics(torch.tensor([0.5]), scores).threshold
    assert float((scores > threshold).double().mean()) <= 0.01
    assert float((scores >= threshold).double().mean()) > 0.01


def test_lengths_that_most_texts_lack_are_left_out():
    long = GValueBatch(torch.rand(4, 40, 2), torch.ones(4, 40).bool())
    short = GValueBatch(torch.rand(4, 40, 2), torch.arange(40) < torch.tensor([[10], [10], [10], [40]]))
    _, found = evaluate_detector(lambda values, mask: mask.sum(1).float(), long, short, (10, 20))
    assert list(found) == ["10", "whole"]
    assert found["10"].auc == 0.5, "all are cut to the same length"
    assert found["whole"].auc == (4 * 3 + 4 * 0.5) / 16


def test_a_cut_counts_what_counts():
    mask = torch.tensor([[1, 0, 1, 1, 0, 1], [0, 1, 1, 0, 0, 0]]).bool()
    cut = GValueBatch(torch.ones(2, 6, 3), mask).truncate(2)
    assert cut.mask.tolist() == [[True, False, True], [False, True, True]]
    assert cut.g_values.shape == (2, 3, 3)
    assert GValueBatch(torch.ones(2, 6, 3), mask).truncate(torch.tensor([1, 0])).counts.tolist() == [1, 0]
    assert GValueBatch(torch.ones(2, 6, 3), mask).truncate(0).g_values.shape == (2, 0, 3)


def test_texts_of_several_lengths_are_padded_by_what_does_not_count():
    made = GValueBatch.from_texts(
        [(torch.ones(2, 3), torch.ones(2).bool()), (torch.ones(4, 3), torch.ones(4).bool())]
    )
    assert made.g_values.shape == (2, 4, 3)
    assert made.counts.tolist() == [2, 4]


REFUSED = {
    "few": lambda: train_detector(detector(), coins(3, True, 0), coins(9, False, 0), QUICK),
    "empty": lambda: train_detector(detector(), coins(9, True, 0).truncate(0), coins(9, False, 0), QUICK),
    "epochs": lambda: DetectorTrainingConfig(epochs=0),
    "batch": lambda: DetectorTrainingConfig(batch_size=1),
    "share": lambda: DetectorTrainingConfig(validation_share=1.0),
    "penalties": lambda: DetectorTrainingConfig(delta_penalties=()),
    "a negative penalty": lambda: DetectorTrainingConfig(delta_penalties=(-1.0,)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_refuses(case):
    with pytest.raises(InputError, match=r"must (be|contain)"):
        REFUSED[case]()
