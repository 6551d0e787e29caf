"""`TransformersModel`: a transformers model behind the Model interface, for rows of any lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from descant.core.interfaces import (
    KVCache,
    KVSpan,
    ModelTraits,
    PromptChunk,
    RowCache,
    StateCache,
    VisibleSlots,
)
from descant.core.records import ForwardOutput, Proposal
from descant.core.rows import Rows, index_rows, last_index
from descant.errors import InputError
from descant.kv_cache.kernels.packed_attention import PackingUnsupported
from descant.kv_cache.row_views import row_subset
from descant.kv_cache.stores.dense import DenseStore, StaticStore
from descant.kv_cache.stores.recurrent_state import RecurrentStateCache
from descant.models.distributed import current_barrier, input_device, is_multi_device, rank_group_of
from descant.models.fast.compiled_layers import CompiledLayers
from descant.models.fast.compiled_step import CompiledSteps, compiled_steps_of
from descant.models.fast.packed_forward import PackedBatch, PackedForwards
from descant.models.forward.batches import ForwardBatch, ForwardBatcher
from descant.models.forward.encoder import Encoder, SelfAttentionView
from descant.models.forward.inputs import (
    InputPreparer,
    RecurrentStateHandler,
    RequestInputsMap,
    attention_mask,
    fed_tokens,
    full_tokens,
    logit_positions,
    model_position_ids,
    needs_no_mask,
    padded_embeds,
    row_logits,
)
from descant.models.forward.traits import traits_of
from descant.models.wrapping.peft_adapters import ADAPTER_NAME_KEY, PeftAdapters
from descant.models.wrapping.wrapped_model import eager_call

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# The most positions that a row with drafts feeds again in the forward that verifies them.
_MAX_FED_AGAIN = 16

_STATE_NAMES = (
    "hidden_states",
    "attentions",
    "decoder_hidden_states",
    "decoder_attentions",
    "cross_attentions",
)


def collect_states(output: Any, proposal: Proposal, batch: ForwardBatch) -> Mapping[str, Any]:
    """The states of a model's output, with the rows and lengths they belong to."""
    states: dict[str, Any] = {name: output[name] for name in _STATE_NAMES if output.get(name) is not None}
    index = torch.arange(batch.num_rows) if batch.rows is None else batch.rows
    fed = batch.fed_length if batch.width > 1 else torch.ones_like(batch.cached_length)
    num_drafts = torch.as_tensor(proposal.draft_counts(batch.rows)).expand(len(index))
    return states | {
        "rows": index,
        "fed_length": fed,
        "num_drafts": num_drafts,
        "cached_length": batch.cached_length,
    }


def head_logits(model: Any, hidden: Tensor, adapters: PeftAdapters) -> Tensor:
    """Logits of hidden states [..., D] -> [..., V]."""
    head: Any = model.get_output_embeddings()
    if adapters.in_use and adapters.has_layer(head):
        must = "must be None for a method that reads logits of inner layers, since the head has adapters"
        raise InputError(ADAPTER_NAME_KEY, must, type(head).__name__, "use model.set_adapter")
    weight = next(head.parameters())
    vectors = hidden.to(weight.device, weight.dtype).flatten(0, -2)
    count = len(vectors)
    if weight.device.type == "cpu" and 3 < count < 16:
        # On a CPU 16 vectors take two thirds of the time of 7.
        vectors = torch.nn.functional.pad(vectors, (0, 0, 0, 16 - count))
    logits: Tensor = head(vectors)[:count]
    return logits.view(*hidden.shape[:-1], -1)


def new_cache(traits: ModelTraits) -> RowCache:
    """An empty cache of the type that models with these traits work on by default."""
    return RecurrentStateCache(traits.cache_argument) if traits.cache_type == "recurrent" else DenseStore()


class TransformersModel:
    """Any generative model of transformers 5.

    Rows of different length share a packed forward, where model and cache allow it. Else rows are
    right-padded: new prompts and rows of equal length need no mask, rows of different length with a past get
    a mask and position ids. Models that take none, prepare their own inputs or are recurrent run in groups
    of equal length.
    """

    def __init__(
        self, model: PreTrainedModel, states: Sequence[str] = (), traits: ModelTraits | None = None
    ) -> None:
        self.model = self.network = model
        self._callee: Callable[[], Any] | None = None  # what a forward calls; None: the model
        self.traits: ModelTraits = traits_of(model) if traits is None else traits
        # Looked up once: transformers searches all modules.
        self.device = input_device(model)
        self.rank_group = rank_group_of(model)
        self._is_multi_device = is_multi_device(model)
        self._barrier = current_barrier()
        self._output_states = tuple(states)  # further outputs: "hidden_states", "attentions"
        self._batcher = ForwardBatcher(self.traits)
        is_spread = self._is_multi_device or self.rank_group is not None or self._barrier is not None
        self._packed = PackedForwards(model, self.traits, is_spread)
        self._request_inputs = RequestInputsMap()
        self._adapters = PeftAdapters(model)
        self._input_preparer = InputPreparer(model, self.traits, self._request_inputs)
        self._state_handler = (
            RecurrentStateHandler(model, self.traits) if self.traits.cache_type == "recurrent" else None
        )
        self.encoder = (
            Encoder(model, self.traits, states, self.device, self._adapters)
            if self.traits.is_encoder_decoder
            else None
        )
        self._prompt_embeds: dict[int, Tensor] = {}
        # One layer of each type, to query the cache for the visible slots of that type.
        layer_types, windows = self.traits.layer_types, self.traits.sliding_windows
        self._layer_of_type = {name: layer_types.index(name) for name in dict.fromkeys(layer_types)}
        self._is_sliding = tuple(windows.get(name) is not None for name in layer_types) or (False,)
        self._compiled_steps: CompiledSteps | None = None  # created for the first cache with a compile config
        self._skip_logits = False  # whether the current forward computes no logits
        self.forwards = 0
        self.positions_fed = 0

    def new_cache(self) -> RowCache:
        """An empty cache of the type that it works on by default."""
        return new_cache(self.traits)

    def set_output_states(self, states: Sequence[str]) -> None:
        """Return these states from the next forward on: "hidden_states", "attentions"."""
        self._output_states = tuple(states)

    @torch.no_grad()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states of any layer [..., D] -> [..., V] in float32."""
        return self._to_float_logits(head_logits(self.model, hidden, self._adapters))

    @torch.no_grad()
    def add_requests(self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]]) -> None:
        """Store the inputs of new requests besides tokens, and run the encoder on them in batches."""
        if not inputs and self.encoder is None:
            return
        if ADAPTER_NAME_KEY in inputs:
            self._adapters.add_requests(requests, inputs[ADAPTER_NAME_KEY])
            inputs = {name: values for name, values in inputs.items() if name != ADAPTER_NAME_KEY}
        if self.encoder is not None:
            self.encoder.add_requests(requests, inputs)
            return
        for request, embeds in zip(requests, inputs.get("inputs_embeds", ()), strict=False):
            if embeds is not None:
                self._prompt_embeds[request] = embeds.to(self.device)
        rest = {name: values for name, values in inputs.items() if name != "inputs_embeds"}
        self._request_inputs.add_requests(requests, rest, self.device)

    def remove_requests(self, requests: Sequence[int]) -> None:
        """Drop the inputs of finished requests."""
        if self.encoder is not None:
            self.encoder.remove_requests(requests)
        if self._request_inputs:
            self._request_inputs.remove_requests(requests)
        if self._adapters.in_use:
            self._adapters.remove_requests(requests)
        for request in requests:
            self._prompt_embeds.pop(request, None)

    def check_adapter(self, name: str) -> None:
        """Raise unless a request can name this PEFT adapter."""
        self._adapters.check(name)

    @property
    def unpacked_reason(self) -> str | None:
        """Why its rows are not packed; None: they are, where their cache takes packed writes."""
        return self._packed.off_reason

    def use_compiled_layers(self, compiled: CompiledLayers | None) -> None:
        """Run packed forwards on these layers, in place of those that the model is known to have."""
        self._packed.compiled_layers = compiled

    def can_pack(self, cache: RowCache) -> bool:
        """Whether rows of different length in this cache share a forward without padding."""
        is_plain = not (self._prompt_embeds or self._request_inputs or self._adapters.in_use)
        return is_plain and self._packed.can_pack_cache(cache)

    def forward(
        self,
        rows: Rows,
        proposal: Proposal,
        cache: RowCache,
        with_logits: bool = True,
        chunks: Sequence[PromptChunk] = (),
    ) -> ForwardOutput:
        """Feed each row's pending tokens and drafts; returns logits of the last pending token and each draft.

        Without `with_logits` only states are computed and logits are empty [R, K + 1, 0], if the model can.
        `chunks` of prompts are fed beside the rows if these are packed; a chunk that was fed says so.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.forward(rows, proposal, cache, with_logits, chunks)
        self._skip_logits = (
            not with_logits and self.traits.supports_logits_to_keep and not self.traits.prepares_own_inputs
        )
        if self.traits.cache_type == "recurrent":
            rows = self._continue_states(rows, proposal, cast(StateCache, cache))
        batches = self._split(rows, proposal, cache, chunks)
        if batches[0].is_packed:
            try:
                return self._run_packed(rows, proposal, cache, batches, chunks)
            except PackingUnsupported as error:  # raised in its first layer, before anything counts
                self._packed.off_reason = str(error)
                batches = self._split(rows, proposal, cache)
        run = self._run_custom_inputs if self.traits.prepares_own_inputs else self._run_batch
        if len(batches) == 1:
            logits, states = run(rows, proposal, cache, batches[0])
            if proposal.drafts is not None and logits.shape[1] == 1:
                # No row has a draft, even where others of its table have some.
                logits = logits.expand(-1, proposal.width + 1, -1)
            return ForwardOutput(logits, [states] if self._output_states else ())
        all_logits: Tensor | None = None
        all_states = []
        for batch in batches:
            assert batch.rows is not None
            logits, states = run(rows, proposal, cache, batch)
            all_states.append(states)
            if all_logits is None:
                all_logits = logits.new_empty(len(rows), proposal.width + 1, logits.shape[-1])
            all_logits[batch.rows.to(logits.device)] = logits.to(all_logits.device)
        assert all_logits is not None
        return ForwardOutput(all_logits, all_states if self._output_states else ())

    def _continue_states(self, rows: Rows, proposal: Proposal, cache: StateCache) -> Rows:
        """The rows with as many cached positions as their states have read; some are fed before.

        After a cut, a row feeds the positions that its state has not read together with its pending tokens.
        Rows with drafts feed many of them before, so that they are not fed again if a draft is rejected.
        """
        read = cache.state_lengths(rows.cached_length)
        rows = rows.replace(cached_length=read)
        pending = rows.pending
        if bool((pending == 1).all()):
            return rows
        assert self._state_handler is not None
        if self._state_handler.reads_prompts_apart:  # new tokens are read again as steps have read them
            prompt = rows.offset + rows.prompt_length
            rows = self._feed_up_to(
                rows, prompt, (read == 0) & (prompt < rows.position) & (prompt > 0), cache
            )
            pending = rows.pending
        if proposal.drafts is not None and not self.traits.continues_by_one:
            is_first = (pending > _MAX_FED_AGAIN) & (torch.as_tensor(proposal.draft_counts()) > 0)
            rows = self._feed_up_to(rows, rows.position - 1, is_first, cache)
        while self.traits.continues_by_one:
            is_first = (rows.cached_length > 0) & (rows.pending > 1)
            if not bool(is_first.any()):
                break
            rows = self._feed_up_to(rows, rows.cached_length + 1, is_first, cache)
        return rows

    def _feed_up_to(self, rows: Rows, positions: Tensor, is_fed: Tensor, cache: StateCache) -> Rows:
        """Feed some rows up to these positions [R] (host), without logits; the rows after that."""
        index = is_fed.nonzero().squeeze(1)
        if not len(index):
            return rows
        part = rows.take(index)
        part = part.replace(length=positions[index] - part.offset)
        skip_logits = self._skip_logits
        self.forward(part, Proposal(), row_subset(cache, index), with_logits=False)
        self._skip_logits = skip_logits
        return rows.replace(cached_length=torch.where(is_fed, positions, rows.cached_length))

    def _split(
        self, rows: Rows, proposal: Proposal, cache: RowCache, chunks: Sequence[PromptChunk] = ()
    ) -> list[ForwardBatch]:
        """The forwards of a step."""

        def can_pack() -> bool:
            return self.can_pack(cache) and self._packed.can_pack(rows, proposal, cache, self._output_states)

        is_recurrent = self.traits.cache_type == "recurrent"
        state_batches = cast(StateCache, cache).row_batches(rows.cached_length) if is_recurrent else None
        must_pack = bool(chunks) or self._packed.compiled_layers is not None
        batch_keys = self._batch_keys(rows)
        return self._batcher.split(rows, proposal, batch_keys, state_batches, can_pack, must_pack)

    def _batch_keys(self, rows: Rows) -> dict[int, object]:
        """Keys of the requests whose inputs restrict which rows can share a forward."""
        if not self._request_inputs:
            return {}
        fresh = set(rows.request[rows.cached_length == 0].tolist())
        return self._request_inputs.batch_keys(fresh, self.traits.prepares_own_inputs)

    # -------------------------------------------------------------------- one forward
    def _run_batch(
        self, rows: Rows, proposal: Proposal, cache: RowCache, batch: ForwardBatch
    ) -> tuple[Tensor, Mapping[str, Any]]:
        """One forward: logits [N, K + 1, V] in float32, and the requested states."""
        request = rows.request if batch.rows is None else rows.request[batch.rows]
        store = cast(KVCache, cache)
        inputs = self._token_inputs(rows, proposal, batch)
        is_decode = batch.width == 1 and proposal.drafts is None
        if is_decode and getattr(cache, "compile_config", None) is not None:
            compiled_logits = self._run_compiled(inputs, cache, batch)
            if compiled_logits is not None:
                return self._to_float_logits(compiled_logits), {}
        span = self._kv_span(rows, proposal, batch)
        inputs |= self._position_inputs(store, span, batch)
        if batch.start != 0 and self._request_inputs:  # not earlier: a first forward may be repeated
            self._request_inputs.drop_media(request.tolist())
        if self._request_inputs or self.traits.has_own_position_ids:
            inputs |= self._side_inputs(inputs, batch, request.tolist())
        view = SelfAttentionView(store, span, self._is_sliding)
        if self.encoder is not None:
            entries = self.encoder.entry_index(request)
            inputs |= self.encoder.decoder_inputs(entries)
            inputs["past_key_values"] = self.encoder.decoder_cache(entries, view, span)
        else:
            inputs["past_key_values"] = view
        logit_index = None
        if self._skip_logits:
            inputs["logits_to_keep"] = torch.zeros(0, dtype=torch.long, device=self.device)
        elif batch.width > 1:
            logits_to_keep, logit_index = logit_positions(
                proposal, batch, self.traits, self.device, self._is_multi_device
            )
            if logits_to_keep is not None:
                inputs["logits_to_keep"] = logits_to_keep
        output = self._call_model({**inputs, "use_cache": True}, batch, request)
        logits = output.logits
        if self._skip_logits:
            logits = logits.new_zeros(len(logits), proposal.width + 1, 0)
        if logit_index is not None:
            logits = row_logits(logits, logit_index)
        states = collect_states(output, proposal, batch) if self._output_states else {}
        return self._to_float_logits(logits), states

    def _run_packed(
        self,
        rows: Rows,
        proposal: Proposal,
        cache: RowCache,
        batches: Sequence[ForwardBatch],
        chunks: Sequence[PromptChunk],
    ) -> ForwardOutput:
        """Packed forwards of all rows: logits [R, K + 1, V] in float32, and the requested states."""
        packed = [PackedBatch(rows, proposal, cache, batch) for batch in batches]
        logits, outputs = self._packed.run(packed, not self._skip_logits, bool(self._output_states), chunks)
        for output in outputs:
            self._count_forward(output.num_tokens)
        pairs = zip(outputs, batches, strict=True) if self._output_states else ()
        states = [collect_states(output._asdict(), proposal, batch) for output, batch in pairs]
        return ForwardOutput(self._to_float_logits(logits), states)

    def _run_custom_inputs(
        self, rows: Rows, proposal: Proposal, cache: RowCache, batch: ForwardBatch
    ) -> tuple[Tensor, Mapping[str, Any]]:
        """One forward of a model that prepares its own inputs."""
        traits, start, width = self.traits, batch.start, batch.width
        row_index = torch.arange(len(rows)) if batch.rows is None else batch.rows
        index = None if batch.rows is None else batch.rows.to(self.device, non_blocking=True)
        request = rows.request[row_index]
        requests = request.tolist()
        tokens = full_tokens(rows, proposal, batch)
        more: dict[str, Any] = (
            {"logits_to_keep": proposal.width + 1} if traits.supports_logits_to_keep else {}
        )
        if self.encoder is not None:
            more |= self.encoder.decoder_inputs(self.encoder.entry_index(request))
        if start == 0 and (embeds := self._input_embeds(requests, tokens, batch)) is not None:
            more["inputs_embeds"] = embeds
        past: Any = None
        state: Any = None
        if traits.cache_type == "kv":
            span = KVSpan(index, start or 0, width, batch.read_length, batch.rows)
            past = self._forward_view(cache, span, request)
        elif self._state_handler is not None:
            state = (
                self._state_handler.new_state()
                if start == 0
                else self._state_handler.writable_state(cast(StateCache, cache).read_state(row_index))
            )
            past = self._state_handler.model_cache(state)
        inputs = self._input_preparer.prepare_inputs(tokens, batch, past, requests, more)
        if traits.cache_type == "kv" and inputs.get(traits.cache_argument) is None:
            # The model drops its cache to read whole rows again (longrope: frequencies depend on length).
            whole_span = KVSpan(index, 0, batch.read_length, batch.read_length, batch.rows)
            inputs[traits.cache_argument] = self._forward_view(cache, whole_span, request)
        if self._state_handler is None:
            output = self._call_model(inputs, batch, request)
        else:
            continues = start != 0 and width > 1
            with self._state_handler.install_state(state, continues) as module_values:
                output = self._call_model(inputs, batch, request)
            new_state = self._state_handler.next_state(output, state, module_values)
            lengths = batch.cached_length + (batch.fed_length if width > 1 else 1)
            cast(StateCache, cache).write_state(row_index, new_state, lengths)
        self._input_preparer.update_model_kwargs(output, batch, requests)
        logits = output.logits[:, -(proposal.width + 1) :]
        if proposal.drafts is not None:  # rows are aligned at the right, so fewer drafts start further right
            size = logits.shape[1]
            num_drafts = torch.as_tensor(proposal.draft_counts(batch.rows))
            first = size - 1 - num_drafts[:, None]
            logits = row_logits(logits, (first + torch.arange(proposal.width + 1)).clamp(0, size - 1))
        states = collect_states(output, proposal, batch) if self._output_states else {}
        return self._to_float_logits(logits), states

    def _to_float_logits(self, logits: Tensor) -> Tensor:
        """Logits in float32 on the input device; a model on several may return them on another."""
        if logits.dtype is torch.float32 and logits.device == self.device:
            return logits
        return logits.to(self.device, torch.float32)

    def _forward_view(self, cache: RowCache, span: KVSpan, request: Tensor) -> Any:
        """The cache as the model takes it in one forward."""
        view = SelfAttentionView(cast(KVCache, cache), span)
        if self.encoder is None:
            return view
        return self.encoder.decoder_cache(self.encoder.entry_index(request), view, span)

    def _run_compiled(self, inputs: dict[str, Any], cache: RowCache, batch: ForwardBatch) -> Tensor | None:
        """The logits [N, 1, V] of a compiled decode step; None if it cannot run compiled."""
        has_side_inputs = self._request_inputs or "inputs_embeds" in inputs or self._adapters.in_use
        is_plain = not (self._output_states or self._skip_logits or has_side_inputs)
        if not is_plain or batch.rows is not None or batch.start == 0:
            return None
        if self._compiled_steps is None:
            self._compiled_steps = compiled_steps_of(self.model, self.traits)
        logits = self._compiled_steps.run(
            self.model, inputs["input_ids"], batch.cached_length, cast(StaticStore, cache)
        )
        if logits is not None:
            self._count_forward(batch.width * batch.num_rows)
        return logits

    def _call_model(self, inputs: dict[str, Any], batch: ForwardBatch, request: Tensor) -> Any:
        """Call the model, with the requested states and the adapters of the requests [N] of its rows."""
        for name in self._output_states:
            inputs[f"output_{name}"] = True
        inputs["return_dict"] = True
        self._count_forward(batch.width * batch.num_rows)
        call = eager_call(self.model if self._callee is None else self._callee())
        with self._adapters.applied(request.tolist()) if self._adapters.in_use else nullcontext():
            return call(**inputs)

    def _count_forward(self, positions: int) -> None:
        """Count a forward, and announce it to the other processes if they are synchronized."""
        if self._barrier is not None:
            self._barrier.announce_forward()
        self.forwards += 1
        self.positions_fed += positions

    # -------------------------------------------------------------------- inputs
    def _kv_span(self, rows: Rows, proposal: Proposal, batch: ForwardBatch) -> KVSpan:
        """Where the forward writes keys and values."""
        index = None if batch.rows is None else batch.rows.to(self.device, non_blocking=True)
        committed = batch.fed_length - proposal.draft_counts(batch.rows) if batch.width > 1 else None
        if batch.start is not None:
            return KVSpan(
                index, batch.start, batch.width, batch.read_length, batch.rows, num_committed=committed
            )
        if index is None and batch.width == 1 and not rows.offset.numpy().any():
            starts = last_index(rows)  # without a copy of the cached lengths
        else:
            starts = batch.cached_length.to(self.device, non_blocking=True)
        return KVSpan(
            index, starts, batch.width, batch.read_length, batch.rows, batch.cached_length, committed
        )

    def _token_inputs(self, rows: Rows, proposal: Proposal, batch: ForwardBatch) -> dict[str, Any]:
        """The fed tokens [N, T] or embeddings [N, T, D]."""
        name = "decoder_input_ids" if self.traits.is_encoder_decoder else "input_ids"
        if self._prompt_embeds:
            request = rows.request if batch.rows is None else rows.request[batch.rows]
            tokens = rows.tokens if batch.rows is None else index_rows(rows.tokens, batch.rows)
            if (
                batch.start == 0
                and (embeds := self._input_embeds(request.tolist(), tokens, batch)) is not None
            ):
                return {"inputs_embeds": embeds}
        elif batch.start is not None and proposal.drafts is None:
            tokens = rows.tokens if batch.rows is None else index_rows(rows.tokens, batch.rows)
            return {name: tokens[:, batch.start : batch.start + batch.width]}
        return {name: fed_tokens(rows, proposal, batch)}

    def _input_embeds(self, requests: Sequence[int], tokens: Tensor, batch: ForwardBatch) -> Tensor | None:
        """Prompt embeddings, right-padded, with embedded tokens for other rows; None if no row has any."""
        prompts = [self._prompt_embeds.get(request) for request in requests]
        return padded_embeds(prompts, tokens, batch, self.model.get_input_embeddings())

    def _position_inputs(self, cache: KVCache, span: KVSpan, batch: ForwardBatch) -> dict[str, Any]:
        """Position ids and attention mask, as far as the forward needs them."""
        device, width = self.device, batch.width
        shown: dict[str, VisibleSlots] = {}
        for name, layer in self._layer_of_type.items():
            slots = cache.visible_slots(layer, span)
            if slots is not None:  # None means that slot `p` holds position `p`
                shown[name] = slots
        if batch.start is not None and (not shown or needs_no_mask(shown, width)):
            if self.traits.needs_position_ids and self.traits.supports_position_ids:
                return {"position_ids": torch.arange(batch.start, batch.read_length, device=device)[None]}
            return {}
        positions = span.start[:, None] if isinstance(span.start, Tensor) else span.start
        if width > 1 or not isinstance(positions, Tensor):
            positions = positions + torch.arange(width, device=device)
        positions = positions.expand(batch.num_rows, width)
        if width > 1:  # padding must not exceed a learned table of positions
            last = batch.cached_length + batch.fed_length - 1
            positions = positions.clamp(max=last.to(device)[:, None])
        # transformers searches the parameters for the dtype in every call.
        dtype = self.model.dtype if self.traits.attn_implementation == "eager" else None
        mask = attention_mask(positions, span.read_length, shown, self.traits.sliding_windows, dtype)
        return {"position_ids": positions, "attention_mask": mask}

    def _side_inputs(
        self, inputs: dict[str, Any], batch: ForwardBatch, requests: Sequence[int]
    ) -> dict[str, Any]:
        """Media, per-token inputs, and positions of models that compute their own."""
        extras = [self._request_inputs.get(request) for request in requests]
        side: dict[str, Any] = {}
        if batch.start == 0:
            if extras[0] is not None:
                side |= extras[0].media
                for name in extras[0].per_token:
                    values = [extra.per_token[name] for extra in extras if extra]
                    side[name] = torch.nn.utils.rnn.pad_sequence(values, batch_first=True)
            if self.traits.has_own_position_ids:
                fed = inputs.get("input_ids", inputs.get("inputs_embeds"))
                assert isinstance(fed, Tensor)
                mask = torch.arange(batch.width) < batch.fed_length[:, None]
                kwargs = {**side, "attention_mask": mask.long().to(self.device)}
                side["position_ids"] = model_position_ids(
                    self.model, self._request_inputs, fed, requests, kwargs
                )
            return side
        if extras[0] is not None and "token_type_ids" in extras[0].per_token:
            # New tokens have the type of the last prompt token.
            types = torch.stack([extra.per_token["token_type_ids"][-1] for extra in extras if extra])
            side["token_type_ids"] = types[:, None].expand(len(types), batch.width)
        deltas = self._request_inputs.position_deltas(requests)
        if deltas is not None:
            positions = inputs.get("position_ids")
            if positions is None:
                cached = batch.cached_length.to(self.device, non_blocking=True)[:, None]
                positions = cached + torch.arange(batch.width, device=self.device)
            side["position_ids"] = positions + deltas[..., None].to(self.device)
        return side
