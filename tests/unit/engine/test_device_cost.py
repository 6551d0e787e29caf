"""The cost of steps for a device: bounds on what a pretended one counts."""

from __future__ import annotations

import pytest
import torch

from bench.device import COUNTED_CACHES, count, missing_processors
from bench.fake_devices import FIRST, pretended
from descant.cli.doctor.device_costs import METHODS, OperationCounter
from descant.engine.planning.cache_factory import CACHES

# Ratchets of a steady step, which go down when a step gets cheaper: launches outside the network, reads for
# which the host waits, those of them before the next forward, copies of host memory to the device.
BOUNDS = {
    "greedy": (4, 2, 0, 0),
    "sampling": (56, 2, 0, 0),
    "min-p": (51, 2, 0, 0),
    "penalties": (119, 2, 0, 0),
    "4 beams": (18, 1, 1, 6),
    "4 x 4 beams": (30, 1, 1, 10),
    "diverse beams": (52, 2, 2, 22),
    "constrained beams": (22, 2, 2, 11),
    "prompt lookup": (54, 3.5, 3.5, 5),
    "suffix lookup": (23, 3.2, 3.2, 4.5),
    "early exit": (24, 2.4, 2.4, 3),
    "contrastive": (43, 3, 3, 15),
    "DoLa": (18, 2, 0, 0),
    "guidance": (26, 2, 0, 2),
    "log probabilities": (26, 3, 1, 2),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_steady_step_costs_a_device_no_more_than_its_bound(name: str) -> None:
    steady = count(METHODS[name]).steady
    found = steady.launches, steady.reads, steady.early_reads, steady.copies
    assert all(value <= bound for value, bound in zip(found, BOUNDS[name], strict=True)), found


def test_prompts_of_a_batch_are_copied_together() -> None:
    """The copies of a prefill do not grow with its prompts."""
    few, many = (count(METHODS["greedy"].with_prompts(number)).prefill.copies for number in (2, 16))
    assert many == few


def test_every_processor_has_a_case_or_a_reason() -> None:
    assert missing_processors() == []
    assert set(COUNTED_CACHES) <= set(CACHES)


def test_reads_copies_and_launches_are_told_apart() -> None:
    counter = OperationCounter(FIRST)
    with pretended():
        held = torch.ones(3, device=FIRST)
        cases = {
            "launch": [lambda: held + 1, held.argmax, lambda: torch.zeros(3, device=FIRST)],
            "read": [held.cpu, held.tolist, lambda: int(held[0]), lambda: held[held > 0]],
            "copy": [lambda: torch.ones(3).to(FIRST), lambda: held.copy_(torch.ones(3))],
        }
        for kind, calls in cases.items():
            for call in calls:
                assert counter.of(call)[kind] == 1, (kind, counter.counts)
        assert not counter.of(lambda: held.view(3, 1).expand(3, 2))
