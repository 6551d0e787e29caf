"""A transformers model that is fed frames: one code of each codebook at every position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from descant.core.interfaces import KVCache, KVSpan, RowCache
from descant.core.records import Proposal
from descant.core.rows import Rows, index_rows
from descant.models.codebooks.frames import CodebookFamily, FrameInputs, StepInputs
from descant.models.forward_batches import ForwardBatch
from descant.models.forward_view import SelfAttentionView
from descant.models.transformers_model import TransformersModel

__all__ = ["FrameNetwork"]

_NO_DRAFTS = Proposal()


class FrameNetwork(TransformersModel):
    """The network of a codebook family: a row is one sequence of frames, or its row without condition."""

    def __init__(self, family: CodebookFamily) -> None:
        states = ("hidden_states",) if family.reads_hidden else ()
        super().__init__(family.network, states, traits=family.network_traits())
        self._packed.off_reason = "frames are padded, not packed"
        self.last_hidden: Tensor | None = None  # [N, D] of the last forward, where the family reads it
        self._family = family
        self._codes: Tensor | None = None  # [N, T, C] of the current forward
        self._steps: bool | None = None  # whether the layers can run alone; None: not looked at yet
        self._prefixes: dict[int, Tensor] = {}  # by request: embeddings before the first frame
        self._prompts: dict[int, Mapping[str, Tensor]] = {}  # by request: prompts of another kind

    def add_sequences(self, sequences: Sequence[tuple[Sequence[int], FrameInputs]]) -> None:
        """Register the requests of new sequences: with condition, and without where there is guidance."""
        requests: list[int] = []
        inputs: list[dict[str, Any]] = []
        for numbers, frames in sequences:
            conditions = (frames.inputs, frames.uncond_inputs)
            prefixes = (frames.prefix, frames.uncond_prefix)
            for number, given, prefix in zip(numbers, conditions, prefixes, strict=False):
                requests.append(number)
                inputs.append(dict(given or {}))
                if prefix is not None:
                    self._prefixes[number] = prefix.to(self.device)
                if frames.prompt is not None:
                    self._prompts[number] = {
                        name: value.to(self.device) for name, value in frames.prompt.items()
                    }
        names = dict.fromkeys(name for one in inputs for name in one)
        if names:
            self.add_requests(requests, {name: [one.get(name) for one in inputs] for name in names})

    def remove_requests(self, requests: Sequence[int]) -> None:
        """Drop the inputs of finished requests."""
        super().remove_requests(requests)
        for request in requests:
            self._prefixes.pop(request, None)
            self._prompts.pop(request, None)

    def run(self, codes: Tensor, rows: Rows, cache: RowCache) -> Tensor:
        """Feed the pending codes [N, T, C] of each row; the logits [N, R * V] of its next frame."""
        self._codes = codes
        try:
            output = self.forward(rows, _NO_DRAFTS, cache)
            if self._family.reads_hidden:
                self.last_hidden = _last_hidden(output.states, len(rows))
            return output.logits[:, 0]
        finally:
            self._codes = None

    def _token_inputs(self, rows: Rows, proposal: Proposal, batch: ForwardBatch) -> dict[str, Any]:  # noqa: ARG002
        """The fed codes, or embeddings where something comes before the first frame."""
        assert self._codes is not None
        codes = self._codes if batch.rows is None else index_rows(self._codes, batch.rows)
        if batch.start == 0 and (self._prefixes or self._prompts):
            requests = (rows.request if batch.rows is None else rows.request[batch.rows]).tolist()
            if self._prompts:
                return self._family.prompt_inputs([self._prompts[request] for request in requests])
            return {"inputs_embeds": self._prefixed(requests, codes, batch)}
        return self._family.token_inputs(codes[:, : batch.width])

    def _prefixed(self, requests: Sequence[int], codes: Tensor, batch: ForwardBatch) -> Tensor:
        """The embeddings of prefixes and frames [N, T, D], right-padded."""
        lines = []
        for row, request in enumerate(requests):
            prefix = self._prefixes.get(request)
            size = int(batch.fed_length[row]) - (0 if prefix is None else len(prefix))
            embedded = self._family.embed(codes[row, :size])
            lines.append(embedded if prefix is None else torch.cat((prefix.to(embedded.dtype), embedded)))
        return torch.nn.utils.rnn.pad_sequence(lines, batch_first=True)

    def _can_step(self) -> bool:
        """Whether the layers can run without what is around them: nothing looks at a call of the network."""
        if self._steps is None:
            modules = self._family.skipped_modules
            has_hooks = any(
                module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_hf_hook")
                for module in modules
            )
            is_plain = not (self._is_multi_device or self._barrier or self._output_states)
            self._steps = bool(modules) and is_plain and not has_hooks
        return self._steps and not self._adapters.in_use

    @torch.no_grad()
    def run_step(self, codes: Tensor, requests: Tensor, cache: RowCache, position: int) -> Tensor | None:
        """The same for one frame [N, 1, C] at the same position of all rows; None: the network is called."""
        if not self._can_step():
            return None
        return self._run_layers(codes, requests, cache, KVSpan(None, position, 1, position + 1))[:, 0]

    def _run_layers(self, codes: Tensor, requests: Tensor, cache: RowCache, span: KVSpan) -> Tensor:
        """The logits [N, 1, R * V] after one frame of rows of equal length, by the layers alone."""
        assert isinstance(span.start, int)
        past: Any = SelfAttentionView(cast(KVCache, cache), span, self._is_sliding)
        states = mask = None
        if self.encoder is not None:
            entries = self.encoder.entry_index(requests)
            states, mask = self.encoder.states_and_mask(entries)
            past = self.encoder.decoder_cache(entries, past, span)
        self._count_forward(len(codes))
        return self._to_float_logits(self._family.step(StepInputs(codes, past, span.start, states, mask)))

    def _run_batch(
        self, rows: Rows, proposal: Proposal, cache: RowCache, batch: ForwardBatch
    ) -> tuple[Tensor, Mapping[str, Any]]:
        """One forward: logits [N, 1, R * V] in float32, and the requested states."""
        if batch.width == 1 and batch.start and self._can_step():
            assert self._codes is not None
            index, requests, codes = None, rows.request, self._codes
            if batch.rows is not None:
                index = batch.rows.to(self.device, non_blocking=True)
                requests, codes = requests[batch.rows], index_rows(codes, batch.rows)
            span = KVSpan(index, batch.start, 1, batch.start + 1, batch.rows)
            return self._run_layers(codes[:, :1], requests, cache, span), {}
        return super()._run_batch(rows, proposal, cache, batch)

    def _call_model(self, inputs: dict[str, Any], batch: ForwardBatch, request: Tensor) -> Any:
        """Call the network; its logits as [N, T, R * V]."""
        output = super()._call_model(inputs, batch, request)
        output.logits = self._family.frame_logits(output, batch.num_rows)
        return output


def _last_hidden(states: Sequence[Mapping[str, Any]], count: int) -> Tensor:
    """The hidden state of the last layer [N, D] at each row's last fed position."""
    last: Tensor | None = None
    for part in states:
        hidden: Tensor = part["hidden_states"][-1]
        index = (part["fed_length"] - 1).to(hidden.device)
        found = hidden[torch.arange(len(hidden), device=hidden.device), index]
        if last is None:
            last = found.new_zeros(count, found.shape[-1])
        last[part["rows"].to(last.device)] = found
    assert last is not None
    return last
