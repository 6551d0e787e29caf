"""The plug-in: vLLM's logits processor that leaves one token a row, the one that Descant chooses."""

from __future__ import annotations

from collections import OrderedDict
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality
from vllm.v1.sample.logits_processor import LogitsProcessor as V1LogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as V2LogitsProcessor

from descant.config.generation_config import GenerationConfig
from descant.decoding.processors.base import as_id_list
from descant.engine.request import Request
from descant.engine.vllm.batch_sampler import BatchSampler
from descant.engine.vllm.plugin import is_registered
from descant.engine.vllm.request_config import (
    PLUGIN_KEY,
    check_params,
    check_v2_params,
    read_params,
    uses_text,
)
from descant.engine.vllm.request_failures import REQUEST_ID_KEY, report_failure
from descant.errors import InputError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcRequestState


_MAX_ABSENT: Final = 4096  # requests that have left the batch, and may come back
_MAX_VOCAB: Final = 2**31 - 1


class _BatchEntry:
    """A request of the batch that the plug-in samples."""

    def __init__(
        self, request_id: int, params: SamplingParams, prompt: list[int] | None, output: list[int]
    ) -> None:
        self.request_id = request_id
        self.params, self.prompt, self.output = params, prompt, output


class DescantLogitsProcessor(V1LogitsProcessor, V2LogitsProcessor):
    """Applies the `descant` fields of `SamplingParams.extra_args`: a GenerationConfig, as a dict or as JSON.

    It implements both interfaces of vLLM: that of the V1 model runner, which reports the changes of a
    persistent batch, and that of the V2 runner, which reports slots.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        device_or_states: torch.device | LogitsProcRequestState,
        is_pin_memory: bool = False,  # noqa: ARG002 - of the V1 interface
    ) -> None:
        if vllm_config.speculative_config is not None:
            raise ValueError("descant must run without speculative decoding: unset `speculative_config`")
        model = vllm_config.model_config
        states = None if isinstance(device_or_states, torch.device) else device_or_states
        device = device_or_states if isinstance(device_or_states, torch.device) else device_or_states.device
        self._states = states
        self._model_config = model
        self._sampler = BatchSampler(model.get_vocab_size(), device)
        self._entries: dict[int, _BatchEntry] = {}  # by index in the batch (V1) or slot (V2)
        # Requests that have left the batch. Whether they are preempted or have ended is not told.
        self._absent: OrderedDict[int, _BatchEntry] = OrderedDict()  # by request
        self._waiting: dict[int, SamplingParams] = {}  # V2: by slot, until their tokens are on the device
        self._num_unseeded = 0
        fields = model.try_get_generation_config() or {}
        self._model_ends = frozenset(as_id_list(fields.get("eos_token_id")))

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise a ValueError for fields that cannot be applied."""
        if PLUGIN_KEY in (sampling_params.extra_args or {}) and not is_registered():
            # Without it they would be ignored under speculative decoding.
            raise ValueError("vLLM's plug-in `descant` must be loaded, it is not in VLLM_PLUGINS: add it")
        check_params(sampling_params, BatchSampler(_MAX_VOCAB))

    def is_argmax_invariant(self) -> bool:
        """It changes what greedy search takes."""
        return False

    # -------------------------------------------------------------------- V1
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the persistent batch."""
        if batch_update is None:
            return
        # First all that leave: a request may be removed and added again in one update.
        for index in batch_update.removed:
            self._leave(index)
        for index, *_ in batch_update.added:
            self._leave(index)
        for index, params, prompt, output in batch_update.added:
            entry = self._returning(params, prompt, output) or self._new_entry(params, prompt, output)
            if entry is not None:
                self._entries[index] = entry
        for source, target, direction in batch_update.moved:
            moved, replaced = self._entries.pop(source, None), self._entries.pop(target, None)
            if moved is not None:
                self._entries[target] = moved
            if replaced is None:
                continue
            if direction == MoveDirectionality.SWAP:
                self._entries[source] = replaced
            else:
                self._set_aside(replaced)

    def _leave(self, index: int) -> None:
        entry = self._entries.pop(index, None)
        if entry is not None:
            self._set_aside(entry)

    def _set_aside(self, entry: _BatchEntry) -> None:
        """Store a request that may come back, if its tokens alone would not restore it."""
        is_new = not self._sampler.new_tokens(entry.request_id) or (self._states is None and not entry.output)
        if is_new or not self._sampler.is_stateful(entry.request_id) or self._has_ended(entry):
            self._sampler.remove(entry.request_id)
            return
        self._absent[entry.request_id] = entry
        if len(self._absent) > _MAX_ABSENT:
            oldest, _ = self._absent.popitem(last=False)
            self._sampler.remove(oldest)

    def _returning(
        self, params: SamplingParams, prompt: list[int] | None, output: list[int]
    ) -> _BatchEntry | None:
        """The request of these tokens that has left the batch, if there is one."""
        if not output:
            return None
        for entry in self._absent.values():
            if self._is_entry_of(entry, params, prompt, output):
                del self._absent[entry.request_id]
                entry.output = output
                return entry
        return None

    def _is_entry_of(
        self, entry: _BatchEntry, params: SamplingParams, prompt: list[int] | None, output: list[int]
    ) -> bool:
        """Whether a request has these parameters and tokens.

        With asynchronous scheduling V1 has -1 in the places of its new tokens, and it comes back with another
        list. vLLM may have discarded the last token.
        """
        if entry.output is output:
            return True
        if entry.prompt != prompt or entry.params != params:
            return False
        tokens = self._sampler.new_tokens(entry.request_id)
        return len(tokens) - len(output) in (0, 1) and tokens[: len(output)] == output

    def _has_ended(self, entry: _BatchEntry) -> bool:
        """Whether a request has all its tokens; asynchronous scheduling may run it for one step more."""
        params, tokens = entry.params, self._sampler.new_tokens(entry.request_id)
        if self._states is None:
            tokens = tokens[: len(entry.output)]  # V1 discards what was chosen after a part of a prompt
        if params.max_tokens is not None and len(tokens) >= params.max_tokens:
            return True
        # The set has the model's end tokens even if they end nothing.
        ends = set(params.stop_token_ids or ()) if params.ignore_eos else params.all_stop_token_ids
        return not ends.isdisjoint(tokens[-2:])

    def _new_entry(
        self, params: SamplingParams, prompt: list[int] | None, output: list[int]
    ) -> _BatchEntry | None:
        if PLUGIN_KEY not in (params.extra_args or {}):
            return None
        try:
            request_id = self._add(params, prompt, output)
        except Exception as error:  # what the front end could not check; it must not end vLLM's core
            ends = sorted(params.stop_token_ids or params.all_stop_token_ids) or None
            plain = GenerationConfig(stop_token_ids=ends)
            request_id = self._sampler.add(Request([0], plain), output)
            self._sampler.fail(request_id, error)
            report_failure(_request_name(params), self._sampler.errors[request_id])
        return _BatchEntry(request_id, params, prompt, output)

    def _add(self, params: SamplingParams, prompt: list[int] | None, output: list[int]) -> int:
        """Add a request to the sampler; its id."""
        found = read_params(params, self._model_ends)
        assert found is not None
        if prompt is None:
            raise InputError("prompt", "must be token ids, not embeddings, with Descant's fields", None)
        config = found.config
        if self._states is not None:
            check_v2_params(params)
        if config.do_sample and config.seed is None:
            # All ranks add requests in the same order, so that they draw the same noise.
            self._num_unseeded += 1
            config = config.replace(seed=(self._model_config.seed or 0) % 2**30 * 2**32 + self._num_unseeded)
        request = Request(prompt, config, tokenizer=self._tokenizer if uses_text(config) else None)
        return self._sampler.add(request, output, found.slot)

    @cached_property
    def _tokenizer(self) -> Any:
        return cached_tokenizer_from_config(self._model_config)

    def apply(self, logits: Tensor, ctx: LogitsContext | None = None) -> Tensor:
        """Leave one token in the rows [N, V] of its requests."""
        if ctx is not None:
            return self._apply_slots(logits, ctx)
        if not self._entries:
            return logits
        index = sorted(self._entries)
        entries = [self._entries[one] for one in index]
        counts = [len(entry.output) for entry in entries]
        request_ids = [self._follow(entry, count) for entry, count in zip(entries, counts, strict=True)]
        return self._choose(logits, index, request_ids, counts)

    def _choose(self, logits: Tensor, index: list[int], request_ids: list[int], counts: list[int]) -> Tensor:
        rows = None if len(index) == len(logits) else torch.tensor(index, device=logits.device)
        own = logits if rows is None else logits.index_select(0, rows)
        failed_before = set(self._sampler.errors)
        tokens = self._sampler.choose(request_ids, counts, own)
        if len(self._sampler.errors) > len(failed_before):
            self._report_failures(
                [request_id for request_id in request_ids if request_id not in failed_before]
            )
        own.fill_(float("-inf")).scatter_(1, tokens[:, None], 0.0)
        return own if rows is None else logits.index_copy_(0, rows, own)

    def _follow(self, entry: _BatchEntry, count: int) -> int:
        """The id of a request that has `count` new tokens.

        vLLM may take back several tokens, after keys and values could not be loaded: then it begins anew.
        """
        excess = self._sampler.num_new(entry.request_id) - count
        if excess not in (0, 1) and entry.request_id not in self._sampler.errors:
            tokens = self._sampler.new_tokens(entry.request_id)
            self._sampler.remove(entry.request_id)
            again = self._new_entry(entry.params, entry.prompt, tokens[:count])
            assert again is not None
            entry.request_id = again.request_id
        return entry.request_id

    def _report_failures(self, request_ids: list[int]) -> None:
        """Report why requests end early: vLLM has no way to fail a request from here."""
        entries = {entry.request_id: entry for entry in self._entries.values()}
        for request_id in request_ids:
            error = self._sampler.errors.get(request_id)
            # With asynchronous scheduling a request runs a step after its end, where a grammar has no token.
            if error is not None and not self._has_ended(entries[request_id]):
                report_failure(_request_name(entries[request_id].params), error)

    # -------------------------------------------------------------------- V2
    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Take a request into a slot; its tokens are read at its first step."""
        self._leave(req_idx)
        self._waiting.pop(req_idx, None)
        if PLUGIN_KEY not in (sampling_params.extra_args or {}):
            return False
        self._waiting[req_idx] = sampling_params
        return True

    def _apply_slots(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        assert self._states is not None
        slots = ctx.idx_mapping_np.tolist()
        if len(slots) != len(logits):
            raise ValueError(f"descant must get one row a request, got {len(logits)} rows of {len(slots)}")
        index, request_ids, counts = [], [], []
        for row, (slot, length) in enumerate(zip(slots, ctx.seq_lens_upper_bound_np.tolist(), strict=True)):
            if slot not in self._entries and slot not in self._waiting:
                continue
            prompt_length = int(self._states.prompt_len.np[slot])
            if length < int(self._states.prefill_len.np[slot]):
                continue  # a part of what is read first: nothing is chosen
            if slot in self._waiting:
                tokens = self._states.all_token_ids.gpu[slot, :length].tolist()
                self._join(slot, tokens[:prompt_length], tokens[prompt_length:], slots)
            index.append(row)
            counts.append(length - prompt_length)
            request_ids.append(self._follow(self._entries[slot], counts[-1]))
        return self._choose(logits, index, request_ids, counts) if index else logits

    def _join(self, slot: int, prompt: list[int], output: list[int], batch: list[int]) -> None:
        """Begin or continue the request that waits in a slot; `batch` has all slots of the step."""
        params = self._waiting.pop(slot)
        # A preempted request may get another slot before its old one is reused.
        for other, old in self._entries.items():
            if output and other not in batch and self._is_entry_of(old, params, prompt, output):
                self._leave(other)
                self._waiting[other] = params  # should that be another request after all, it begins anew
                break
        entry = self._returning(params, prompt, output) or self._new_entry(params, prompt, output)
        assert entry is not None
        self._entries[slot] = entry


def _request_name(params: SamplingParams) -> str | None:
    """The name of a request of `descant.VLLM`, which reports its failure."""
    name = (params.extra_args or {}).get(REQUEST_ID_KEY)
    return name if isinstance(name, str) else None
