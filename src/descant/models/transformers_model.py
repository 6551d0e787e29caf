"""A transformers model behind the Model port: feeds a ragged table with as little padding as it can."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from descant.core.interfaces import Cache, Facts, KeyCache, Reach, Span, StateCache
from descant.core.records import Output, Proposal
from descant.core.rows import Rows, pick
from descant.models.compiled_step import Fixed, Steps, steps_of
from descant.models.custom_inputs import Asking, State, own_positions
from descant.models.devices import input_device, spread
from descant.models.encoder import Encoder
from descant.models.forward_batches import Batch, Batches
from descant.models.forward_view import SelfView
from descant.models.rank_group import ranks_of
from descant.models.request_inputs import Extras
from descant.models.synced_gpus import present_pace
from descant.models.traits import facts_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["TransformersModel"]


_STATES = ("hidden_states", "attentions", "decoder_hidden_states", "decoder_attentions", "cross_attentions")


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
        self.facts: Facts = facts_of(model)
        # Where it takes its inputs; asked once, for the model searches.
        self.device = input_device(model)
        self.peers = ranks_of(model)
        self._spread = spread(model)
        self._pace = present_pace()
        self._states = tuple(states)  # what else to return: "hidden_states", "attentions"
        self._batches = Batches(self.facts)
        self._extras = Extras()
        self._asking = Asking(model, self.facts, self._extras)
        self._state = State(model, self.facts) if self.facts.memory == "own" else None
        self._encoder = (
            Encoder(model, self.facts, states, self.device) if self.facts.encoder_decoder else None
        )
        self._embeddings: dict[int, Tensor] = {}
        # A layer of each kind, by which a cache is asked what it shows of the kind.
        self._layer = {kind: self.facts.kinds.index(kind) for kind in dict.fromkeys(self.facts.kinds)}
        sliding = tuple(self.facts.windows.get(kind) is not None for kind in self.facts.kinds)
        self._sliding = sliding or (False,)
        self._steps: Steps | None = None  # what is compiled of the model, once a cache wants it
        self._mute = False  # whether the forward at hand computes no logits
        self.forwards = 0
        self.positions_fed = 0

    def show(self, states: Sequence[str]) -> None:
        """Bring these states along from the next forward on: "hidden_states", "attentions"."""
        self._states = tuple(states)

    @torch.no_grad()
    def head(self, hidden: Tensor) -> Tensor:
        """The logits that hidden states of any layer [..., D] come to, in float32 [..., V]."""
        head: Any = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        weight = next(head.parameters())
        lines = hidden.to(weight.device, weight.dtype).flatten(0, -2)
        count = len(lines)
        if weight.device.type == "cpu" and 3 < count < 16:
            # A CPU multiplies sixteen lines in two thirds of the time that it takes for seven.
            lines = torch.nn.functional.pad(lines, (0, 0, 0, 16 - count))
        found = head(lines)[:count]
        return self._brought(found.view(*hidden.shape[:-1], -1))

    @property
    def encoded(self) -> Any:
        """The encoder's last output, with the states asked for."""
        return {} if self._encoder is None else self._encoder.encoded

    @torch.no_grad()
    def open(self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]]) -> None:
        """Take the inputs of new requests that are no tokens, and run the encoder once for all of them."""
        if self._encoder is not None:
            self._encoder.open(requests, inputs)
            return
        for request, line in zip(requests, inputs.get("inputs_embeds", ()), strict=False):
            if line is not None:
                self._embeddings[request] = line.to(self.device)
        rest = {name: lines for name, lines in inputs.items() if name != "inputs_embeds"}
        self._extras.open(requests, rest, self.device)

    def close(self, requests: Sequence[int]) -> None:
        """Forget those requests."""
        if self._encoder is not None:
            self._encoder.close(requests)
        self._extras.close(requests)
        for request in requests:
            self._embeddings.pop(request, None)

    def forward(self, rows: Rows, proposal: Proposal, cache: Cache, heads: bool = True) -> Output:
        """Feed each row's pending tokens and drafts; logits of the last pending token and of every draft.

        Without `heads` a model that can do without computes no logits, [R, K + 1, 0], only states.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.forward(rows, proposal, cache, heads)
        self._mute = not heads and self.facts.keeps_logits and not self.facts.asks
        held = cast(StateCache, cache).together() if self.facts.memory == "own" else None
        apart = self._apart(rows) if len(self._extras) else {}
        batches = self._batches.of(rows, proposal, apart, held)
        run = self._run_asking if self.facts.asks else self._run
        if len(batches) == 1:
            logits, states = run(rows, proposal, cache, batches[0])
            return Output(logits, [states] if self._states else ())
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
        return Output(joint, all_states if self._states else ())

    def _apart(self, rows: Rows) -> dict[int, object]:
        """The requests that cannot share a forward with just anybody, by what they give."""
        return self._extras.apart(set(rows.request[rows.cached == 0].tolist()), self.facts.asks)

    # -------------------------------------------------------------------- one forward
    def _run(
        self, rows: Rows, proposal: Proposal, cache: Cache, batch: Batch
    ) -> tuple[Tensor, Mapping[str, Any]]:
        """One forward of the model: logits [N, K + 1, V] in float32, and the states asked for."""
        device, width = self.device, batch.width
        index = None if batch.rows is None else batch.rows.to(device, non_blocking=True)
        request = rows.request if batch.rows is None else rows.request[batch.rows]
        inputs = self._fed(rows, proposal, batch)
        if width == 1 and proposal.drafts is None:
            stepped = self._stepped(inputs, cache, batch)
            if stepped is not None:
                return self._brought(stepped), {}
        sure = batch.fed - proposal.tried(batch.rows) if width > 1 else None
        span = Span(index, batch.start or 0, width, batch.stop, batch.rows, sure=sure)
        if batch.start is None:
            span = span._replace(start=batch.cached.to(device, non_blocking=True), starts=batch.cached)
        reaches = self._reaches(cast(KeyCache, cache), span)
        if batch.start is not None and _level(reaches, width):
            if self.facts.spelt and self.facts.positions:
                inputs["position_ids"] = torch.arange(batch.start, batch.stop, device=device)[None]
        else:
            past = span.start
            first = past[:, None] if isinstance(past, Tensor) else past
            positions = (first + torch.arange(width, device=device)).expand(batch.size, width)
            if width > 1:  # what only fills a shorter row up must not run off a table of positions
                positions = positions.clamp(max=(batch.cached + batch.fed - 1).to(device)[:, None])
            inputs["position_ids"] = positions
            inputs["attention_mask"] = self._mask(positions, batch.stop, reaches)
        if len(self._extras) or self.facts.places:
            inputs |= self._beside(inputs, batch, request.tolist())
        view = SelfView(cast(KeyCache, cache), span, self._sliding)
        if self._encoder is not None:
            read = self._encoder.lines(request)
            inputs |= self._encoder.shown(read)
            inputs["past_key_values"] = self._encoder.past(read, view, span)
        else:
            inputs["past_key_values"] = view
        places = None
        if self._mute:
            inputs["logits_to_keep"] = torch.zeros(0, dtype=torch.long, device=device)
        elif width > 1:
            wanted, places = self._places(proposal, batch)
            if wanted is not None:
                inputs["logits_to_keep"] = wanted
        answer = self._called({**inputs, "use_cache": True}, batch)
        if batch.start == 0 and len(self._extras):
            self._extras.fed(request.tolist())
        logits = answer.logits
        if self._mute:
            logits = logits.new_zeros(len(logits), proposal.width + 1, 0)
        if places is not None:
            line = torch.arange(len(logits), device=logits.device)[:, None]
            logits = logits[line, places.to(logits.device)]
        return self._brought(logits), self._kept(answer, rows, proposal, batch) if self._states else {}

    def _run_asking(
        self, rows: Rows, proposal: Proposal, cache: Cache, batch: Batch
    ) -> tuple[Tensor, Mapping[str, Any]]:
        """One forward of a model that says by itself what it is fed."""
        facts, start, width = self.facts, batch.start, batch.width
        line = torch.arange(len(rows)) if batch.rows is None else batch.rows
        index = None if batch.rows is None else batch.rows.to(self.device, non_blocking=True)
        request = rows.request[line]
        requests = request.tolist()
        more: dict[str, Any] = {"logits_to_keep": proposal.width + 1} if facts.keeps_logits else {}
        if self._encoder is not None:
            more |= self._encoder.shown(self._encoder.lines(request))
        lines = [self._embeddings.get(one) for one in requests] if self._embeddings else []
        if start == 0 and any(one is not None for one in lines):
            more["inputs_embeds"] = self._embedded(lines, self._whole(rows, proposal, batch), batch)
        past: Any = None
        state: Any = None
        span = Span(index, start or 0, width, batch.stop, batch.rows)
        if facts.memory == "keys":
            past = self._view(cache, span, request)
        elif self._state is not None:
            state = self._state.fresh() if start == 0 else cast(StateCache, cache).fetch(line)
            past = self._state.past(state)
        inputs = self._asking.inputs(self._whole(rows, proposal, batch), batch, past, requests, more)
        if facts.memory == "keys" and inputs.get(facts.past) is None:
            # The model wants to read everything again, for it reads a longer text in another way.
            again = Span(index, 0, batch.stop, batch.stop, batch.rows)
            inputs[facts.past] = self._view(cache, again, request)
        if self._state is None:
            answer = self._called(inputs, batch)
        else:
            with self._state.around(state) as found:
                answer = self._called(inputs, batch)
            cast(StateCache, cache).keep(line, self._state.after(answer, state, found))
        self._asking.heard(answer, requests)
        logits = answer.logits[:, -(proposal.width + 1) :]
        if proposal.drafts is not None:  # a row that tries fewer stands further right
            size = logits.shape[1]
            tried = torch.as_tensor(proposal.tried(batch.rows))
            at = (size - 1 - tried[:, None] + torch.arange(proposal.width + 1)).clamp(0, size - 1)
            logits = logits[torch.arange(len(logits))[:, None].to(logits.device), at.to(logits.device)]
        return self._brought(logits), self._kept(answer, rows, proposal, batch) if self._states else {}

    def _brought(self, logits: Tensor) -> Tensor:
        """The logits in float32 and where the rows are: a model spread over devices may answer elsewhere."""
        return logits.to(self.device, torch.float32)

    def _view(self, cache: Cache, span: Span, request: Tensor) -> Any:
        """The cache as the model sees it."""
        view = SelfView(cast(KeyCache, cache), span)
        return view if self._encoder is None else self._encoder.past(self._encoder.lines(request), view, span)

    def _stepped(self, inputs: dict[str, Any], cache: Cache, batch: Batch) -> Tensor | None:
        """The logits [N, 1, V] of one token for every row, where the cache wants that step compiled."""
        if getattr(cache, "compile", None) is None or batch.rows is not None or batch.start == 0:
            return None
        if self._states or self._mute or len(self._extras) or "inputs_embeds" in inputs:
            return None
        if self._steps is None:
            self._steps = steps_of(self.model, self.facts)
        logits = self._steps.step(self.model, inputs["input_ids"], batch.cached, cast(Fixed, cache))
        if logits is not None:
            self._count(batch)
        return logits

    def _called(self, inputs: dict[str, Any], batch: Batch) -> Any:
        """The model's answer, with the states asked for."""
        for name in self._states:
            inputs[f"output_{name}"] = True
        inputs["return_dict"] = True
        self._count(batch)
        return self.model(**inputs)

    def _count(self, batch: Batch) -> None:
        """Take note of a forward."""
        if self._pace is not None:
            self._pace.forward()
        self.forwards += 1
        self.positions_fed += batch.width * batch.size

    def _whole(self, rows: Rows, proposal: Proposal, batch: Batch) -> Tensor:
        """All tokens of rows with their drafts [N, L], the last at the end; 0 where a position has none."""
        index, long = batch.rows, batch.stop
        tokens = rows.tokens if index is None else pick(rows.tokens, index)
        if batch.start is not None and proposal.drafts is None and not rows.offset.any():
            return tokens[:, :long]
        offset = rows.offset if index is None else rows.offset[index]
        length = rows.length if index is None else rows.length[index]
        tried = torch.as_tensor(proposal.tried(index))
        known = torch.cat((tokens, tokens.new_zeros(len(tokens), proposal.width)), 1)
        if proposal.drafts is not None:
            drafts = proposal.drafts if index is None else pick(proposal.drafts, index)
            at = length[:, None] + torch.arange(proposal.width)
            known = known.scatter(1, at.to(known.device), drafts)
        short = (long - (offset + length + tried)) + offset  # what comes before the first token
        place = torch.arange(long) - short[:, None]
        found = known.gather(1, place.clamp(min=0).to(known.device))
        return found.masked_fill((place < 0).to(known.device), 0)

    def _beside(self, inputs: dict[str, Any], batch: Batch, requests: Sequence[int]) -> dict[str, Any]:
        """What goes with the tokens of these rows: media, marks, and positions of the model's own count."""
        beside: dict[str, Any] = {}
        extra = self._extras[requests[0]]
        if batch.start == 0:
            if extra is not None:
                beside |= extra.media
                for name in extra.marks:
                    lines = [one.marks[name] for request in requests if (one := self._extras[request])]
                    beside[name] = torch.nn.utils.rnn.pad_sequence(lines, batch_first=True)
            if self.facts.places:
                fed = inputs.get("input_ids", inputs.get("inputs_embeds"))
                assert isinstance(fed, Tensor)
                there = torch.arange(batch.width) < batch.fed[:, None]
                asked = {**beside, "attention_mask": there.long().to(self.device)}
                beside["position_ids"] = own_positions(self.model, self._extras, fed, requests, asked)
            return beside
        if extra is not None and "token_type_ids" in extra.marks:
            kinds = torch.stack(
                [one.marks["token_type_ids"][-1] for r in requests if (one := self._extras[r])]
            )
            beside["token_type_ids"] = kinds[:, None].expand(len(kinds), batch.width)
        ahead = self._extras.ahead(requests)
        if ahead is not None:
            cached = batch.cached.to(self.device, non_blocking=True)[:, None]
            positions = inputs.get("position_ids")
            if positions is None:
                positions = cached + torch.arange(batch.width, device=self.device)
            beside["position_ids"] = positions + ahead[..., None].to(self.device)
        return beside

    def _fed(self, rows: Rows, proposal: Proposal, batch: Batch) -> dict[str, Any]:
        """The tokens (or embeddings) that are fed [N, T]."""
        name = "decoder_input_ids" if self.facts.encoder_decoder else "input_ids"
        index, width = batch.rows, batch.width
        tokens = rows.tokens if index is None else pick(rows.tokens, index)
        if self._embeddings:
            request = rows.request if index is None else rows.request[index]
            lines = [self._embeddings.get(one) for one in request.tolist()]
            if batch.start == 0 and any(line is not None for line in lines):
                return {"inputs_embeds": self._embedded(lines, tokens, batch)}
        elif batch.start is not None and proposal.drafts is None:
            return {name: tokens[:, batch.start : batch.start + width]}
        start = batch.cached - (rows.offset if index is None else rows.offset[index])
        at = start.to(tokens.device)[:, None] + torch.arange(width, device=tokens.device)
        fed = tokens.gather(1, at.clamp(max=tokens.shape[1] - 1))
        if proposal.drafts is not None:
            drafts = proposal.drafts if index is None else pick(proposal.drafts, index)
            pending = batch.fed - proposal.tried(index)
            place = torch.arange(width, device=tokens.device) - pending.to(tokens.device)[:, None]
            tried = drafts.gather(1, place.clamp(0, drafts.shape[1] - 1))
            fed = torch.where(place >= 0, tried, fed)
        return {name: fed}

    def _embedded(self, lines: Sequence[Tensor | None], tokens: Tensor, batch: Batch) -> Tensor:
        """Prompts given as embeddings, padded at the right, and the embedded tokens of their neighbours."""
        embed = self.model.get_input_embeddings()
        parts = []
        for at, line in enumerate(lines):
            part = embed(tokens[at, : int(batch.fed[at])]) if line is None else line
            parts.append(part)
        return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)

    def _reaches(self, cache: KeyCache, span: Span) -> dict[str, Reach]:
        """What the cache is about to show of each kind of layer, where that is not slot by position."""
        found = {kind: cache.reach(layer, span) for kind, layer in self._layer.items()}
        return {kind: reach for kind, reach in found.items() if reach is not None}

    def _mask(self, positions: Tensor, stop: int, reaches: Mapping[str, Reach]) -> Tensor | dict[str, Tensor]:
        """What each fed position may look at [N, 1, T, S], for each kind of layer where they differ."""
        device, width = positions.device, positions.shape[1]
        masks = {}
        for kind, window in self.facts.windows.items():
            last, size, reach = positions, stop, reaches.get(kind)  # the slot of each fed position
            if reach is not None:
                held = reach.held.to(device, non_blocking=True)
                last, size = held[:, None] + torch.arange(width, device=device), reach.size
            slots = torch.arange(size, device=device)
            mask = slots <= last[..., None]  # [N, T, S]
            if window is not None:
                mask = mask & (slots > last[..., None] - window)
            if self.facts.attention == "eager":
                low = torch.finfo(self.model.dtype).min
                mask = torch.zeros(mask.shape, dtype=self.model.dtype, device=mask.device).masked_fill(
                    ~mask, low
                )
            masks[kind] = mask[:, None]
        return next(iter(masks.values())) if len(masks) == 1 else masks

    def _places(
        self, proposal: Proposal, batch: Batch
    ) -> tuple[int | Tensor | list[int] | None, Tensor | None]:
        """Which positions to compute logits for, and where each row's are among those [N, K + 1]."""
        last = batch.fed - proposal.tried(batch.rows) - 1
        at = (last[:, None] + torch.arange(proposal.width + 1)).clamp(max=batch.width - 1)
        if not self.facts.keeps_logits:
            return None, at
        if bool((last == last[0]).all()) and int(last[0]) + proposal.width + 1 == batch.width:
            return proposal.width + 1, None
        wanted, places = torch.unique(at, return_inverse=True)
        # An index must be where the last layer is or on the host, and what spreads a model moves tensors.
        return wanted.tolist() if self._spread else wanted.to(self.device), places

    def _kept(self, answer: Any, rows: Rows, proposal: Proposal, batch: Batch) -> Mapping[str, Any]:
        """The states asked for, with the rows they belong to."""
        kept: dict[str, Any] = {name: answer[name] for name in _STATES if answer.get(name) is not None}
        index = torch.arange(len(rows)) if batch.rows is None else batch.rows
        fed = batch.fed if batch.width > 1 else torch.ones_like(batch.cached)
        tried = torch.as_tensor(proposal.tried(batch.rows)).expand(len(index))
        return kept | {"rows": index, "fed": fed, "tried": tried, "cached": batch.cached}


def _level(reaches: Mapping[str, Reach], width: int) -> bool:
    """Whether rows show as much of themselves, and nothing stale, so that they need no mask."""
    return all(
        reach.size == int(reach.held[0]) + width and bool((reach.held == reach.held[0]).all())
        for reach in reaches.values()
    )
