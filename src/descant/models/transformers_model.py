"""A transformers model behind the Model port: feeds a ragged table with as little padding as it can."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from descant.core.interfaces import KVCache, KVSpan, ModelTraits, RowCache, StateCache, VisibleSlots
from descant.core.records import ForwardOutput, Proposal
from descant.core.rows import Rows, index_rows
from descant.models.compiled_step import CompilableStore, CompiledSteps, compiled_steps_of
from descant.models.custom_inputs import InputPreparer, RecurrentStateHandler, model_position_ids
from descant.models.devices import input_device, is_multi_device
from descant.models.encoder import Encoder
from descant.models.forward_batches import ForwardBatch, ForwardBatcher
from descant.models.forward_view import SelfAttentionView
from descant.models.rank_group import rank_group_of
from descant.models.request_inputs import RequestInputsMap
from descant.models.synced_gpus import current_barrier
from descant.models.traits import traits_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["TransformersModel"]


_STATE_NAMES = (
    "hidden_states",
    "attentions",
    "decoder_hidden_states",
    "decoder_attentions",
    "cross_attentions",
)


class TransformersModel:
    """Any generative model of transformers 5.

    Rows are fed aligned at the left, what is missing at the right: a fresh batch of ragged prompts then
    needs no mask at all, for causal attention never looks right. Rows that stand level need none
    either. Only ragged rows that already hold something are shown a mask, or, by models that take no
    positions, fed in groups of equal length. A model that prepares its inputs by itself, or remembers
    more than keys and values, is asked what it wants, for rows of equal length.
    """

    def __init__(self, model: PreTrainedModel, states: Sequence[str] = ()) -> None:
        self.model = model
        self.traits: ModelTraits = traits_of(model)
        # Where it takes its inputs; asked once, for the model searches.
        self.device = input_device(model)
        self.rank_group = rank_group_of(model)
        self._is_multi_device = is_multi_device(model)
        self._barrier = current_barrier()
        self._output_states = tuple(states)  # what else to return: "hidden_states", "attentions"
        self._batcher = ForwardBatcher(self.traits)
        self._request_inputs = RequestInputsMap()
        self._input_preparer = InputPreparer(model, self.traits, self._request_inputs)
        self._state_handler = (
            RecurrentStateHandler(model, self.traits) if self.traits.cache_type == "recurrent" else None
        )
        self._encoder = (
            Encoder(model, self.traits, states, self.device) if self.traits.is_encoder_decoder else None
        )
        self._prompt_embeds: dict[int, Tensor] = {}
        # A layer of each kind, by which a cache is asked what it shows of the kind.
        self._layer_of_type = {
            kind: self.traits.layer_types.index(kind) for kind in dict.fromkeys(self.traits.layer_types)
        }
        sliding = tuple(self.traits.sliding_windows.get(kind) is not None for kind in self.traits.layer_types)
        self._is_sliding = sliding or (False,)
        self._compiled_steps: CompiledSteps | None = (
            None  # what is compiled of the model, once a cache wants it
        )
        self._skip_logits = False  # whether the forward at hand computes no logits
        self.forwards = 0
        self.positions_fed = 0

    def set_output_states(self, states: Sequence[str]) -> None:
        """Bring these states along from the next forward on: "hidden_states", "attentions"."""
        self._output_states = tuple(states)

    @torch.no_grad()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """The logits that hidden states of any layer [..., D] come to, in float32 [..., V]."""
        head: Any = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        weight = next(head.parameters())
        lines = hidden.to(weight.device, weight.dtype).flatten(0, -2)
        count = len(lines)
        if weight.device.type == "cpu" and 3 < count < 16:
            # A CPU multiplies sixteen lines in two thirds of the time that it takes for seven.
            lines = torch.nn.functional.pad(lines, (0, 0, 0, 16 - count))
        found = head(lines)[:count]
        return self._to_float_logits(found.view(*hidden.shape[:-1], -1))

    @property
    def encoder_output(self) -> Any:
        """The encoder's last output, with the states asked for."""
        return {} if self._encoder is None else self._encoder.last_output

    @torch.no_grad()
    def add_requests(self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]]) -> None:
        """Take the inputs of new requests that are no tokens, and run the encoder once for all of them."""
        if self._encoder is not None:
            self._encoder.add_requests(requests, inputs)
            return
        for request, line in zip(requests, inputs.get("inputs_embeds", ()), strict=False):
            if line is not None:
                self._prompt_embeds[request] = line.to(self.device)
        rest = {name: lines for name, lines in inputs.items() if name != "inputs_embeds"}
        self._request_inputs.add_requests(requests, rest, self.device)

    def remove_requests(self, requests: Sequence[int]) -> None:
        """Forget those requests."""
        if self._encoder is not None:
            self._encoder.remove_requests(requests)
        self._request_inputs.remove_requests(requests)
        for request in requests:
            self._prompt_embeds.pop(request, None)

    def forward(
        self, rows: Rows, proposal: Proposal, cache: RowCache, with_logits: bool = True
    ) -> ForwardOutput:
        """Feed each row's pending tokens and drafts; logits of the last pending token and of every draft.

        Without `heads` a model that can do without computes no logits, [R, K + 1, 0], only states.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.forward(rows, proposal, cache, with_logits)
        self._skip_logits = (
            not with_logits and self.traits.supports_logits_to_keep and not self.traits.prepares_own_inputs
        )
        held = cast(StateCache, cache).row_batches() if self.traits.cache_type == "recurrent" else None
        apart = self._batch_keys(rows) if len(self._request_inputs) else {}
        batches = self._batcher.split(rows, proposal, apart, held)
        run = self._run_custom_inputs if self.traits.prepares_own_inputs else self._run_batch
        if len(batches) == 1:
            logits, states = run(rows, proposal, cache, batches[0])
            return ForwardOutput(logits, [states] if self._output_states else ())
        joint: Tensor | None = None
        all_states = []
        for batch in batches:
            assert batch.rows is not None
            logits, states = run(rows, proposal, cache, batch)
            all_states.append(states)
            if joint is None:
                joint = logits.new_empty(len(rows), proposal.width + 1, logits.shape[-1])
            joint[batch.rows.to(logits.device)] = logits.to(joint.device)
        assert joint is not None
        return ForwardOutput(joint, all_states if self._output_states else ())

    def _batch_keys(self, rows: Rows) -> dict[int, object]:
        """The requests that cannot share a forward with just anybody, by what they give."""
        return self._request_inputs.batch_keys(
            set(rows.request[rows.cached_length == 0].tolist()), self.traits.prepares_own_inputs
        )

    # -------------------------------------------------------------------- one forward
    def _run_batch(
        self, rows: Rows, proposal: Proposal, cache: RowCache, batch: ForwardBatch
    ) -> tuple[Tensor, Mapping[str, Any]]:
        """One forward of the model: logits [N, K + 1, V] in float32, and the states asked for."""
        device, width = self.device, batch.width
        index = None if batch.rows is None else batch.rows.to(device, non_blocking=True)
        request = rows.request if batch.rows is None else rows.request[batch.rows]
        inputs = self._input_tokens(rows, proposal, batch)
        if width == 1 and proposal.drafts is None:
            stepped = self._run_compiled(inputs, cache, batch)
            if stepped is not None:
                return self._to_float_logits(stepped), {}
        sure = batch.fed_length - proposal.draft_counts(batch.rows) if width > 1 else None
        span = KVSpan(index, batch.start or 0, width, batch.read_length, batch.rows, num_committed=sure)
        if batch.start is None:
            span = span._replace(
                start=batch.cached_length.to(device, non_blocking=True), host_starts=batch.cached_length
            )
        reaches = self._visible_by_type(cast(KVCache, cache), span)
        if batch.start is not None and _needs_no_mask(reaches, width):
            if self.traits.needs_position_ids and self.traits.supports_position_ids:
                inputs["position_ids"] = torch.arange(batch.start, batch.read_length, device=device)[None]
        else:
            past = span.start
            first = past[:, None] if isinstance(past, Tensor) else past
            positions = (first + torch.arange(width, device=device)).expand(batch.num_rows, width)
            if width > 1:  # what only fills a shorter row up must not run off a table of positions
                positions = positions.clamp(
                    max=(batch.cached_length + batch.fed_length - 1).to(device)[:, None]
                )
            inputs["position_ids"] = positions
            inputs["attention_mask"] = self._attention_mask(positions, batch.read_length, reaches)
        if len(self._request_inputs) or self.traits.has_own_position_ids:
            inputs |= self._side_inputs(inputs, batch, request.tolist())
        view = SelfAttentionView(cast(KVCache, cache), span, self._is_sliding)
        if self._encoder is not None:
            read = self._encoder.entry_index(request)
            inputs |= self._encoder.decoder_inputs(read)
            inputs["past_key_values"] = self._encoder.decoder_cache(read, view, span)
        else:
            inputs["past_key_values"] = view
        places = None
        if self._skip_logits:
            inputs["logits_to_keep"] = torch.zeros(0, dtype=torch.long, device=device)
        elif width > 1:
            wanted, places = self._logit_positions(proposal, batch)
            if wanted is not None:
                inputs["logits_to_keep"] = wanted
        answer = self._call_model({**inputs, "use_cache": True}, batch)
        if batch.start == 0 and len(self._request_inputs):
            self._request_inputs.drop_media(request.tolist())
        logits = answer.logits
        if self._skip_logits:
            logits = logits.new_zeros(len(logits), proposal.width + 1, 0)
        if places is not None:
            line = torch.arange(len(logits), device=logits.device)[:, None]
            logits = logits[line, places.to(logits.device)]
        return self._to_float_logits(logits), self._collect_states(
            answer, rows, proposal, batch
        ) if self._output_states else {}

    def _run_custom_inputs(
        self, rows: Rows, proposal: Proposal, cache: RowCache, batch: ForwardBatch
    ) -> tuple[Tensor, Mapping[str, Any]]:
        """One forward of a model that says by itself what it is fed."""
        facts, start, width = self.traits, batch.start, batch.width
        line = torch.arange(len(rows)) if batch.rows is None else batch.rows
        index = None if batch.rows is None else batch.rows.to(self.device, non_blocking=True)
        request = rows.request[line]
        requests = request.tolist()
        more: dict[str, Any] = {"logits_to_keep": proposal.width + 1} if facts.supports_logits_to_keep else {}
        if self._encoder is not None:
            more |= self._encoder.decoder_inputs(self._encoder.entry_index(request))
        lines = [self._prompt_embeds.get(one) for one in requests] if self._prompt_embeds else []
        if start == 0 and any(one is not None for one in lines):
            more["inputs_embeds"] = self._input_embeds(lines, self._full_tokens(rows, proposal, batch), batch)
        past: Any = None
        state: Any = None
        span = KVSpan(index, start or 0, width, batch.read_length, batch.rows)
        if facts.cache_type == "kv":
            past = self._forward_view(cache, span, request)
        elif self._state_handler is not None:
            state = (
                self._state_handler.new_state() if start == 0 else cast(StateCache, cache).read_state(line)
            )
            past = self._state_handler.model_cache(state)
        inputs = self._input_preparer.prepare_inputs(
            self._full_tokens(rows, proposal, batch), batch, past, requests, more
        )
        if facts.cache_type == "kv" and inputs.get(facts.cache_argument) is None:
            # The model wants to read everything again, for it reads a longer text in another way.
            again = KVSpan(index, 0, batch.read_length, batch.read_length, batch.rows)
            inputs[facts.cache_argument] = self._forward_view(cache, again, request)
        if self._state_handler is None:
            answer = self._call_model(inputs, batch)
        else:
            with self._state_handler.install_state(state) as found:
                answer = self._call_model(inputs, batch)
            cast(StateCache, cache).write_state(line, self._state_handler.next_state(answer, state, found))
        self._input_preparer.update_model_kwargs(answer, requests)
        logits = answer.logits[:, -(proposal.width + 1) :]
        if proposal.drafts is not None:  # a row that tries fewer stands further right
            size = logits.shape[1]
            tried = torch.as_tensor(proposal.draft_counts(batch.rows))
            at = (size - 1 - tried[:, None] + torch.arange(proposal.width + 1)).clamp(0, size - 1)
            logits = logits[torch.arange(len(logits))[:, None].to(logits.device), at.to(logits.device)]
        return self._to_float_logits(logits), self._collect_states(
            answer, rows, proposal, batch
        ) if self._output_states else {}

    def _to_float_logits(self, logits: Tensor) -> Tensor:
        """The logits in float32 and where the rows are: a model spread over devices may answer elsewhere."""
        return logits.to(self.device, torch.float32)

    def _forward_view(self, cache: RowCache, span: KVSpan, request: Tensor) -> Any:
        """The cache as the model sees it."""
        view = SelfAttentionView(cast(KVCache, cache), span)
        return (
            view
            if self._encoder is None
            else self._encoder.decoder_cache(self._encoder.entry_index(request), view, span)
        )

    def _run_compiled(self, inputs: dict[str, Any], cache: RowCache, batch: ForwardBatch) -> Tensor | None:
        """The logits [N, 1, V] of one token for every row, where the cache wants that step compiled."""
        if getattr(cache, "compile_config", None) is None or batch.rows is not None or batch.start == 0:
            return None
        if self._output_states or self._skip_logits or len(self._request_inputs) or "inputs_embeds" in inputs:
            return None
        if self._compiled_steps is None:
            self._compiled_steps = compiled_steps_of(self.model, self.traits)
        logits = self._compiled_steps.run(
            self.model, inputs["input_ids"], batch.cached_length, cast(CompilableStore, cache)
        )
        if logits is not None:
            self._count_forward(batch)
        return logits

    def _call_model(self, inputs: dict[str, Any], batch: ForwardBatch) -> Any:
        """The model's answer, with the states asked for."""
        for name in self._output_states:
            inputs[f"output_{name}"] = True
        inputs["return_dict"] = True
        self._count_forward(batch)
        return self.model(**inputs)

    def _count_forward(self, batch: ForwardBatch) -> None:
        """Take note of a forward."""
        if self._barrier is not None:
            self._barrier.announce_forward()
        self.forwards += 1
        self.positions_fed += batch.width * batch.num_rows

    def _full_tokens(self, rows: Rows, proposal: Proposal, batch: ForwardBatch) -> Tensor:
        """All tokens of rows with their drafts [N, L], the last at the end; 0 where a position has none."""
        index, long = batch.rows, batch.read_length
        tokens = rows.tokens if index is None else index_rows(rows.tokens, index)
        if batch.start is not None and proposal.drafts is None and not rows.offset.any():
            return tokens[:, :long]
        offset = rows.offset if index is None else rows.offset[index]
        length = rows.length if index is None else rows.length[index]
        tried = torch.as_tensor(proposal.draft_counts(index))
        known = torch.cat((tokens, tokens.new_zeros(len(tokens), proposal.width)), 1)
        if proposal.drafts is not None:
            drafts = proposal.drafts if index is None else index_rows(proposal.drafts, index)
            at = length[:, None] + torch.arange(proposal.width)
            known = known.scatter(1, at.to(known.device), drafts)
        short = (long - (offset + length + tried)) + offset  # what comes before the first token
        place = torch.arange(long) - short[:, None]
        found = known.gather(1, place.clamp(min=0).to(known.device))
        return found.masked_fill((place < 0).to(known.device), 0)

    def _side_inputs(
        self, inputs: dict[str, Any], batch: ForwardBatch, requests: Sequence[int]
    ) -> dict[str, Any]:
        """What goes with the tokens of these rows: media, marks, and positions of the model's own count."""
        beside: dict[str, Any] = {}
        extra = self._request_inputs[requests[0]]
        if batch.start == 0:
            if extra is not None:
                beside |= extra.media
                for name in extra.per_token:
                    lines = [
                        one.per_token[name] for request in requests if (one := self._request_inputs[request])
                    ]
                    beside[name] = torch.nn.utils.rnn.pad_sequence(lines, batch_first=True)
            if self.traits.has_own_position_ids:
                fed = inputs.get("input_ids", inputs.get("inputs_embeds"))
                assert isinstance(fed, Tensor)
                there = torch.arange(batch.width) < batch.fed_length[:, None]
                asked = {**beside, "attention_mask": there.long().to(self.device)}
                beside["position_ids"] = model_position_ids(
                    self.model, self._request_inputs, fed, requests, asked
                )
            return beside
        if extra is not None and "token_type_ids" in extra.per_token:
            kinds = torch.stack(
                [one.per_token["token_type_ids"][-1] for r in requests if (one := self._request_inputs[r])]
            )
            beside["token_type_ids"] = kinds[:, None].expand(len(kinds), batch.width)
        ahead = self._request_inputs.position_deltas(requests)
        if ahead is not None:
            cached = batch.cached_length.to(self.device, non_blocking=True)[:, None]
            positions = inputs.get("position_ids")
            if positions is None:
                positions = cached + torch.arange(batch.width, device=self.device)
            beside["position_ids"] = positions + ahead[..., None].to(self.device)
        return beside

    def _input_tokens(self, rows: Rows, proposal: Proposal, batch: ForwardBatch) -> dict[str, Any]:
        """The tokens (or embeddings) that are fed [N, T]."""
        name = "decoder_input_ids" if self.traits.is_encoder_decoder else "input_ids"
        index, width = batch.rows, batch.width
        tokens = rows.tokens if index is None else index_rows(rows.tokens, index)
        if self._prompt_embeds:
            request = rows.request if index is None else rows.request[index]
            lines = [self._prompt_embeds.get(one) for one in request.tolist()]
            if batch.start == 0 and any(line is not None for line in lines):
                return {"inputs_embeds": self._input_embeds(lines, tokens, batch)}
        elif batch.start is not None and proposal.drafts is None:
            return {name: tokens[:, batch.start : batch.start + width]}
        start = batch.cached_length - (rows.offset if index is None else rows.offset[index])
        at = start.to(tokens.device)[:, None] + torch.arange(width, device=tokens.device)
        fed = tokens.gather(1, at.clamp(max=tokens.shape[1] - 1))
        if proposal.drafts is not None:
            drafts = proposal.drafts if index is None else index_rows(proposal.drafts, index)
            pending = batch.fed_length - proposal.draft_counts(index)
            place = torch.arange(width, device=tokens.device) - pending.to(tokens.device)[:, None]
            tried = drafts.gather(1, place.clamp(0, drafts.shape[1] - 1))
            fed = torch.where(place >= 0, tried, fed)
        return {name: fed}

    def _input_embeds(self, lines: Sequence[Tensor | None], tokens: Tensor, batch: ForwardBatch) -> Tensor:
        """Prompts given as embeddings, padded at the right, and the embedded tokens of their neighbours."""
        embed = self.model.get_input_embeddings()
        parts = []
        for at, line in enumerate(lines):
            part = embed(tokens[at, : int(batch.fed_length[at])]) if line is None else line
            parts.append(part)
        return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)

    def _visible_by_type(self, cache: KVCache, span: KVSpan) -> dict[str, VisibleSlots]:
        """What the cache is about to show of each kind of layer, where that is not slot by position."""
        found = {kind: cache.visible_slots(layer, span) for kind, layer in self._layer_of_type.items()}
        return {kind: reach for kind, reach in found.items() if reach is not None}

    def _attention_mask(
        self, positions: Tensor, stop: int, reaches: Mapping[str, VisibleSlots]
    ) -> Tensor | dict[str, Tensor]:
        """What each fed position may look at [N, 1, T, S], for each kind of layer where they differ."""
        device, width = positions.device, positions.shape[1]
        masks = {}
        for kind, window in self.traits.sliding_windows.items():
            last, size, reach = positions, stop, reaches.get(kind)  # the slot of each fed position
            if reach is not None:
                held = reach.past_lengths.to(device, non_blocking=True)
                last, size = held[:, None] + torch.arange(width, device=device), reach.num_slots
            slots = torch.arange(size, device=device)
            mask = slots <= last[..., None]  # [N, T, S]
            if window is not None:
                mask = mask & (slots > last[..., None] - window)
            if self.traits.attn_implementation == "eager":
                low = torch.finfo(self.model.dtype).min
                mask = torch.zeros(mask.shape, dtype=self.model.dtype, device=mask.device).masked_fill(
                    ~mask, low
                )
            masks[kind] = mask[:, None]
        return next(iter(masks.values())) if len(masks) == 1 else masks

    def _logit_positions(
        self, proposal: Proposal, batch: ForwardBatch
    ) -> tuple[int | Tensor | list[int] | None, Tensor | None]:
        """Which positions to compute logits for, and where each row's are among those [N, K + 1]."""
        last = batch.fed_length - proposal.draft_counts(batch.rows) - 1
        at = (last[:, None] + torch.arange(proposal.width + 1)).clamp(max=batch.width - 1)
        if not self.traits.supports_logits_to_keep:
            return None, at
        if bool((last == last[0]).all()) and int(last[0]) + proposal.width + 1 == batch.width:
            return proposal.width + 1, None
        wanted, places = torch.unique(at, return_inverse=True)
        # An index must be where the last layer is or on the host, and what spreads a model moves tensors.
        return wanted.tolist() if self._is_multi_device else wanted.to(self.device), places

    def _collect_states(
        self, answer: Any, rows: Rows, proposal: Proposal, batch: ForwardBatch
    ) -> Mapping[str, Any]:
        """The states asked for, with the rows they belong to."""
        kept: dict[str, Any] = {name: answer[name] for name in _STATE_NAMES if answer.get(name) is not None}
        index = torch.arange(len(rows)) if batch.rows is None else batch.rows
        fed = batch.fed_length if batch.width > 1 else torch.ones_like(batch.cached_length)
        tried = torch.as_tensor(proposal.draft_counts(batch.rows)).expand(len(index))
        return kept | {
            "rows": index,
            "fed_length": fed,
            "num_drafts": tried,
            "cached_length": batch.cached_length,
        }


def _needs_no_mask(reaches: Mapping[str, VisibleSlots], width: int) -> bool:
    """Whether rows show as much of themselves, and nothing stale, so that they need no mask."""
    return all(
        reach.num_slots == int(reach.past_lengths[0]) + width
        and bool((reach.past_lengths == reach.past_lengths[0]).all())
        for reach in reaches.values()
    )
