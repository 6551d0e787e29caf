"""The cost of a step for a device: kernels, reads for which the host waits, copies of host memory, time."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from descant.cli.doctor.checks import CheckedModel
from descant.cli.doctor.report import DeviceRow, one_line
from descant.config.generation_config import GenerationConfig
from descant.engine.session import Request, Session

_STEADY_STEPS: Final = 6
_WARM_STEPS: Final = 3
_SAMPLING: Final = {"do_sample": True, "seed": 1}

# Operations that only describe memory in another way.
_VIEWS: Final = frozenset({
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "expand", "lift_fresh", "permute",
    "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold",
    "unsqueeze", "view",
})  # fmt: skip
# Operations whose result the host must know: a value, or a size.
_READS: Final = frozenset({
    "_local_scalar_dense", "_unique2", "bincount", "equal", "is_nonzero", "masked_select", "nonzero",
    "repeat_interleave", "unique_consecutive", "unique_dim",
})  # fmt: skip
_INDEXED: Final = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})


class OperationCounter(TorchDispatchMode):
    """Counts what the operations of a model's steps cost a device: "launch", "read" and "copy".

    Those inside a call of the model are "network launch" and so on. A kernel that torch splits counts once.
    An "early read" is one of a value after which no forward was launched: then the device has nothing to do.
    """

    def __init__(self, device: torch.device, model: torch.nn.Module | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self._type = device.type
        self._depth = 0  # of calls of the network
        self._num_forwards = 0  # calls of the network
        self._made_after: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # forwards before each tensor
        if model is not None:
            self._hooks = (
                model.register_forward_pre_hook(lambda *_: self._enter(1)),
                model.register_forward_hook(lambda *_: self._enter(-1), always_call=True),
            )

    def close(self) -> None:
        """Remove the hooks of the model."""
        for hook in self._hooks:
            hook.remove()

    def of(self, call: Callable[[], Any]) -> Counter[str]:
        """The operations of a call."""
        self.counts = Counter()
        with self:
            call()
        return self.counts

    def _enter(self, change: int) -> None:
        self._depth += change
        self._num_forwards += change > 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for kind in self._kinds(func, args, kwargs):
            self.counts[f"network {kind}" if self._depth else kind] += 1
            if kind == "read" and not self._depth and self._forwards_before(args[:1]) == self._num_forwards:
                self.counts["early read"] += 1
        result = func(*args, **kwargs)
        is_view = func._schema.name.partition("::")[2] in _VIEWS
        made_after = self._forwards_before(args[:1]) if is_view else self._num_forwards
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._made_after[tensor] = made_after
        return result

    def _forwards_before(self, args: Any) -> int:
        """The forwards that were launched before a tensor was made."""
        first = next((one for one in tree_leaves(args) if isinstance(one, Tensor)), None)
        return self._num_forwards if first is None else self._made_after.get(first, 0)

    def _kinds(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Iterator[str]:
        """The costs of an operation, by its name and by where its operands are."""
        name = func._schema.name.partition("::")[2]
        on_device = [
            one.device.type == self._type for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)
        ]
        target = kwargs.get("device")
        is_to_host = target is not None and torch.device(target).type != self._type
        if not any(on_device):
            if target is not None and not is_to_host:  # a tensor of one value is filled by a kernel
                yield "copy" if on_device else "launch"
        elif name == "copy_" and not all(on_device):
            yield "copy" if on_device[0] else "read"
        elif name in _READS or is_to_host or self._has_mask_index(name, args):
            yield "read"
        elif name not in _VIEWS:
            if name in _INDEXED:  # indices on the host are sent along
                indices = [index for index in tree_leaves(args[1]) if isinstance(index, Tensor)]
                yield from ["copy" for index in indices if index.device.type != self._type]
            yield "launch"

    def _has_mask_index(self, name: str, args: Any) -> bool:
        """Whether a tensor on the device is indexed by a mask, whose size the host must know."""
        return name in _INDEXED and any(
            isinstance(index, Tensor)
            and index.device.type == self._type
            and index.dtype in (torch.bool, torch.uint8)
            for index in tree_leaves(args[1])
        )


@dataclass(frozen=True)
class DeviceCase:
    """A method with the number of its prompts."""

    config: Mapping[str, Any]
    prompts: int = 16

    def with_prompts(self, prompts: int) -> DeviceCase:
        """The case with another number of prompts."""
        return replace(self, prompts=prompts)


METHODS: Final[Mapping[str, DeviceCase]] = {
    "greedy": DeviceCase({}),
    "sampling": DeviceCase({**_SAMPLING, "temperature": 0.8, "top_k": 20, "top_p": 0.9}),
    "min-p": DeviceCase({**_SAMPLING, "min_p": 0.05, "temperature": 0.8}),
    "penalties": DeviceCase(
        {**_SAMPLING, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "top_p": 0.9}
    ),
    "4 beams": DeviceCase({"num_beams": 4}, prompts=1),
    "4 x 4 beams": DeviceCase({"num_beams": 4}, prompts=4),
    "diverse beams": DeviceCase({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}, prompts=1),
    "constrained beams": DeviceCase({"num_beams": 4, "force_words_ids": [[50, 51]]}, prompts=1),
    "prompt lookup": DeviceCase({"prompt_lookup_num_tokens": 4}, prompts=1),
    "suffix lookup": DeviceCase({"suffix_lookup_num_tokens": 4}, prompts=1),
    "early exit": DeviceCase({"assistant_early_exit": 1}, prompts=1),
    "contrastive": DeviceCase({"penalty_alpha": 0.6, "top_k": 4}, prompts=1),
    "DoLa": DeviceCase({"dola_layers": "low"}, prompts=1),
    "guidance": DeviceCase({"guidance_scale": 1.5}, prompts=1),
    "log probabilities": DeviceCase({"logprobs": 2}),
}


@dataclass
class StepCost:
    """The operations of a step outside the network: kernels, reads, copies.

    `early_reads` are the reads before the next forward is launched, for which the device waits.
    """

    launches: float = 0
    reads: float = 0
    copies: float = 0
    early_reads: float = 0

    @classmethod
    def mean(cls, steps: Sequence[Counter[str]]) -> StepCost:
        """The mean of some steps."""
        total: Counter[str] = sum(steps, Counter())
        kinds = ("launch", "read", "copy", "early read")
        return cls(*(round(total[kind] / len(steps), 2) for kind in kinds))


@dataclass
class DeviceCost:
    """The costs of a case by phase."""

    steady: StepCost = field(default_factory=StepCost)
    network: float = 0  # launches of the network in a steady step
    prefill: StepCost = field(default_factory=StepCost)
    joining: StepCost = field(default_factory=StepCost)  # the step in which a request joins
    ending: StepCost = field(default_factory=StepCost)  # the step in which one ends


def count_operations(model: Any, case: DeviceCase) -> DeviceCost:
    """The cost of a case on a model, counted on its device."""
    counter = OperationCounter(model.device, model)
    try:
        session, cost = Session(model), DeviceCost()
        last = _WARM_STEPS + _STEADY_STEPS + 4
        requests = [_request(model, case, 6 + place % 5) for place in range(case.prompts)]
        has_ending = "num_beams" not in case.config
        if has_ending:  # the first request ends while the others run
            requests[0] = _request(model, case, 6, max_new_tokens=last)
        cost.prefill = StepCost.mean([counter.of(lambda: (session.admit(*requests), session.step()))])
        for _ in range(_WARM_STEPS):
            session.step()
        steady = [counter.of(session.step) for _ in range(_STEADY_STEPS)]
        cost.steady = StepCost.mean(steady)
        cost.network = sum(step["network launch"] for step in steady) / len(steady)
        late = _request(model, case, 7)
        cost.joining = StepCost.mean([counter.of(lambda: (session.admit(late), session.step()))])
        while has_ending and len(session) > len(requests):
            cost.ending = StepCost.mean([counter.of(session.step)])
    finally:
        counter.close()
    return cost


def _request(model: Any, case: DeviceCase, length: int, **fields: Any) -> Request:
    # Without an end token, so that no row ends before its length, unless a processor depends on one.
    needs_end = {"min_length", "min_new_tokens", "exponential_decay_length_penalty"} & case.config.keys()
    end = model.config.get_text_config(decoder=True).vocab_size - 1 if needs_end else None
    prompt = [3 + (7 * length + 3 * place) % 50 for place in range(length)]
    config = {"max_new_tokens": 300, "eos_token_id": end, **case.config, **fields}
    return Request(prompt, GenerationConfig(**config))


def run_device_costs(checked: CheckedModel, progress: Callable[[str], None]) -> Iterator[DeviceRow]:
    """The cost of a steady step for each method; a CPU has operations and time, and nothing to wait for."""
    if checked.model.config.is_encoder_decoder:
        yield DeviceRow(
            checked.name, "all", detail="the prompts of the doctor are for models without an encoder"
        )
        return
    is_cpu = checked.model.device.type == "cpu"
    for name, case in METHODS.items():
        progress(f"device, {checked.name}: {name}")
        try:
            cost = count_operations(checked.model, case)
            seconds, waits, kernels = _measure_steps(checked.model, case)
        except Exception as error:  # out of memory, a missing kernel
            yield DeviceRow(checked.name, name, detail=one_line(f"{type(error).__name__}: {error}", 200))
            continue
        steady = cost.steady
        yield DeviceRow(
            checked.name,
            name,
            ms_per_step=1e3 * seconds,
            network=cost.network,
            launches=steady.launches,
            kernels=kernels,
            reads=None if is_cpu else steady.reads,
            copies=None if is_cpu else steady.copies,
            waits=waits,
        )


def _measure_steps(model: Any, case: DeviceCase) -> tuple[float, float | None, float | None]:
    """The seconds of a steady step, and what CUDA says of one: waits of the host, and kernels."""
    session, device = Session(model), model.device
    session.admit(*(_request(model, case, 6 + place % 5) for place in range(case.prompts)))
    for _ in range(1 + _WARM_STEPS):
        session.step()
    synchronize = (lambda: None) if device.type == "cpu" else getattr(torch, device.type).synchronize
    synchronize()
    start = time.perf_counter()
    for _ in range(_STEADY_STEPS):
        session.step()
    synchronize()
    seconds = (time.perf_counter() - start) / _STEADY_STEPS
    if device.type != "cuda":
        return seconds, None, None
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for _ in range(_STEADY_STEPS):
                session.step()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(_STEADY_STEPS):
            session.step()
        synchronize()
    on_device = [event.name for event in profile.events() or () if "CUDA" in str(event.device_type)]
    kernels = sum(not name.startswith(("Memcpy", "Memset")) for name in on_device)
    waits = sum("synchronizing" in str(each.message) for each in found)
    return seconds, waits / _STEADY_STEPS, kernels / _STEADY_STEPS
