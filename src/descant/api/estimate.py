"""estimate(): the size of a call's KV cache, before it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from descant.api.call import merge_configs
from descant.config.generation_config import GenerationConfig
from descant.core.context import PromptInfo
from descant.engine.memory_check import CacheCost, cache_costs, workload_of
from descant.engine.planning.cache_factory import CacheRequest, cache_name, missing_requirement
from descant.engine.planning.drafter_factory import DraftInputs, drafter_spec
from descant.engine.planning.planner import DecodingPlan, as_model, choose_cache, make_plan
from descant.errors import InputError, MissingExtra, UnsupportedModel, format_bytes
from descant.kv_cache.stores.paged import PagedStore
from descant.kv_cache.stores.recurrent_state import RecurrentStateCache
from descant.models.kv_shape import kv_shape_of


@dataclass(frozen=True)
class Estimate:
    """The bytes of every cache type that a model supports for a call; None where unknown.

    `bytes` is for the cache type that the config names or that would be selected. `peak_bytes` is the largest
    size between two forwards: some types store a whole prompt before they evict. `offloaded_bytes` is the
    part that is not on the model's device.
    """

    cache_name: str
    rows: int  # rows that run at the same time
    positions: int  # positions of each row at the end
    total_bytes: Mapping[str, int | None]
    peak_bytes: Mapping[str, int | None]
    bytes_per_token: Mapping[str, float | None]  # at the end, per row and position
    offloaded_bytes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def bytes(self) -> int | None:
        """The size of the selected cache at the end of the run."""
        return self.total_bytes[self.cache_name]

    def __str__(self) -> str:
        lines: list[tuple[str, ...]] = [("cache", "at the end", "at the most", "a token")]
        for name, total in self.total_bytes.items():
            sizes = (total, self.peak_bytes[name], self.bytes_per_token[name])
            cells = ("unknown" if size is None else format_bytes(size) for size in sizes)
            lines.append((f"{name} *" if name == self.cache_name else name, *cells))
        width = max(len(line[0]) for line in lines)
        table = "\n".join(
            f"{name:<{width}}" + "".join(f"{cell:>13}" for cell in cells) for name, *cells in lines
        )
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
    """The size of the cache at the end of `generate(model, ...)` with this config, for every cache type.

    The call has `batch` prompts of `prompt_length` tokens each, all of which reach their length limit. For an
    encoder-decoder model `prompt_length` is the number of encoder positions. Rows that share a prompt are
    counted as shared if the cache type shares it. The size of keys and values is measured by a forward of one
    token. The cache of a draft model is not counted.
    """
    sizes: dict[str, Any] = {"prompt_length": prompt_length, "batch": batch}
    for name, count in sizes.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise InputError(name, "must be an integer >= 1", count)
    target = as_model(model)
    if target.traits.needs_own_cache or target.network is None:
        raise UnsupportedModel("`estimate` takes one model of transformers: estimate each model by itself")
    merged = merge_configs(target.model, config, fields)[0]
    traits = target.traits
    plan = make_plan(merged, traits, drafter_spec(merged, target, DraftInputs()))
    length = 1 if traits.is_encoder_decoder else prompt_length
    limit = plan.prompt_params(PromptInfo(length), traits).max_length
    workload = workload_of([plan], [length], [limit])._replace(num_prompts=batch)
    workload = workload._replace(encoder_length=prompt_length if traits.is_encoder_decoder else 0)
    costs = cache_costs(target, merged, workload, kv_shape_of(target.model))
    num_positions = workload.num_rows * workload.final_length
    offloaded = {name: cost.offloaded_bytes for name, cost in costs.items() if cost is not None}
    return Estimate(
        _selected_cache_name(target, plan, limit, batch * plan.shared_positions(length)),
        workload.num_rows * workload.num_candidates,
        workload.final_length,
        _map_costs(costs, lambda cost: cost.final_bytes),
        _map_costs(costs, lambda cost: cost.peak_bytes),
        _map_costs(costs, lambda cost: cost.final_bytes / num_positions),
        MappingProxyType({name: size for name, size in offloaded.items() if size}),
    )


def _map_costs(
    costs: Mapping[str, CacheCost | None], value_of: Callable[[CacheCost], float]
) -> Mapping[str, Any]:
    return MappingProxyType({name: None if cost is None else value_of(cost) for name, cost in costs.items()})


def _selected_cache_name(target: Any, plan: DecodingPlan, limit: int, shared: int) -> str:
    """The name of the cache type that the call would use; raises if there is none."""
    name = cache_name(plan.config)
    try:
        cache = choose_cache(target, [plan.config], limit, shared)
    except MissingExtra:
        assert name is not None
        return name
    if name is not None and missing_requirement(name, CacheRequest(target, plan.config, limit)) is None:
        return name
    if isinstance(cache, RecurrentStateCache):
        return "mamba"
    return "paged" if isinstance(cache, PagedStore) else "dynamic"
