"""Many draws of one short window of tokens, cheaply: with drafts, and the exact law of the same without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from descant import Session
from descant.core.context import row_params
from descant.core.records import Hypothesis, Observation
from descant.core.rows import Rows
from descant.engine.step.step import StepHooks, run_step
from tests.contracts.settings import VOCAB, Setting, scripts

WINDOW = 3
OVER = VOCAB  # stands in a window where a row has ended
BOUND = 0.001 / 20
_BATCH = 20_000


# ------------------------------------------------------------------------ draws
@dataclass
class Drawn:
    """What was drawn of one setting."""

    windows: list[Tensor] = field(default_factory=list)  # [N, WINDOW] each
    tried: int = 0
    right: int = 0

    @property
    def counts(self) -> Tensor:
        """How often each window came [V + 1, ...]."""
        flat = torch.cat(self.windows) @ torch.tensor([(VOCAB + 1) ** at for at in reversed(range(WINDOW))])
        return flat.bincount(minlength=(VOCAB + 1) ** WINDOW).view([VOCAB + 1] * WINDOW)


@torch.no_grad()
def drawn(settings: Sequence[Setting], count: int, seeded: float = 0.0, ragged: bool = False) -> list[Drawn]:
    """So many windows of each setting, all in one table; a share of them draw from streams of their own.

    Each is one request, whose row is repeated before the first step: the loop is the real one, and what
    admission costs is paid once.
    """
    found = [Drawn() for _ in settings]
    with scripts():
        while count > 0:
            size = min(count, _BATCH // len(settings))
            _batch(settings, size, found, seeded, ragged)
            count -= size
    return found


def _batch(settings: Sequence[Setting], size: int, found: list[Drawn], seeded: float, ragged: bool) -> None:
    session = Session(settings[0].model)
    total = size * len(settings)
    numbers = session.admit(*(one.request() for one in settings), noise_rows=total)
    table, rows = session._tables.default, _repeated(session, size)
    values = dict(row_params(rows).values)
    values["noise_row"] = (torch.arange(len(settings)) * size).repeat_interleave(size)
    if seeded:
        own = torch.rand(total) < seeded
        values["seed"] = torch.where(own, torch.randint(2**62, (total,)), -1)
    if ragged:
        values["draft_tokens"] = torch.randint(0, 5, (total,))
    rows = rows.replace(columns={**rows.columns, "params": type(row_params(rows))(values)})
    while len(rows) and int((rows.length - rows.prompt_length).min()) < WINDOW:
        rows, selections = run_step(table.model, table.cache, rows, table.running.strategy_groups)
        for selection in selections:
            assert selection.emitted is not None
            whose = selection.emitted.request.tolist()
            for at, one in selection.emitted.finished.items():
                _ended(found[numbers.index(whose[at])], one)
    _record_rows(rows, found, numbers)


def _repeated(session: Session, size: int) -> Rows:
    """The session's rows, each so many times: slots of its request."""
    rows = session._tables.default.rows
    assert rows is not None
    each = torch.arange(len(rows)).repeat_interleave(size)
    session._tables.default.cache.commit(each, torch.zeros_like(each))
    rows = rows.take(each)
    return rows.replace(slot=torch.arange(len(each)) % size)


def _ended(mine: Drawn, one: Hypothesis) -> None:
    """Take in a row that has ended."""
    mine.windows.append(torch.tensor([[*one.tokens.tolist(), *[OVER] * WINDOW][:WINDOW]]))
    if one.speculation is not None:
        mine.tried += sum(one.speculation.drafted)
        mine.right += sum(one.speculation.accepted)


def _record_rows(rows: Rows, found: Sequence[Drawn], numbers: Sequence[int]) -> None:
    """Take in the rows that go on."""
    for number, mine in zip(numbers, found, strict=True):
        here = (rows.request == number).nonzero().squeeze(1)
        start = rows.prompt_length[here][:, None] + torch.arange(WINDOW)
        mine.windows.append(rows.tokens[here].gather(1, start))
        if (tally := rows.columns.get("acceptance_stats")) is not None:
            mine.tried += int(tally.num_drafted[here.numpy()].sum())
            mine.right += int(tally.num_accepted[here.numpy()].sum())


# ------------------------------------------------------------------------ the exact law
class Forced:
    """Noise by which every row takes the path that it is given, as far as it can."""

    num_rows = 0

    def __init__(self, paths: Tensor, prompt: int) -> None:
        self.paths, self.prompt = paths, prompt

    def draw(self, rows: Rows, size: int) -> Tensor:
        """Next to nothing for the token that is to win the race [R, V]."""
        want = self.paths[rows.slot, rows.length - self.prompt]
        return torch.ones(len(rows), size).scatter_(1, want[:, None], 1e-30)


@torch.no_grad()
def exact(setting: Setting) -> Tensor:
    """The law of the window without drafts [V + 1, ...], from every path through it."""
    paths = torch.cartesian_prod(*[torch.arange(VOCAB)] * (WINDOW - 1))
    paths = torch.cat((paths, torch.zeros(len(paths), 1, dtype=torch.long)), 1)
    session = Session(setting.model)
    table = session._tables.default
    table.running.noise = Forced(paths, len(setting.prompt))  # type: ignore[assignment]
    session.admit(setting.request(drafts=False), noise_rows=len(paths))
    rows = _repeated(session, len(paths))
    laws: dict[tuple[int, ...], Tensor] = {}

    def observe(seen: Observation) -> None:
        for line, scores in enumerate(seen.scores[:, 0].double()):
            told = seen.rows.tokens[line, int(seen.rows.prompt_length[line]) : int(seen.rows.length[line])]
            laws.setdefault(tuple(told.tolist()), scores.softmax(-1))

    for _ in range(WINDOW):
        if len(rows):
            rows, _ = run_step(
                table.model, table.cache, rows, table.running.strategy_groups, StepHooks(observe)
            )
    ends = {setting.fields.get("eos_token_id"), *setting.fields.get("stop_token_ids", ())}
    whole = torch.zeros([VOCAB + 1] * WINDOW, dtype=torch.double)
    _spread(laws, (), 1.0, whole, ends)
    return whole


def _spread(
    laws: Mapping[tuple[int, ...], Tensor],
    path: tuple[int, ...],
    chance: float,
    whole: Tensor,
    ends: set[Any],
) -> None:
    """Write the chances of all windows that begin with a path."""
    if len(path) == WINDOW or (path and path[-1] in ends):
        whole[(*path, *[OVER] * (WINDOW - len(path)))] = chance
        return
    for token, share in enumerate(laws[path].tolist()):
        if share > 0:
            _spread(laws, (*path, token), chance * share, whole, ends)


# ------------------------------------------------------------------------ the test
def fits(counts: Tensor, law: Tensor) -> dict[str, float]:
    """How well counts fit a law: p of the whole window, and of each of its places."""
    names = ("window", *(f"place {at + 1}" for at in range(WINDOW)))
    sides = [range(WINDOW), *((at,) for at in range(WINDOW))]
    told = {}
    for name, kept in zip(names, sides, strict=True):
        others = [at for at in range(WINDOW) if at not in kept]
        parts = (part.sum(others) if others else part for part in (counts, law))
        told[name] = fit(*(part.flatten().double().numpy() for part in parts))
    return told


def fit(counts: np.ndarray, law: np.ndarray) -> float:
    """Pearson's p; cells that are expected less than five times are one cell, what cannot be must not be."""
    if counts[law == 0].any():
        return 0.0
    wanted = law / law.sum() * counts.sum()
    order = np.argsort(wanted)
    wanted, counts = wanted[order], counts[order]
    # As many of the rarest as make up a cell that is expected five times.
    whole = np.cumsum(wanted)
    rare = int(max(np.searchsorted(whole, 5.0), np.searchsorted(wanted, 5.0))) + 1
    wanted = np.append(wanted[rare:], wanted[:rare].sum())
    counts = np.append(counts[rare:], counts[:rare].sum())
    return float(stats.chisquare(counts, wanted).pvalue) if len(counts) > 1 else 1.0
