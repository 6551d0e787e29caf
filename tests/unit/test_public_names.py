"""The public names: sorted, each there, and nothing public beside them."""

from __future__ import annotations

import types

import descant


def test_names_are_sorted_and_there():
    # As ruff sorts: names in capitals first.
    assert descant.__all__ == sorted(descant.__all__, key=lambda name: (not name.isupper(), name))
    assert len(set(descant.__all__)) == len(descant.__all__)
    for name in descant.__all__:
        assert getattr(descant, name) is not None


def test_nothing_else_is_public():
    found = {name for name in dir(descant) if not name.startswith("_")}
    modules = {name for name in found if isinstance(getattr(descant, name), types.ModuleType)}
    # `descant.generate` is the function: it takes the place of the module of its name.
    assert found - modules == set(descant.__all__)


def test_a_documented_processor_works_by_hand():
    import torch

    scores = torch.tensor([[1.0, 3.0, 2.0]])
    kept = descant.TopKLogitsWarper(top_k=1)(torch.zeros(1, 1, dtype=torch.long), scores)
    assert kept.tolist() == [[-torch.inf, 3.0, -torch.inf]]
