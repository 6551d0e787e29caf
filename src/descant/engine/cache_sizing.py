"""What a run's cache will take: the cache itself, fed one byte for a key and one for a value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from descant.config.generation_config import GenerationConfig
from descant.core.interfaces import Span
from descant.engine.cache_factory import KINDS, Wanted, kind_of, lacks, quantization
from descant.kv_cache.dense import DenseCache
from descant.kv_cache.quantizers import BACKENDS, Coding, Quantizer
from descant.kv_cache.sink import SinkStore
from descant.kv_cache.slot_blocks import Slots
from descant.models.kv_shape import Geometry, Shape

__all__ = ["Cost", "Run", "cost", "costs", "wanted"]

# Tokens are written in strides, so many or a little more: every cache is as large after a stride as after its
# tokens one by one, but for where it last grew. Up to some length no stride may pass for a prompt of its own.
_STRIDES: Final = 256
_SHORT: Final = 48
_LONG: Final = 2**16
# With more positions than this nobody rehearses: the bytes are counted.
_IMMENSE: Final = 2**26


class Run(NamedTuple):
    """The rows of a run: prompts that fork once they are read, and grow to the end."""

    prompts: int
    rows: int  # of each prompt
    prompt: int  # positions
    stop: int  # positions of a row at the end
    tries: int = 1  # candidates of each row, tried in rows of their own and dropped again
    twins: bool = False  # every row has one after another prompt
    read: int = 0  # positions that an encoder gives for each prompt

    @property
    def lines(self) -> int:
        """How many rows there are in all."""
        return self.prompts * self.rows * (1 + self.twins)

    @property
    def positions(self) -> int:
        """How many positions its rows have in all, at the end."""
        return self.lines * self.stop


class Cost(NamedTuple):
    """What a cache takes."""

    bytes: int  # at the end of the run
    peak: int  # at the most, between two forwards
    away: int = 0  # of the first, where the model is not


def costs(model: Any, config: GenerationConfig, run: Run, geometry: Geometry) -> dict[str, Cost | None]:
    """What every cache that a model can use would take; None where that cannot be known."""
    found: dict[str, Cost | None] = {}
    for name in KINDS:
        want = wanted(model, config, name, run)
        if lacks(name, want) is None:
            found[name] = cost(name, want, run, geometry)
    return found


def wanted(model: Any, config: GenerationConfig, name: str, run: Run) -> Wanted:
    """What a cache of that name is made for, by the config's settings where they are for that one."""
    if kind_of(config) != name:
        config = config.replace(cache_implementation=name, cache_config=None, compile_config=None)
    return Wanted(model, config, run.stop + 1)


def cost(name: str, want: Wanted, run: Run, geometry: Geometry) -> Cost | None:
    """What a cache of that name takes for a run; None where that cannot be known."""
    facts = want.facts
    cross = run.prompts * run.read * geometry.cross
    if facts.memory == "own":
        windows = [window for window in facts.windows.values() if window is not None]
        if geometry.state is None or (geometry.grows and windows and run.stop > min(windows)):
            return None
        total = cross + run.lines * run.tries * (geometry.state + run.stop * geometry.grows)
        return Cost(total, total)
    if run.positions * run.tries > _IMMENSE:
        return _counted(name, run, geometry)
    end = most = largest = 0
    for (layer, shape), count in _alike(geometry, facts.kinds).items():
        small, high = _REHEARSED.get(name, _rehearsed)(KINDS[name].build, want, _Layer(layer, shape), run)
        end, most = end + count * shape.heads * small, most + count * shape.heads * high
        largest = max(largest, shape.heads * small)
    if name in _AWAY and torch.device(_rests(want)) != want.model.device:
        # The model's device has the layer at hand and the next.
        return Cost(end + cross, min(2 * largest, end) + cross, end)
    return Cost(end + cross, most + cross)


def _counted(name: str, run: Run, geometry: Geometry) -> Cost | None:
    """What keys and values take without any slack, where a cache keeps all of them as they are."""
    if KINDS[name].forgets or name == "quantized":
        return None
    positions = run.positions * run.tries
    if name == "paged":
        positions -= (run.lines - run.prompts * (1 + run.twins)) * run.prompt
    total = positions * geometry.token + run.prompts * run.read * geometry.cross
    return Cost(total, total)


def _alike(geometry: Geometry, kinds: tuple[str, ...]) -> Mapping[tuple[int, Shape], int]:
    """How many layers are like each other: the first of them, and what it keeps of a token."""
    first: dict[tuple[Shape, str], int] = {}
    count: dict[tuple[int, Shape], int] = {}
    for layer, shape in geometry.layers.items():
        like = first.setdefault((shape, kinds[layer] if layer < len(kinds) else ""), layer)
        count[like, shape] = count.get((like, shape), 0) + 1
    return count


# ------------------------------------------------------------------------ one head of one layer
class _Layer(NamedTuple):
    """A layer, and what it keeps of a token."""

    number: int
    shape: Shape

    @property
    def slot(self) -> int:
        """Bytes of a key and a value of one head."""
        return self.shape.nbytes // self.shape.heads


Build = Callable[[Wanted], Any]


def _strides(run: Run) -> Iterator[tuple[int, int]]:
    """From where to where rows grow after the prompt, stride by stride."""
    left = run.stop - run.prompt
    stride = max(1, -(-left // _STRIDES))
    stride = stride if left > _LONG else min(stride, _SHORT)
    for start in range(run.prompt, run.stop, stride):
        yield start, min(start + stride, run.stop)


def _rehearsed(build: Build, want: Wanted, layer: _Layer, run: Run) -> tuple[int, int]:
    """The bytes of one head at the end of a run, and at the most: the cache goes through all of it."""
    return _played(build(want), layer, run)


def _played(store: Any, layer: _Layer, run: Run) -> tuple[int, int]:
    most = 0

    def write(start: int, stop: int) -> None:
        nonlocal most
        part = torch.zeros(len(store), 1, stop - start, 1, dtype=torch.uint8)
        span = Span(None, start, stop - start, stop)
        store.reach(layer.number, span)
        store.update(layer.number, part, part, span)
        most = max(most, store.nbytes)

    def commit(parents: Tensor | None, length: int) -> None:
        store.commit(parents, torch.full((len(store) if parents is None else len(parents),), length))

    prompts = run.prompts * (1 + run.twins)
    store.extend(prompts)
    write(0, run.prompt)
    commit(torch.arange(prompts).repeat_interleave(run.rows), run.prompt)
    for start, stop in _strides(run):
        if run.tries > 1:
            commit(torch.arange(run.lines).repeat_interleave(run.tries), start)
        write(start, stop)
        commit(torch.arange(0, len(store), run.tries) if run.tries > 1 else None, stop)
    return store.nbytes // 2 * layer.slot, most // 2 * layer.slot


def _sunk(build: Build, want: Wanted, layer: _Layer, run: Run) -> tuple[int, int]:
    """Sinks, which take as much whether they are turned or not."""
    length, sinks, _, *rest = build(want)._made
    return _played(SinkStore(length, sinks, None, *rest), layer, run)


def _evicted(build: Build, want: Wanted, layer: _Layer, run: Run) -> tuple[int, int]:
    """What is kept by votes: how much that is does not depend on them."""
    store = build(want)
    slots = Slots(store._remembers)
    byte = torch.zeros(1, 1, 1, 1, dtype=torch.uint8)
    prompts = run.prompts * (1 + run.twins)

    def kept(held: int, grown: int, reading: bool) -> int:
        found: Tensor = store._kept(torch.tensor([held]), torch.tensor([grown]), torch.tensor([reading]))
        return int(found)

    held = kept(run.prompt, run.prompt, True)
    slots.room(0, (byte, byte), run.lines, held)
    for start, stop in _strides(run):
        slots.room(0, (byte, byte), run.lines * run.tries, held + 1)
        held = kept(held + stop - start, 1, False)
        slots.room(0, (byte, byte), run.lines * run.tries, held)
        slots.fit(run.lines, held)
    votes = torch.float32.itemsize if store._remembers else 0
    end = slots.nbytes // (2 + votes) * (layer.slot + votes)
    # A prompt lies beside the slots until it is known what stays of it, and so do its queries.
    return end, max(end, prompts * run.prompt * (layer.slot + layer.slot // 2))


def _quantized(_: Build, want: Wanted, layer: _Layer, run: Run) -> tuple[int, int]:
    """Chunks of codes, those of prompts shared, and the latest positions of every row as they came."""
    config = quantization(want)
    # No package is needed to know how large codes are.
    blank = type("Blank", (BACKENDS[config.backend.lower()],), {"_package": lambda _: None, "groups": _blank})
    made = blank(config.nbits, config.axis_key, config.axis_value, config.q_group_size, config.compute_dtype)
    prompts, every = run.prompts * (1 + run.twins), max(config.residual_length, 1)
    full, rest = divmod(run.stop - run.prompt, every)
    chunks = prompts * _chunk(made, layer.shape, run.prompt)
    if full:
        chunks += run.lines * full * _chunk(made, layer.shape, every)
    latest = DenseCache()
    latest.extend(run.lines * run.tries)
    for stop in range(1, (every if full else rest) + 1):
        part = torch.zeros(len(latest), 1, 1, 1, dtype=torch.uint8)
        latest.update(0, part, part, Span(None, stop - 1, 1, stop))
    end = chunks + latest.nbytes // 2 * layer.slot
    return end, max(end, prompts * run.prompt * layer.slot)


def _chunk(made: Quantizer, shape: Shape, length: int) -> int:
    """The bytes of so many positions as codes."""
    total = 0
    for size, across in ((shape.keys, made.keys.across), (shape.values, made.values.across)):
        content = torch.empty(1, length, size, dtype=shape.dtype, device="meta")
        total += Coding(made, across).encode(content).nbytes
    return total


def _blank(_: Any, content: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [G, g], scales [G, 1] and offsets [G, 1] of groups of numbers [G, g], all of them nothing."""
    scale = content[:, :1]
    return content.to(torch.uint8), scale, scale


def _rests(want: Wanted) -> Any:
    """Where blocks rest that are not kept with the model."""
    return dict(want.config.cache_config or {}).get("offload_device", "cpu")


_REHEARSED: Final[Mapping[str, Callable[[Build, Wanted, _Layer, Run], tuple[int, int]]]] = {
    "sink": _sunk, "snapkv": _evicted, "h2o": _evicted, "quantized": _quantized,
}  # fmt: skip
_AWAY: Final = frozenset({"offloaded", "offloaded_static"})
