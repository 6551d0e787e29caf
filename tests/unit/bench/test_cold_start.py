"""`python -m bench.cold_start`: what a fresh process costs, as a share of `import torch, transformers`."""

from __future__ import annotations

from pathlib import Path

from bench.cold_start import CASES, REFERENCE, measure

# Shares of the CPU time of the reference, a few times those measured; `import torch` is far beyond them.
BOUNDS = {"import descant": 0.04, "descant --help": 0.15}


def test_neither_the_import_nor_the_help_costs_what_torch_does() -> None:
    cases = {
        REFERENCE: CASES[REFERENCE],
        "import torch": "import torch",
        **{name: CASES[name] for name in BOUNDS},
    }
    seconds = measure(cases, rounds=1, model=Path())
    shares = {name: seconds[name] / seconds[REFERENCE] for name in cases}
    assert shares["import torch"] > max(BOUNDS.values())  # so a bound fails where torch is imported
    assert {name: share for name, share in shares.items() if share > BOUNDS.get(name, share)} == {}
