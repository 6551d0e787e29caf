"""What a run's cache will take, before it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from descant.api.call import merge_configs
from descant.config.generation_config import GenerationConfig
from descant.core.context import PromptInfo
from descant.engine.cache_factory import CacheRequest, cache_name, missing_requirement
from descant.engine.cache_sizing import CacheCost, cache_costs
from descant.engine.drafter_factory import DraftInputs
from descant.engine.memory_check import format_bytes, workload_of
from descant.engine.planner import DecodingPlan, as_model, choose_cache, drafter_spec, make_plan
from descant.errors import InputError, MissingExtra, UnsupportedModel
from descant.kv_cache.paged import PagedStore
from descant.kv_cache.recurrent_state import RecurrentStateCache
from descant.models.kv_shape import kv_shape_of

__all__ = ["Estimate", "estimate"]


@dataclass(frozen=True)
class Estimate:
    """What every cache that a model can use would take for a run, in bytes; None where nobody can know.

    `bytes` is for the cache that the config names, or that would be chosen. `peak` counts what a cache holds
    between two forwards at the most, where that is more than at the end: some read a whole prompt before they
    forget. `elsewhere` is how much of it does not lie with the model.
    """

    cache_name: str
    rows: int  # that run at the same time
    positions: int  # of each row at the end
    total_bytes: Mapping[str, int | None]
    peak_bytes: Mapping[str, int | None]
    bytes_per_token: Mapping[str, float | None]  # at the end, by row and position
    offloaded_bytes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def bytes(self) -> int | None:
        """What the cache takes at the end of the run."""
        return self.total_bytes[self.cache_name]

    def __str__(self) -> str:
        lines: list[tuple[str, ...]] = [("cache", "at the end", "at the most", "a token")]
        for name, total in self.total_bytes.items():
            known = (total, self.peak_bytes[name], self.bytes_per_token[name])
            shown = ("unknown" if one is None else format_bytes(one) for one in known)
            lines.append((f"{name} *" if name == self.cache_name else name, *shown))
        width = max(len(line[0]) for line in lines)
        table = "\n".join(f"{name:<{width}}" + "".join(f"{one:>13}" for one in rest) for name, *rest in lines)
        rows = "1 row" if self.rows == 1 else f"{self.rows} rows"
        return f"{rows} of {self.positions} positions\n{table}"


def estimate(
    model: Any,
    config: GenerationConfig | Any = None,
    *,
    prompt_length: int,
    batch: int = 1,
    **fields: Any,
) -> Estimate:
    """What the cache takes at the end of `generate(model, ...)` with this config, and what others would.

    Of `batch` prompts of `prompt_length` tokens each, which grow to their limit; for a model with an encoder
    that is how many positions the encoder gives. Rows that share a prompt share it here where the cache
    really does. What keys and values take is measured once by a forward of one token. The cache of a draft
    model is not counted: ask for that model.
    """
    sizes: dict[str, Any] = {"prompt_length": prompt_length, "batch": batch}
    for name, number in sizes.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise InputError(name, "must be an integer >= 1", number)
    target = as_model(model)
    if hasattr(target, "new_cache") or getattr(target, "model", None) is None:
        raise UnsupportedModel("an estimate is for one model of transformers: ask for each by itself")
    merge = merge_configs(target.model, config, fields)[0]
    facts = target.traits
    known = make_plan(merge, facts, drafter_spec(merge, target, DraftInputs()))
    length = 1 if facts.is_encoder_decoder else prompt_length
    limit = known.row_params(PromptInfo(length), facts)["max_length"]
    run = workload_of([known], [length], [limit])._replace(num_prompts=batch)
    run = run._replace(encoder_length=prompt_length if facts.is_encoder_decoder else 0)
    found = cache_costs(target, merge, run, kv_shape_of(target.model))
    kind = _selected_cache_name(target, known, limit, length)
    return Estimate(
        kind,
        run.num_rows * run.num_candidates,
        run.final_length,
        _map_costs(found, lambda one: one.final_bytes),
        _map_costs(found, lambda one: one.peak_bytes),
        _map_costs(found, lambda one: one.final_bytes / (run.num_rows * run.final_length)),
        MappingProxyType(
            {
                name: one.offloaded_bytes
                for name, one in found.items()
                if one is not None and one.offloaded_bytes
            }
        ),
    )


def _map_costs(found: Mapping[str, CacheCost | None], of: Any) -> Mapping[str, Any]:
    return MappingProxyType({name: None if one is None else of(one) for name, one in found.items()})


def _selected_cache_name(target: Any, known: DecodingPlan, limit: int, length: int) -> str:
    """The name of the cache that a table of such a request would have, or an error that says why none."""
    named = cache_name(known.config)
    try:
        cache = choose_cache(target, [known.config], limit, length if known.forks else 0)
    except MissingExtra:
        assert named is not None
        return named
    if named is not None and missing_requirement(named, CacheRequest(target, known.config, limit)) is None:
        return named
    if isinstance(cache, RecurrentStateCache):
        return "mamba"
    return "paged" if isinstance(cache, PagedStore) else "dynamic"
