"""The laws of Descant as contract tests: plain functions that raise AssertionError, for ours and for yours.

| Law | Checked by |
|---|---|
| a batch of N equals N batches of 1, in any order | `check_batch` |
| admitted mid-flight equals admitted first, whatever becomes of the neighbours | `check_admission` |
| a seeded request draws the same, whoever else is there and whenever it came | `check_seed` |
| all drafts at once equals one by one, and what is rolled back leaves no trace | `check_drafts` |
| any drafter leaves greedy and seeded output as it was, and tells the truth about its law | `check_drafter` |
| a cache equals a list of lists, under any sequence of operations | `check_cache`, `check_generation` |
| a processor looks at its own line alone, and changes nothing | `check_processor` |
| a config written, read and written again is the same file | `check_config_roundtrip` |
| somebody else's method keeps the laws of its kind, and leaves everybody else alone | `check_recipe` |

`toy` makes a tiny model with random weights to try things on. `check_cache` searches with hypothesis: `pip
install descant[testing]`.
"""

from descant.models.tiny_llama import toy
from descant.testing.admission_schedule import Schedule, failing_request
from descant.testing.cache import CacheTraits, ReferenceCache, check_cache, check_generation
from descant.testing.config import check_config_roundtrip
from descant.testing.drafter import check_drafter
from descant.testing.drafts import check_drafts
from descant.testing.outcome import Outcome, compare, outcomes
from descant.testing.processor import check_processor
from descant.testing.recipe import check_recipe
from descant.testing.requests import check_admission, check_batch, check_seed

__all__ = [
    "CacheTraits",
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
    "check_processor",
    "check_recipe",
    "check_seed",
    "compare",
    "failing_request",
    "outcomes",
    "toy",
]
