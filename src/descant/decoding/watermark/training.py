"""Training of Bayesian watermark detectors on g-values, with metrics on held-out texts."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from descant.errors import InputError

FALSE_POSITIVE_RATE: Final = 0.01  # false positive rate at which detectors are compared
FULL_LENGTH: Final = "whole"  # name of untruncated texts in the metrics
_PROB_EPSILON: Final = 1e-5  # clamp of posteriors in the validation loss
_MIN_TEXTS: Final = 4  # minimum number of texts per class

ScoreFunction = Callable[[Tensor, Tensor], Tensor]  # g-values [N, L, D], mask [N, L] -> [N]


class GValueBatch(NamedTuple):
    """G-values of a batch of texts."""

    g_values: Tensor  # [N, L, D]
    mask: Tensor  # [N, L], g-values that count

    @classmethod
    def from_texts(cls, texts: Sequence[tuple[Tensor, Tensor]]) -> Self:
        """Build a batch from texts of any length, each with g-values [L, D] and a mask [L]."""
        if not texts:
            return cls(torch.zeros(0, 0, 0), torch.zeros(0, 0, dtype=torch.bool))
        pad = nn.utils.rnn.pad_sequence
        values = pad([values for values, _ in texts], batch_first=True)
        return cls(values, pad([mask for _, mask in texts], batch_first=True).bool())

    def select(self, rows: Tensor) -> GValueBatch:
        """Return the texts at `rows`."""
        return GValueBatch(self.g_values[rows], self.mask[rows])

    def truncate(self, counts: Tensor | int) -> GValueBatch:
        """Truncate each text to its first `counts` unmasked tokens ([N], or one number for all)."""
        counts = torch.as_tensor(counts, device=self.mask.device)
        mask = self.mask & (self.mask.cumsum(1) <= counts.reshape(-1, 1))
        longest = int(mask.any(0).nonzero().max()) + 1 if bool(mask.any()) else 0
        return GValueBatch(self.g_values[:, :longest], mask[:, :longest])

    @property
    def counts(self) -> Tensor:
        """Number of unmasked tokens per text [N]."""
        return self.mask.sum(1)


@dataclass(frozen=True)
class DetectorMetrics:
    """The quality with which scores separate marked from unmarked texts."""

    marked: int  # number of texts
    unmarked: int
    auc: float  # probability that a marked text scores above an unmarked one
    true_positives: float  # share of marked texts above the threshold
    threshold: float  # lowest with at most 1 % of the unmarked texts above it


@dataclass(frozen=True)
class DetectorTrainingConfig:
    """Hyperparameters of detector training."""

    epochs: int = 60  # maximum
    patience: int = 8  # epochs without improvement before training stops
    learning_rate: float = 0.02  # of Adam
    batch_size: int = 64  # maximum number of texts, half of them marked
    validation_share: float = 0.3  # share of the texts held out for validation
    delta_penalties: tuple[float, ...] = (
        0.0,
        1e-3,
        1e-2,
        1e-1,
    )  # L2 penalties on `delta` to try
    min_length: int = 10  # minimum length that training texts are truncated to
    validation_lengths: tuple[int, ...] = (25, 50, 100, 200)  # lengths evaluated in addition to whole texts
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "patience", "batch_size", "min_length"):
            minimum = 2 if name == "batch_size" else 1
            if getattr(self, name) < minimum:
                raise InputError(name, f"must be >= {minimum}", getattr(self, name))
        if not 0.0 < self.validation_share < 1.0:
            raise InputError("validation_share", "must be > 0 and < 1", self.validation_share)
        if not self.delta_penalties or min(self.delta_penalties) < 0 or self.learning_rate <= 0:
            got = {"delta_penalties": self.delta_penalties, "learning_rate": self.learning_rate}
            raise InputError(
                "delta_penalties", "must be at least one number >= 0, and `learning_rate` must be > 0", got
            )


class DetectorTrainingResult(NamedTuple):
    """Result of detector training."""

    state_dict: dict[str, Tensor]  # on the CPU
    overall: DetectorMetrics  # on held-out texts of all lengths
    by_length: dict[str, DetectorMetrics]  # per length, and for whole texts
    penalty: float  # the best penalty
    best_epoch: int  # epoch of the best state
    held_out: tuple[GValueBatch, GValueBatch]  # marked and unmarked validation texts

    def to_dict(self) -> dict[str, Any]:
        """Return the metrics as JSON types."""
        by_length = {name: asdict(metrics) for name, metrics in self.by_length.items()}
        return {"overall": asdict(self.overall), "lengths": by_length, "penalty": self.penalty}


class _PenaltyRun(NamedTuple):
    """Best result of one penalty; the first three fields rank the runs."""

    true_positives: float
    auc: float
    neg_validation_loss: float  # negated validation loss
    penalty: float
    best_epoch: int
    state_dict: dict[str, Tensor]


def compute_metrics(marked: Tensor, unmarked: Tensor) -> DetectorMetrics:
    """Compute the metrics of scores of marked [N] and unmarked [M] texts."""
    marked, unmarked = marked.detach().double().cpu(), unmarked.detach().double().cpu().sort().values
    below = torch.searchsorted(unmarked, marked) + torch.searchsorted(unmarked, marked, right=True)
    threshold = unmarked[len(unmarked) - 1 - int(FALSE_POSITIVE_RATE * len(unmarked))]
    return DetectorMetrics(
        marked=len(marked),
        unmarked=len(unmarked),
        auc=float(below.double().mean()) / (2 * len(unmarked)),  # ties count half
        true_positives=float((marked > threshold).double().mean()),
        threshold=float(threshold),
    )


@torch.no_grad()
def evaluate_detector(
    score: ScoreFunction, marked: GValueBatch, unmarked: GValueBatch, lengths: Sequence[int]
) -> tuple[DetectorMetrics, dict[str, DetectorMetrics]]:
    """Return the metrics over all lengths together, and per length that most texts have."""
    cuts = list(_split_by_length(marked, unmarked, lengths))
    scores = [(name, score(*marked_cut), score(*unmarked_cut)) for name, marked_cut, unmarked_cut in cuts]
    overall = compute_metrics(
        torch.cat([marked_cut for _, marked_cut, _ in scores]),
        torch.cat([unmarked_cut for *_, unmarked_cut in scores]),
    )
    return overall, {
        name: compute_metrics(marked_cut, unmarked_cut) for name, marked_cut, unmarked_cut in scores
    }


def train_detector(
    module: nn.Module,
    marked: GValueBatch,
    unmarked: GValueBatch,
    plan: DetectorTrainingConfig | None = None,
    report: Callable[[float, int, float], None] | None = None,
) -> DetectorTrainingResult:
    """Train a module with the `forward` of BayesianDetectorModel to separate marked from unmarked texts.

    Adam on the cross entropy. Batches are half marked, and each text is truncated anew in every epoch, so
    that the detector works on short texts too. Training stops early by the loss on held-out texts. Of several
    penalties on `delta`, the one with the most true positives at 1 % false positives wins. The module and
    torch's global generator are unchanged. `report` is called with penalty, epoch and validation loss.
    """
    plan = plan or DetectorTrainingConfig()
    generator = torch.Generator().manual_seed(plan.seed)
    marked_training, marked_held_out = _train_validation_split("marked", marked, plan, generator)
    unmarked_training, unmarked_held_out = _train_validation_split("unmarked", unmarked, plan, generator)
    training, held_out = (marked_training, unmarked_training), (marked_held_out, unmarked_held_out)
    runs = [
        _train_with_penalty(module, training, held_out, plan, penalty, report)
        for penalty in plan.delta_penalties
    ]
    best = max(runs, key=lambda run: run[:3])
    trained = copy.deepcopy(module)
    trained.load_state_dict(best.state_dict)
    overall, lengths = evaluate_detector(_make_score_fn(trained), *held_out, plan.validation_lengths)
    return DetectorTrainingResult(best.state_dict, overall, lengths, best.penalty, best.best_epoch, held_out)


def _train_with_penalty(
    module: nn.Module,
    training: tuple[GValueBatch, GValueBatch],
    held_out: tuple[GValueBatch, GValueBatch],
    plan: DetectorTrainingConfig,
    penalty: float,
    report: Callable[[float, int, float], None] | None,
) -> _PenaltyRun:
    """Train a copy of the module with one penalty."""
    model = copy.deepcopy(module).train()
    score = _make_score_fn(model)
    optimizer = torch.optim.Adam(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=plan.learning_rate
    )
    generator = torch.Generator().manual_seed(plan.seed)  # the same batches for every penalty
    best_loss, best_epoch, state = math.inf, 0, _cpu_state_dict(model)
    for epoch in range(1, plan.epochs + 1):
        for texts, labels in _batches(training, plan, generator):
            optimizer.zero_grad()
            _, loss = model(
                *_to_module_device(model, texts), labels.to(_module_device(model)), loss_batch_weight=penalty
            )
            loss.backward()
            optimizer.step()
        validation_loss = _validation_loss(score, held_out, plan.validation_lengths)
        if report is not None:
            report(penalty, epoch, validation_loss)
        if validation_loss < best_loss:
            best_loss, best_epoch, state = validation_loss, epoch, _cpu_state_dict(model)
        elif epoch - best_epoch >= plan.patience:
            break
    model.load_state_dict(state)
    overall, _ = evaluate_detector(score, *held_out, plan.validation_lengths)
    return _PenaltyRun(overall.true_positives, overall.auc, -best_loss, penalty, best_epoch, state)


def _train_validation_split(
    name: str, texts: GValueBatch, plan: DetectorTrainingConfig, generator: torch.Generator
) -> tuple[GValueBatch, GValueBatch]:
    """Split texts into training and validation texts."""
    usable = texts.select(texts.counts > 0)
    count = len(usable.mask)
    if count < _MIN_TEXTS:
        do = "provide more or longer texts"
        raise InputError(name, f"must contain at least {_MIN_TEXTS} texts with unmasked tokens", count, do)
    order = torch.randperm(count, generator=generator)
    num_held_out = min(max(round(plan.validation_share * count), 1), count - 1)
    return usable.select(order[num_held_out:]), usable.select(order[:num_held_out])


def _batches(
    training: tuple[GValueBatch, GValueBatch], plan: DetectorTrainingConfig, generator: torch.Generator
) -> Iterator[tuple[GValueBatch, Tensor]]:
    """Yield the batches of an epoch; the smaller class is oversampled."""
    count = max(len(texts.mask) for texts in training)
    # Few texts use smaller batches, for at least about ten steps per epoch.
    half = min(plan.batch_size // 2, max(count // 10, _MIN_TEXTS))
    orders = [_oversampled_order(len(texts.mask), count, generator) for texts in training]
    labels = torch.tensor([1.0, 0.0])
    for start in range(0, count, half):
        chosen = [
            texts.select(order[start : start + half]) for texts, order in zip(training, orders, strict=True)
        ]
        truncated = [
            texts.truncate(_random_lengths(texts.counts, plan.min_length, generator)) for texts in chosen
        ]
        rows = [row for texts in truncated for row in zip(*texts, strict=True)]
        yield GValueBatch.from_texts(rows), labels.repeat_interleave(len(chosen[0].mask))


def _oversampled_order(size: int, count: int, generator: torch.Generator) -> Tensor:
    """A random order of `count` indices below `size`, each equally often up to one."""
    orders = [torch.randperm(size, generator=generator) for _ in range(math.ceil(count / size))]
    return torch.cat(orders)[:count]


def _random_lengths(counts: Tensor, shortest: int, generator: torch.Generator) -> Tensor:
    """Uniformly random lengths between `shortest` and the full length."""
    minimum = counts.clamp(max=shortest)
    return minimum + (torch.rand(len(counts), generator=generator) * (counts - minimum + 1)).long()


def _split_by_length(
    marked: GValueBatch, unmarked: GValueBatch, lengths: Sequence[int]
) -> Iterator[tuple[str, GValueBatch, GValueBatch]]:
    """Yield the texts truncated to each length that most of both classes have, then whole."""
    for length in lengths:
        long_enough = [texts.counts >= length for texts in (marked, unmarked)]
        if all(2 * int(mask.sum()) >= len(mask) for mask in long_enough):
            truncated = [
                texts.select(mask).truncate(length)
                for texts, mask in zip((marked, unmarked), long_enough, strict=True)
            ]
            yield str(length), truncated[0], truncated[1]
    yield FULL_LENGTH, marked, unmarked


@torch.no_grad()
def _validation_loss(
    score: ScoreFunction, held_out: tuple[GValueBatch, GValueBatch], lengths: Sequence[int]
) -> float:
    """Cross entropy of held-out texts of all lengths, with equal class weights."""
    scores_by_length = [
        (score(*marked), score(*unmarked)) for _, marked, unmarked in _split_by_length(*held_out, lengths)
    ]
    classes = zip(*scores_by_length, strict=True)
    parts = (
        F.binary_cross_entropy(scores.clamp(_PROB_EPSILON, 1 - _PROB_EPSILON), torch.full_like(scores, label))
        for scores, label in zip(map(torch.cat, classes), (1.0, 0.0), strict=True)
    )
    return sum(map(float, parts)) / 2


def _make_score_fn(module: nn.Module) -> ScoreFunction:
    """Return a function for a module's posteriors [N], computed in chunks."""

    def score(values: Tensor, mask: Tensor) -> Tensor:
        chunks = zip(values.split(256), mask.split(256), strict=True)
        return torch.cat(
            [module(*_to_module_device(module, GValueBatch(*chunk)))[0].cpu() for chunk in chunks]
        )

    return score


def _to_module_device(module: nn.Module, texts: GValueBatch) -> GValueBatch:
    return GValueBatch(*(tensor.to(_module_device(module)) for tensor in texts))


def _module_device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def _cpu_state_dict(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}
