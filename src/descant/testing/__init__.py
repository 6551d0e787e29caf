"""Contract tests: plain functions that raise AssertionError, for Descant's own parts and for yours.

| Contract | Checked by |
|---|---|
| a batch of N equals N batches of 1, in any order | `check_batch` |
| a request's result does not depend on when it is admitted, nor on other requests | `check_admission` |
| a result does not depend on budgets, chunks of prompts, preemption and priorities | `check_schedule` |
| seeded sampling does not depend on the batch, the admission or torch's generator | `check_seed` |
| verifying all drafts at once equals one by one, and a rollback leaves no trace | `check_drafts` |
| a drafter does not change greedy and seeded output, and samples from its draft probs | `check_drafter` |
| a cache equals a list per row, under any sequence of operations | `check_cache`, `check_generation` |
| code from outside that raises ends only the requests it belongs to | `check_isolation` |
| a processor treats each line separately and changes nothing in place | `check_processor` |
| a config is the same after a roundtrip to a file | `check_config_roundtrip` |
| a recipe fulfils the contracts of its kind and does not affect other requests | `check_recipe` |

`toy` makes a tiny model with random weights. `check_cache` uses hypothesis: `pip install descant[testing]`.
"""

from descant.models.loading.tiny_llama import toy
from descant.testing.cache import CacheTraits, check_cache, check_generation
from descant.testing.config import check_config_roundtrip
from descant.testing.drafter import check_drafter, check_drafts
from descant.testing.faults import FaultInjector, check_isolation
from descant.testing.outcome import (
    Outcome,
    Schedule,
    check_admission,
    check_batch,
    check_schedule,
    check_seed,
    compare,
    failing_request,
    outcomes,
)
from descant.testing.processor import check_processor
from descant.testing.recipe import check_recipe
from descant.testing.reference_cache import ReferenceCache

__all__ = [
    "CacheTraits",
    "FaultInjector",
    "Outcome",
    "ReferenceCache",
    "Schedule",
    "check_admission",
    "check_batch",
    "check_cache",
    "check_config_roundtrip",
    "check_drafter",
    "check_drafts",
    "check_generation",
    "check_isolation",
    "check_processor",
    "check_recipe",
    "check_schedule",
    "check_seed",
    "compare",
    "failing_request",
    "outcomes",
    "toy",
]
