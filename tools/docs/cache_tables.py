"""Write the table of caches in docs/guide/memory.md from the code and SmolLM2, or check that it is current.

python tools/docs/cache_tables.py             write
python tools/docs/cache_tables.py --check     fail if the page differs from the code
"""

import argparse
import difflib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import transformers

import descant
from descant.api.prefill import _SAVABLE_STORES as SAVED
from descant.config.generation_config import GenerationConfig
from descant.core.interfaces import ModelTraits
from descant.engine.memory_check import CacheCost, cache_cost, cache_request
from descant.engine.planning.cache_factory import CACHES, missing_requirement
from descant.engine.planning.planner import as_model
from descant.errors import format_bytes
from descant.kv_cache.stores.block_store import Workload
from descant.models.kv_shape import KVShape, kv_shape_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "memory.md"
MODEL = "models/smollm2"
BEGIN, END = (
    "<!-- Written by tools/docs/cache_tables.py: edit there. -->\n",
    "<!-- End of the table of tools/docs/cache_tables.py. -->\n",
)

LONG: Final = Workload(1, 1, 4096, 4096 + 127)
BEAMS: Final = Workload(1, 8, 1024, 1024 + 127)
FORKED: Final = (Workload(1, 1, 4096, 4097), Workload(1, 8, 4096, 4097))  # shows whether rows share blocks
WINDOW: Final = 512  # of the sliding layers of a model with windows

CLASSES: Final[dict[str, tuple[type[Any], ...]]] = {
    "dynamic": (descant.DynamicCache,),
    "paged": (descant.PagedCache,),
    "static": (descant.StaticCache,),
    "offloaded": (descant.OffloadedCache,),
    "offloaded_static": (descant.OffloadedStaticCache,),
    "sliding_window": (descant.SlidingWindowCache,),
    "hybrid": (descant.HybridCache,),
    "mamba": (descant.MambaCache,),
    "quantized": (descant.QuantoQuantizedCache, descant.HQQQuantizedCache),
    "sink": (descant.SinkCache,),
    "snapkv": (descant.SnapKVCache,),
    "h2o": (descant.H2OCache,),
}
# The output with these differs from the output with the whole cache.
INEXACT: Final = frozenset({"quantized", "sink", "snapkv", "h2o"})


class WithTraits:
    """A model with other traits than its own."""

    def __init__(self, model: Any, traits: ModelTraits) -> None:
        self.inner, self.traits = model, traits

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def stand_in(model: Any, *kinds: str) -> Any:
    """The model with layers of these kinds in turn."""
    own = as_model(model)
    layers = tuple(kinds[at % len(kinds)] for at in range(own.traits.num_layers))
    windows = {kind: WINDOW if kind == "sliding_attention" else None for kind in dict.fromkeys(kinds)}
    traits = replace(own.traits, sliding_windows=windows, layer_types=layers)
    return WithTraits(own, traits)


def cost_of(name: str, model: Any, geometry: KVShape, run: Workload) -> CacheCost | None:
    """The memory of a cache for a workload; None where the model cannot use it."""
    want = cache_request(model, GenerationConfig(), name, run)
    return None if missing_requirement(name, want) is not None else cache_cost(name, want, run, geometry)


def line(name: str, model: Any, geometry: KVShape) -> list[str]:
    """The table line of one cache: its memory and its properties."""
    kinds = {"sliding_window": ("sliding_attention",), "hybrid": ("sliding_attention", "full_attention")}
    target = stand_in(model, *kinds.get(name, ("full_attention",)))
    classes = ", ".join(f"`{one.__name__}`" for one in CLASSES[name])
    long, beams, *forked = (cost_of(name, target, geometry, run) for run in (LONG, BEAMS, *FORKED))
    sizes, shares = ["a state"] * 3, "no"
    if long is not None and beams is not None:
        sizes = [
            format_bytes(long.final_bytes / (LONG.num_rows * LONG.final_length)),
            format_bytes(long.final_bytes),
            format_bytes(beams.final_bytes),
        ]
        one, many = (found.final_bytes for found in forked if found is not None)
        shares = "yes" if many < 4 * one else "no"
    back: int | None = None
    if name != "mamba":
        want = cache_request(target, GenerationConfig(), name, LONG)
        # Building the quantized cache would need an optional package.
        back = None if name == "quantized" else CACHES[name].build(want).max_rewind
    takes = "all" if back is None else f"{back} tokens" if back else "nothing"
    exact = "no" if name in INEXACT else "yes"
    marks = [takes, shares, "yes" if name in SAVED else "no", exact, "yes" if name == "static" else "no"]
    return [f'`"{name}"`', classes, *sizes, *marks, CACHES[name].description]


def table(model: Any) -> str:
    """All caches."""
    geometry = kv_shape_of(model)
    head = [
        "name", "class", "a token", "4,096 + 128 tokens", "8 beams, 1,024 + 128", "max rewind", "rows share",
        "on disk", "exact", "compiles", "for",
    ]  # fmt: skip
    lines = [head, ["---"] * len(head), *(line(name, model, geometry) for name in CACHES)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def render(page: str, model: Any) -> str:
    """The page with the current table."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table(model)}\n{END}{after}"


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    old = PAGE.read_text(encoding="utf-8")
    new = render(old, transformers.AutoModelForCausalLM.from_pretrained(MODEL))
    if not check:
        PAGE.write_text(new, encoding="utf-8")
        return 0
    difference = difflib.unified_diff(old.splitlines(), new.splitlines(), "the page", "the code", lineterm="")
    print("\n".join(difference), end="")
    return int(old != new)


if __name__ == "__main__":
    sys.exit(main())
