"""The training of a detector that learns from g-values, and what it shows on texts that it has not seen."""

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

__all__ = [
    "DetectorMetrics",
    "DetectorTrainingConfig",
    "DetectorTrainingResult",
    "GValueBatch",
    "compute_metrics",
    "evaluate_detector",
    "train_detector",
]

FALSE_POSITIVE_RATE: Final = 0.01  # false positives at which detectors are compared
FULL_LENGTH: Final = "whole"  # the name of texts that are not cut
_PROB_EPSILON: Final = 1e-5  # as near to 0 and 1 as a posterior comes in the validation's cross entropy
_MIN_TEXTS: Final = 4  # texts of each kind: one to train with and one to validate with would say nothing

ScoreFunction = Callable[[Tensor, Tensor], Tensor]  # g-values [N, L, D], mask [N, L] -> [N]


class GValueBatch(NamedTuple):
    """Texts as a detector sees them."""

    g_values: Tensor  # [N, L, D]
    mask: Tensor  # [N, L], of the g-values that count

    @classmethod
    def from_texts(cls, several: Sequence[tuple[Tensor, Tensor]]) -> Self:
        """Texts of any lengths, each its g-values [L, D] and its mask [L], padded by what does not count."""
        if not several:
            return cls(torch.zeros(0, 0, 0), torch.zeros(0, 0, dtype=torch.bool))
        rows = nn.utils.rnn.pad_sequence
        values = rows([values for values, _ in several], batch_first=True)
        return cls(values, rows([mask for _, mask in several], batch_first=True).bool())

    def select(self, rows: Tensor) -> GValueBatch:
        """Those at `rows`."""
        return GValueBatch(self.g_values[rows], self.mask[rows])

    def truncate(self, counts: Tensor | int) -> GValueBatch:
        """Each text's first tokens, as many that count as `counts` ([N] or one for all) says."""
        counts = torch.as_tensor(counts, device=self.mask.device)
        mask = self.mask & (self.mask.cumsum(1) <= counts.reshape(-1, 1))
        longest = int(mask.any(0).nonzero().max()) + 1 if bool(mask.any()) else 0
        return GValueBatch(self.g_values[:, :longest], mask[:, :longest])

    @property
    def counts(self) -> Tensor:
        """How many tokens of each text count [N]."""
        return self.mask.sum(1)


@dataclass(frozen=True)
class DetectorMetrics:
    """How well scores tell marked texts from unmarked ones."""

    marked: int  # texts
    unmarked: int
    auc: float  # the probability that a marked text scores above an unmarked one
    true_positives: float  # the share of marked texts above the threshold
    threshold: float  # the least with at most 1 % of the unmarked texts above it


@dataclass(frozen=True)
class DetectorTrainingConfig:
    """How to train."""

    epochs: int = 60  # at most
    patience: int = 8  # epochs without a better validation, after which it stops
    learning_rate: float = 0.02  # of Adam
    batch_size: int = 64  # texts at most, half of them marked
    validation_share: float = 0.3  # of the texts, for validation
    delta_penalties: tuple[float, ...] = (0.0, 1e-3, 1e-2, 1e-1)  # on the squares of `delta`: the best wins
    min_length: int = 10  # tokens that a text is cut to in training
    validation_lengths: tuple[int, ...] = (25, 50, 100, 200)  # that are validated beside the whole texts
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "patience", "batch_size", "min_length"):
            if getattr(self, name) < (2 if name == "batch_size" else 1):
                raise InputError(name, f"must be >= {2 if name == 'batch' else 1}", getattr(self, name))
        if not 0.0 < self.validation_share < 1.0:
            raise InputError(
                "validation_share", "must be between 0 and 1, neither of them", self.validation_share
            )
        if not self.delta_penalties or min(self.delta_penalties) < 0 or self.learning_rate <= 0:
            got = {"delta_penalties": self.delta_penalties, "learning_rate": self.learning_rate}
            raise InputError("delta_penalties", "must be some numbers >= 0, and `rate` above 0", got)


class DetectorTrainingResult(NamedTuple):
    """What training has found."""

    state_dict: dict[str, Tensor]  # of the module, on the CPU
    overall: DetectorMetrics  # on held-out texts of all lengths together
    by_length: dict[str, DetectorMetrics]  # the same for each length, and for whole texts
    penalty: float  # the one that did best
    best_epoch: int  # after which the best state was reached
    held_out: tuple[GValueBatch, GValueBatch]  # the marked and the unmarked texts that were held out

    def to_dict(self) -> dict[str, Any]:
        """The figures as JSON knows them."""
        by_length = {name: asdict(one) for name, one in self.by_length.items()}
        return {"overall": asdict(self.overall), "lengths": by_length, "penalty": self.penalty}


class _PenaltyRun(NamedTuple):
    """One penalty's best: ordered by what makes it the better."""

    true_positives: float
    auc: float
    neg_validation_loss: float  # the smaller the validation's cross entropy, the greater
    penalty: float
    best_epoch: int
    state_dict: dict[str, Tensor]


def compute_metrics(marked: Tensor, unmarked: Tensor) -> DetectorMetrics:
    """What scores [N] of marked and [M] of unmarked texts say of the detector that gave them."""
    marked, unmarked = marked.detach().double().cpu(), unmarked.detach().double().cpu().sort().values
    below = torch.searchsorted(unmarked, marked) + torch.searchsorted(unmarked, marked, right=True)
    threshold = unmarked[len(unmarked) - 1 - int(FALSE_POSITIVE_RATE * len(unmarked))]
    return DetectorMetrics(
        marked=len(marked),
        unmarked=len(unmarked),
        auc=float(below.double().mean()) / (2 * len(unmarked)),  # a tie is half of each
        true_positives=float((marked > threshold).double().mean()),
        threshold=float(threshold),
    )


@torch.no_grad()
def evaluate_detector(
    score: ScoreFunction, marked: GValueBatch, unmarked: GValueBatch, lengths: Sequence[int]
) -> tuple[DetectorMetrics, dict[str, DetectorMetrics]]:
    """A detector's figures over texts of all lengths together, and for each length that most texts have."""
    cuts = list(_split_by_length(marked, unmarked, lengths))
    scores = [(name, score(*one), score(*other)) for name, one, other in cuts]
    together = compute_metrics(
        torch.cat([one for _, one, _ in scores]), torch.cat([other for *_, other in scores])
    )
    return together, {name: compute_metrics(one, other) for name, one, other in scores}


def train_detector(
    module: nn.Module,
    marked: GValueBatch,
    unmarked: GValueBatch,
    plan: DetectorTrainingConfig | None = None,
    report: Callable[[float, int, float], None] | None = None,
) -> DetectorTrainingResult:
    """The state of a module with BayesianDetectorModel's `forward` that best tells marked texts from others.

    Adam on the cross entropy, batches half marked whatever the numbers, each text cut anew in every epoch, so
    that what is learnt holds for short ones too; it stops when held-out texts say so. Of several penalties on
    `delta` that one wins which finds most of the marked held-out texts at 1 % false positives. The module
    itself stays as it is, as does torch's own generator; `report` is told penalty, epoch and cross entropy.
    """
    plan = plan or DetectorTrainingConfig()
    chance = torch.Generator().manual_seed(plan.seed)
    ones, others = (
        _train_validation_split("marked", marked, plan, chance),
        _train_validation_split("unmarked", unmarked, plan, chance),
    )
    learning, held = (ones[0], others[0]), (ones[1], others[1])
    runs = [
        _train_with_penalty(module, learning, held, plan, penalty, report) for penalty in plan.delta_penalties
    ]
    best = max(runs, key=lambda run: run[:3])
    found = copy.deepcopy(module)
    found.load_state_dict(best.state_dict)
    overall, lengths = evaluate_detector(_make_score_fn(found), *held, plan.validation_lengths)
    return DetectorTrainingResult(best.state_dict, overall, lengths, best.penalty, best.best_epoch, held)


def _train_with_penalty(
    module: nn.Module,
    learning: tuple[GValueBatch, GValueBatch],
    held: tuple[GValueBatch, GValueBatch],
    plan: DetectorTrainingConfig,
    penalty: float,
    report: Callable[[float, int, float], None] | None,
) -> _PenaltyRun:
    """Train with one penalty, from the module's state."""
    pupil = copy.deepcopy(module).train()
    score = _make_score_fn(pupil)
    steps = torch.optim.Adam([one for one in pupil.parameters() if one.requires_grad], lr=plan.learning_rate)
    chance = torch.Generator().manual_seed(plan.seed)  # each penalty sees the same batches
    least, reached, state = math.inf, 0, _cpu_state_dict(pupil)
    for epoch in range(1, plan.epochs + 1):
        for texts, labels in _batches(learning, plan, chance):
            steps.zero_grad()
            _, loss = pupil(
                *_to_module_device(pupil, texts), labels.to(_module_device(pupil)), loss_batch_weight=penalty
            )
            loss.backward()
            steps.step()
        entropy = _validation_loss(score, held, plan.validation_lengths)
        if report is not None:
            report(penalty, epoch, entropy)
        if entropy < least:
            least, reached, state = entropy, epoch, _cpu_state_dict(pupil)
        elif epoch - reached >= plan.patience:
            break
    pupil.load_state_dict(state)
    overall, _ = evaluate_detector(score, *held, plan.validation_lengths)
    return _PenaltyRun(overall.true_positives, overall.auc, -least, penalty, reached, state)


def _train_validation_split(
    name: str, texts: GValueBatch, plan: DetectorTrainingConfig, chance: torch.Generator
) -> tuple[GValueBatch, GValueBatch]:
    """Texts to learn from, and those that are held out."""
    usable = texts.select(texts.counts > 0)
    count = len(usable.mask)
    if count < _MIN_TEXTS:
        do = "give more or longer texts"
        raise InputError(name, f"must be at least {_MIN_TEXTS} texts with tokens that count", count, do)
    order = torch.randperm(count, generator=chance)
    out = min(max(round(plan.validation_share * count), 1), count - 1)
    return usable.select(order[out:]), usable.select(order[:out])


def _batches(
    learning: tuple[GValueBatch, GValueBatch], plan: DetectorTrainingConfig, chance: torch.Generator
) -> Iterator[tuple[GValueBatch, Tensor]]:
    """An epoch's batches: the larger kind once, the smaller one as often as that takes."""
    count = max(len(one.mask) for one in learning)
    # Few texts in smaller batches: an epoch is to be about ten steps at least.
    half = min(plan.batch_size // 2, max(count // 10, _MIN_TEXTS))
    orders = [_oversampled_order(len(one.mask), count, chance) for one in learning]
    labels = torch.tensor([1.0, 0.0])
    for start in range(0, count, half):
        chosen = [
            one.select(order[start : start + half]) for one, order in zip(learning, orders, strict=True)
        ]
        short = [texts.truncate(_random_lengths(texts.counts, plan.min_length, chance)) for texts in chosen]
        rows = [row for texts in short for row in zip(*texts, strict=True)]
        yield GValueBatch.from_texts(rows), labels.repeat_interleave(len(chosen[0].mask))


def _oversampled_order(size: int, count: int, chance: torch.Generator) -> Tensor:
    """`count` places in a random order, each of `size` as often as any other, give or take one."""
    orders = [torch.randperm(size, generator=chance) for _ in range(math.ceil(count / size))]
    return torch.cat(orders)[:count]


def _random_lengths(counts: Tensor, shortest: int, chance: torch.Generator) -> Tensor:
    """Lengths between the shortest and the whole, all alike likely."""
    least = counts.clamp(max=shortest)
    return least + (torch.rand(len(counts), generator=chance) * (counts - least + 1)).long()


def _split_by_length(
    marked: GValueBatch, unmarked: GValueBatch, lengths: Sequence[int]
) -> Iterator[tuple[str, GValueBatch, GValueBatch]]:
    """Texts cut to each length that most of both kinds have, and whole."""
    for length in lengths:
        enough = [texts.counts >= length for texts in (marked, unmarked)]
        if all(2 * int(some.sum()) >= len(some) for some in enough):
            cut = [
                texts.select(some).truncate(length)
                for texts, some in zip((marked, unmarked), enough, strict=True)
            ]
            yield str(length), cut[0], cut[1]
    yield FULL_LENGTH, marked, unmarked


@torch.no_grad()
def _validation_loss(
    score: ScoreFunction, held: tuple[GValueBatch, GValueBatch], lengths: Sequence[int]
) -> float:
    """The cross entropy of held-out texts of all lengths, both kinds of the same weight."""
    found = [(score(*one), score(*other)) for _, one, other in _split_by_length(*held, lengths)]
    kinds = zip(*found, strict=True)
    parts = (
        F.binary_cross_entropy(scores.clamp(_PROB_EPSILON, 1 - _PROB_EPSILON), torch.full_like(scores, truth))
        for scores, truth in zip(map(torch.cat, kinds), (1.0, 0.0), strict=True)
    )
    return sum(map(float, parts)) / 2


def _make_score_fn(module: nn.Module) -> ScoreFunction:
    """A module's posteriors [N], in pieces that fit in memory."""

    def score(values: Tensor, mask: Tensor) -> Tensor:
        pieces = zip(values.split(256), mask.split(256), strict=True)
        return torch.cat(
            [module(*_to_module_device(module, GValueBatch(*piece)))[0].cpu() for piece in pieces]
        )

    return score


def _to_module_device(module: nn.Module, texts: GValueBatch) -> GValueBatch:
    return GValueBatch(*(one.to(_module_device(module)) for one in texts))


def _module_device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def _cpu_state_dict(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}
