"""The simulation: cost models, lengths, a workload against a plain reference, and the committed figures."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from tools.simulate import __main__ as command
from tools.simulate import cost_model, lengths, sweeps
from tools.simulate.cost_model import CostModel, Measured, fit_published, fit_steps, load_costs
from tools.simulate.lengths import Workload, draw
from tools.simulate.load import Target, simulate

TARGET = Target(1.0, 0.05)
COMMITTED = json.loads(cost_model.COSTS.with_name("sweeps.json").read_text(encoding="utf-8"))


def plain_cost(**fields: float) -> CostModel:
    zero = {"step": 0.0, "prompt_token": 0.0, "decode_row": 0.0, "kv_token": 0.0}
    return CostModel("plain", "", **{**zero, **fields}, kv_tokens=1 << 20, median_error=0.0)


def workload(*requests: tuple[float, int, int]) -> Workload:
    arrivals, prompts, outputs = (np.array(column) for column in zip(*requests, strict=True))
    return Workload(arrivals.astype(float), prompts, outputs, np.zeros(len(requests), dtype=int))


# ------------------------------------------------------------------------ cost models
def test_a_fit_finds_the_coefficients_of_exact_steps():
    truth = (0.01, 2e-4, 3e-3, 1e-6)
    steps = [
        Measured(prompt, rows, kv, truth[0] + truth[1] * prompt + truth[2] * rows + truth[3] * kv)
        for prompt in (0, 64, 512)
        for rows in (0, 3, 16)
        for kv in (0, 1000, 9000)
    ]
    found = fit_steps("name", "source", steps, 100)
    assert (found.step, found.prompt_token, found.decode_row, found.kv_token) == pytest.approx(truth)
    assert found.median_error < 1e-9
    assert found.seconds(64, 3, 1000) == pytest.approx(0.01 + 64 * 2e-4 + 9e-3 + 1e-3)


def test_the_published_model_agrees_with_the_table_and_is_the_committed_one():
    model = fit_published()
    for prompt, output, rate in cost_model.PUBLISHED:
        context = prompt + output / 2
        batch = min(cost_model.MOST_ROWS, model.kv_tokens / context)
        seconds = model.seconds(batch * prompt / output, batch, batch * context)
        assert batch / seconds == pytest.approx(rate, rel=0.06)
    saved = load_costs()["h100"]
    assert saved.source == model.source
    for name in ("step", "prompt_token", "decode_row", "kv_token", "kv_tokens"):
        assert getattr(saved, name) == pytest.approx(getattr(model, name))


# ------------------------------------------------------------------------ workloads
def test_lengths_come_from_the_sample_and_arrivals_have_their_rate():
    for service, rows in (("conversation", 220), ("code", 120)):
        sample = lengths.sample(service)
        assert len(sample) == rows
        work = draw(20_000, 25.0, service=service, levels=3, seed=3)
        assert work.prompts.mean() == pytest.approx(sample[:, 0].mean(), rel=0.05)
        assert work.outputs.mean() == pytest.approx(sample[:, 1].mean(), rel=0.05)
        assert 20_000 / work.arrivals[-1] == pytest.approx(25.0)
        assert min(work.prompts.min(), work.outputs.min()) >= 1
        assert set(work.priorities.tolist()) == {0, 1, 2}


def test_bursts_have_the_variation_that_was_asked_for():
    for burstiness in (1.0, 16.0):
        gaps = np.diff(draw(50_000, 10.0, burstiness=burstiness, seed=4).arrivals)
        assert gaps.var() / gaps.mean() ** 2 == pytest.approx(burstiness, rel=0.15)


# ------------------------------------------------------------------------ runs
def test_one_request_takes_its_prompt_and_its_tokens():
    cost = plain_cost(step=0.1, prompt_token=0.01)
    result = simulate(cost, workload((2.0, 10, 5)), TARGET, max_running_rows=4, max_step_tokens=4)
    assert result.first_token["p50"] == pytest.approx(0.1 * 3 + 0.01 * 10)
    assert result.seconds == pytest.approx(0.1 * 3 + 0.01 * 10 + 0.1 * 4)
    assert (result.steps, result.output_tokens, result.preemptions) == (7, 5, 0)
    assert result.between_tokens["p50"] == pytest.approx(0.1, rel=0.02)


def test_preempted_requests_end_with_all_their_tokens():
    cost = plain_cost(step=0.01, prompt_token=0.001)
    work = workload(*((0.0, 8, 40) for _ in range(6)))
    limits = {"max_running_rows": 6, "block_size": 4, "headroom": 0.0}
    small = simulate(cost, work, TARGET, num_blocks=24, **limits)
    large = simulate(cost, work, TARGET, num_blocks=400, **limits)
    assert small.preemptions > 0
    assert large.preemptions == 0
    assert small.reread_tokens > 0
    assert (small.requests, small.output_tokens) == (large.requests, large.output_tokens) == (6, 240)
    assert small.seconds > large.seconds


# ------------------------------------------------------------------------ the committed figures
def test_the_committed_figures_are_what_the_scheduler_gives():
    """One point of each sweep is simulated again; the others come from the same command."""
    h100 = load_costs()["h100"]
    point = next(point for point in COMMITTED["load"]["Poisson"] if point["rate"] == 40)
    assert sweeps.point(h100, 40) == {name: value for name, value in point.items() if name != "rate"}
    chunk = next(point for point in COMMITTED["chunk"] if point["tokens"] == 4096)
    found = sweeps.point(h100, sweeps.CHUNK_RATE, max_step_tokens=4096)
    assert found == {name: value for name, value in chunk.items() if name != "tokens"}


def test_the_commands_run(monkeypatch, capsys):
    for given, expected in (
        (["schedules", "--count", "30", "--first", "7", "--jobs", "1"], "30 schedules"),
        (["load", "--requests", "50", "--rate", "20", "--service", "code"], '"requests": 50'),
    ):
        monkeypatch.setattr(sys, "argv", ["simulate", *given])
        assert command.main() == 0
        assert expected in capsys.readouterr().out


def test_a_broken_promise_is_reported(monkeypatch, capsys):
    def broken(seed: int) -> None:
        raise command.BrokenInvariant(f"seed {seed}")

    monkeypatch.setattr(command, "run_schedule", broken)
    steps, counts, errors = command.try_schedules(range(3, 5))
    assert (steps, sum(counts.values()), errors) == (0, 0, ["seed 3", "seed 4"])
