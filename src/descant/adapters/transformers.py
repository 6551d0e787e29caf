"""A transformers model behind the Model port: feeds a ragged table with as little padding as it can."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from descant.adapters.facts import facts_of
from descant.adapters.memory import Memory
from descant.adapters.views import CrossView, PairView, SelfView
from descant.errors import InputError
from descant.ports import Cache, Facts, Span
from descant.rows import Rows, pick, same
from descant.step import Output, Proposal

__all__ = ["TransformersModel"]


_STATES = ("hidden_states", "attentions", "decoder_hidden_states", "decoder_attentions", "cross_attentions")

# At most so many logits are computed in one forward of ragged prompts: 128 MiB in float32.
_LOGITS = 2**25


class _Batch(NamedTuple):
    """Rows that share a forward."""

    rows: Tensor | None  # [N] (host); None: the whole table
    size: int  # how many rows
    cached: Tensor  # [N] (host) positions before the fed ones
    fed: Tensor  # [N] (host) how many are fed; not looked at where it is one each
    start: int | None  # the position that all start at; None: they differ
    width: int  # how many positions are fed, the longest row's

    @classmethod
    def of(cls, cached: Tensor, fed: Tensor, rows: Tensor | None = None) -> _Batch:
        """A batch of the rows `rows`."""
        if rows is not None:
            cached, fed = cached[rows], fed[rows]
        return cls(rows, len(fed), cached, fed, same(cached), int(fed.max()))

    @property
    def stop(self) -> int:
        """How many slots are read: the longest past and everything fed after it."""
        return (int(self.cached.max()) if self.start is None else self.start) + self.width


class TransformersModel:
    """Any causal or encoder-decoder model of transformers 5.

    Rows are fed aligned at the left, what is missing at the right: a fresh batch of ragged prompts then
    needs no mask at all, for causal attention never looks right. Rows that stand level need none
    either. Only ragged rows that already hold something are shown a mask, or, by models that take no
    positions, fed in groups of equal length.
    """

    def __init__(self, model: PreTrainedModel, states: Sequence[str] = ()) -> None:
        self.model = model
        self.facts: Facts = facts_of(model)
        self.device = torch.device(
            model.device
        )  # where it takes its inputs; asked once, for the model searches
        self._states = tuple(states)  # what else to return: "hidden_states", "attentions"
        self._memory = Memory()
        self._embeddings: dict[int, Tensor] = {}
        self._encoded: Any = {}
        self.forwards = 0
        self.positions_fed = 0

    @property
    def encoded(self) -> Any:
        """The encoder's last output, with the states asked for."""
        return self._encoded

    @torch.no_grad()
    def open(self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]]) -> None:
        """Take the inputs of new requests that are no tokens, and run the encoder once for all of them."""
        if self.facts.encoder_decoder:
            self._encode(requests, inputs)
            return
        for request, line in zip(requests, inputs.get("inputs_embeds", ()), strict=False):
            if line is not None:
                self._embeddings[request] = line.to(self.device)

    def close(self, requests: Sequence[int]) -> None:
        """Forget those requests."""
        self._memory.close(requests)
        for request in requests:
            self._embeddings.pop(request, None)

    def forward(self, rows: Rows, proposal: Proposal, cache: Cache) -> Output:
        """Feed each row's pending tokens and drafts; logits of the last pending token and of every draft."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.forward(rows, proposal, cache)
        batches = self._batches(rows, proposal)
        if len(batches) == 1:
            logits, states = self._run(rows, proposal, cache, batches[0])
            return Output(logits, [states] if self._states else ())
        joint: Tensor | None = None
        all_states = []
        for batch in batches:
            assert batch.rows is not None
            logits, states = self._run(rows, proposal, cache, batch)
            all_states.append(states)
            if joint is None:
                joint = logits.new_empty(len(rows), proposal.width + 1, logits.shape[-1])
            joint[batch.rows.to(logits.device)] = logits
        assert joint is not None
        return Output(joint, all_states if self._states else ())

    # -------------------------------------------------------------------- what shares a forward
    def _batches(self, rows: Rows, proposal: Proposal) -> list[_Batch]:
        """The rows in as few forwards as their lengths allow, fresh rows first."""
        cached, even = rows.cached, rows.even
        if even is not None and even.length == even.cached + 1 and proposal.drafts is None:
            return [_Batch(None, len(rows), cached, cached, even.cached, 1)]
        fed = rows.pending + proposal.tried()
        whole = _Batch.of(cached, fed)
        if whole.width == 1 and (whole.start is not None or (self.facts.masks and cached.numpy().all())):
            return [whole]
        if whole.start is not None and not self._wasteful(fed) and self._readable(fed):
            return [whole]
        fresh = cached == 0
        parts: list[Tensor] = []
        if bool(fresh.any()):
            parts += self._by_length(fresh.nonzero().squeeze(1), fed)
        if not bool(fresh.all()):
            running = (~fresh).nonzero().squeeze(1)
            if self.facts.masks:
                parts.append(running)
            else:
                past = cached[running]
                parts += [running[past == length] for length in sorted(set(past.tolist()))]
        return [whole] if len(parts) == 1 else [_Batch.of(cached, fed, part) for part in parts]

    def _wasteful(self, fed: Tensor) -> bool:
        """Whether padding all rows to the longest would cost more than a second forward."""
        longest = int(fed.max())
        return longest > 64 and longest * len(fed) > 1.5 * int(fed.sum())

    def _readable(self, fed: Tensor) -> bool:
        """Whether the logits of all rows' last positions fit, each position being computed for every row."""
        return len(set(fed.tolist())) * len(fed) * self.facts.vocabulary <= _LOGITS

    def _by_length(self, index: Tensor, fed: Tensor) -> list[Tensor]:
        """Fresh rows in batches of similar length: none is padded to more than half as much again."""
        parts, rest = [], index[fed[index].argsort()]
        while len(rest):
            limit = max(64, int(fed[rest[0]] * 3) // 2)
            count = int((fed[rest] <= limit).sum())
            while count > 1 and not self._readable(fed[rest[:count]]):
                count = (count + 1) // 2
            parts.append(rest[:count].sort().values)
            rest = rest[count:]
        return parts

    # -------------------------------------------------------------------- one forward
    def _run(
        self, rows: Rows, proposal: Proposal, cache: Cache, batch: _Batch
    ) -> tuple[Tensor, Mapping[str, Any]]:
        """One forward of the model: logits [N, K + 1, V] in float32, and the states asked for."""
        device, width = self.device, batch.width
        index = None if batch.rows is None else batch.rows.to(device, non_blocking=True)
        inputs = self._fed(rows, proposal, batch)
        if batch.start is not None:
            span = Span(index, batch.start, width, batch.start + width)
        else:
            past = batch.cached.to(device, non_blocking=True)
            positions = past[:, None] + torch.arange(width, device=device)
            if width > 1:  # what only fills a shorter row up must not run off a table of positions
                positions = positions.clamp(max=(batch.cached + batch.fed - 1).to(device)[:, None])
            span = Span(index, past, width, batch.stop)
            inputs["position_ids"] = positions
            inputs["attention_mask"] = self._mask(positions, batch.stop)
        view = SelfView(cache, span)
        if self.facts.encoder_decoder:
            inputs |= self._decoder_side(rows, batch, view, span)
        else:
            inputs["past_key_values"] = view
        places = None
        if width > 1:
            wanted, places = self._places(proposal, batch)
            if wanted is not None:
                inputs["logits_to_keep"] = wanted
        for name in self._states:
            inputs[f"output_{name}"] = True
        answer = self.model(**inputs, use_cache=True, return_dict=True)
        self.forwards += 1
        self.positions_fed += width * batch.size
        logits = answer.logits
        if places is not None:
            line = torch.arange(len(logits), device=logits.device)[:, None]
            logits = logits[line, places.to(logits.device)]
        return logits.float(), self._kept(answer, rows, batch) if self._states else {}

    def _fed(self, rows: Rows, proposal: Proposal, batch: _Batch) -> dict[str, Any]:
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

    def _embedded(self, lines: Sequence[Tensor | None], tokens: Tensor, batch: _Batch) -> Tensor:
        """Prompts given as embeddings, padded at the right, and the embedded tokens of their neighbours."""
        embed = self.model.get_input_embeddings()
        parts = []
        for at, line in enumerate(lines):
            part = embed(tokens[at, : int(batch.fed[at])]) if line is None else line
            parts.append(part)
        return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)

    def _mask(self, positions: Tensor, stop: int) -> Tensor | dict[str, Tensor]:
        """What each fed position may look at [N, 1, T, S], for each kind of layer where they differ."""
        slots = torch.arange(stop, device=positions.device)
        seen = slots <= positions[..., None]  # [N, T, S]
        masks = {}
        for kind, window in self.facts.windows.items():
            mask = seen if window is None else seen & (slots > positions[..., None] - window)
            if self.facts.attention == "eager":
                low = torch.finfo(self.model.dtype).min
                mask = torch.zeros(mask.shape, dtype=self.model.dtype, device=mask.device).masked_fill(
                    ~mask, low
                )
            masks[kind] = mask[:, None]
        return next(iter(masks.values())) if len(masks) == 1 else masks

    def _places(self, proposal: Proposal, batch: _Batch) -> tuple[int | Tensor | None, Tensor | None]:
        """Which positions to compute logits for, and where each row's are among those [N, K + 1]."""
        last = batch.fed - proposal.tried(batch.rows) - 1
        at = (last[:, None] + torch.arange(proposal.width + 1)).clamp(max=batch.width - 1)
        if not self.facts.keeps_logits:
            return None, at
        if bool((last == last[0]).all()) and int(last[0]) + proposal.width + 1 == batch.width:
            return proposal.width + 1, None
        wanted, places = torch.unique(at, return_inverse=True)
        return wanted.to(self.device), places

    def _kept(self, answer: Any, rows: Rows, batch: _Batch) -> Mapping[str, Any]:
        """The states asked for, with the rows they belong to."""
        kept: dict[str, Any] = {name: answer[name] for name in _STATES if answer.get(name) is not None}
        index = torch.arange(len(rows)) if batch.rows is None else batch.rows
        fed = batch.fed if batch.width > 1 else torch.ones_like(batch.cached)
        return kept | {"rows": index, "fed": fed, "cached": batch.cached}

    # -------------------------------------------------------------------- encoder-decoder
    def _encode(self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]]) -> None:
        """Run the encoder on all new requests at once, or take what the user computed."""
        for name, lines in inputs.items():
            if any(line is None for line in lines):
                raise InputError(name, "must be given for all requests admitted together or for none", "some")
        fed = {name: _stacked(lines).to(self.device) for name, lines in inputs.items()}
        mask = fed.get("attention_mask")
        states = fed.pop("encoder_outputs", None)
        if not fed and states is None:
            raise InputError("input_ids", "must hold the encoder's input", None)
        if states is None:
            if mask is None:
                name = next(iter(fed))
                fed["attention_mask"] = mask = _present([line.shape[0] for line in inputs[name]], self.device)
            asked = {f"output_{name}": True for name in self._states}
            self._encoded = self.model.get_encoder()(**fed, **asked, return_dict=True)
            states = self._encoded[0]
        if mask is None:
            mask = _present([len(line) for line in inputs["encoder_outputs"]], self.device)
        self._memory.open(requests, states, mask)

    def _decoder_side(self, rows: Rows, batch: _Batch, view: SelfView, span: Span) -> dict[str, Any]:
        request = rows.request if batch.rows is None else rows.request[batch.rows]
        lines = self._memory.lines(request)
        fresh = batch.start == 0
        cross = CrossView(self._memory, lines, span, 0 if fresh else self.facts.layers)
        return {
            "encoder_outputs": (self._memory.states(lines),),
            "attention_mask": self._memory.mask(lines),
            "past_key_values": PairView(view, cross, 0 if fresh else self.facts.layers),
        }


def _stacked(lines: Sequence[Tensor]) -> Tensor:
    """Lines of different length as one block, padded with zeros at the right."""
    return torch.nn.utils.rnn.pad_sequence(list(lines), batch_first=True)


def _present(lengths: Sequence[int], device: torch.device) -> Tensor:
    """A mask of the first `lengths[i]` places of each line [B, S]."""
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long().to(device)
