"""`CodebookModel`: a model that predicts several codebooks a step, behind the Model interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from descant.core.interfaces import Array, ModelTraits, RowCache
from descant.core.records import ForwardOutput, Hypothesis, Proposal
from descant.core.rows import Rows
from descant.errors import InputError, NotInThisVersion
from descant.kv_cache.tied_rows import TiedRowCache
from descant.models.codebooks.frame_network import FrameNetwork
from descant.models.codebooks.frames import CODEBOOK_INPUT, Codebook, CodebookFamily, FrameInputs

__all__ = ["CodebookModel"]


@dataclass(eq=False)
class _Sequence:
    """A sequence of frames while any of its codebooks runs."""

    number: int
    frames: FrameInputs
    requests: dict[int, int] = field(default_factory=dict)  # codebook -> request, of those that run
    ended: dict[int, tuple[int, int]] = field(default_factory=dict)  # codebook -> new tokens, last token

    @property
    def network_requests(self) -> list[int]:
        """Its requests of the network: with and without condition."""
        first = 2 * self.number
        return [first] if self.frames.uncond_inputs is None else [first, first + 1]


class _Layout(NamedTuple):
    """Where the rows of a table are in those of the network; valid for one version of the table."""

    version: object
    row_index: Tensor  # of the cache: [R] (host)
    source: Tensor  # [N] (host) a row of each network row
    request: Tensor  # [N] (host) the request of each network row
    network_row: Tensor  # [R or more] on the device: rows, then guided rows again for their other network row
    token_row: Tensor  # [same] the row of the table
    codebook: Tensor  # [same]
    forced: Tensor | None  # [R, L] codes that are fed whatever is chosen; -1: the chosen one
    pad: Tensor  # [N] code of ended codebooks
    guided: Tensor  # [G] network rows with guidance
    unconditional: Tensor  # [G] their network rows without condition
    scales: Tensor  # [G]
    guided_frames: tuple[FrameInputs, ...]
    has_ended: tuple[tuple[int, _Sequence], ...]  # network rows with ended codebooks


class CodebookModel:
    """A network that reads and predicts one code of each of C codebooks per step.

    A row of the table is one codebook of one sequence, and each of these rows is a request of its own. The
    rows of a sequence share one row of the network and of its cache, or two under guidance. A codebook that
    has ended before the others is fed its pad token.
    """

    def __init__(self, family: CodebookFamily, states: Sequence[str] = ()) -> None:
        if states:
            must = f"is not supported for {type(family.network).__name__}, whose rows are codebooks"
            raise NotInThisVersion(f"output_{states[0]}", must, True, "leave it out")
        self.family = family
        self.frame_network = FrameNetwork(family)
        self.network = family.network
        self.device, self.rank_group = self.frame_network.device, self.frame_network.rank_group
        self.traits: ModelTraits = replace(
            self.frame_network.traits,
            is_encoder_decoder=False,
            supports_inputs_embeds=False,
            vocab_size=family.num_known_codes,
            main_input_name="input_ids",
            input_names=frozenset({CODEBOOK_INPUT}),
            placeholder_tokens={},
            needs_own_cache=True,
        )
        self._sequences: dict[int, tuple[_Sequence, int]] = {}  # by request, with the codebook
        self._running: set[int] = set()  # ids of the inputs of running sequences
        self._numbers = count()
        self._layout: _Layout | None = None

    def new_cache(self) -> RowCache:
        """An empty cache."""
        return TiedRowCache(self.frame_network.new_cache())

    def set_output_states(self, states: Sequence[str]) -> None:
        """Only none: states belong to sequences, not to codebooks."""
        if states:
            raise NotInThisVersion(f"output_{states[0]}", "is not supported for codebooks", True)

    # -------------------------------------------------------------------- requests
    def add_requests(self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]]) -> None:
        """Register requests, each one codebook; those of a sequence come together."""
        given = inputs.get(CODEBOOK_INPUT, [None] * len(requests))
        new: dict[int, _Sequence] = {}
        for request, value in zip(requests, given, strict=True):
            codebook = value[0] if isinstance(value, list) else value
            if not isinstance(codebook, Codebook):
                do = "make the requests by descant.sound_request"
                raise InputError(CODEBOOK_INPUT, "must be a codebook of a sequence", codebook, do)
            key = id(codebook.frames)
            sequence = new.get(key)
            if sequence is None:
                sequence = new[key] = _Sequence(next(self._numbers), codebook.frames)
            if codebook.number in sequence.requests or key in self._running:
                must = "must be of a sequence that is not running"
                raise InputError(CODEBOOK_INPUT, must, codebook.number, "make new requests")
            sequence.requests[codebook.number] = request
        for sequence in new.values():
            if len(sequence.requests) != self.family.num_rows:
                must = f"must be admitted with all {self.family.num_rows} codebooks of its sequence"
                raise InputError(CODEBOOK_INPUT, must, sorted(sequence.requests))
        for sequence in new.values():
            self._running.add(id(sequence.frames))
            sequence.frames.state.more_codes.clear()
            for codebook, request in sequence.requests.items():
                self._sequences[request] = sequence, codebook
        self.frame_network.add_sequences(
            [(sequence.network_requests, sequence.frames) for sequence in new.values()]
        )

    def remove_requests(self, requests: Sequence[int]) -> None:
        """Drop requests; a sequence leaves the network with its last codebook."""
        for request in requests:
            found = self._sequences.pop(request, None)
            if found is None:
                continue
            sequence, codebook = found
            sequence.requests.pop(codebook, None)
            sequence.ended.setdefault(codebook, (0, sequence.frames.pad_token_id))
            if not sequence.requests:
                self._running.discard(id(sequence.frames))
                self.frame_network.remove_requests(sequence.network_requests)
        self._layout = None

    def record_finished(self, request: int, hypotheses: Sequence[Hypothesis]) -> None:
        """Note the last token of a codebook, which is fed with the next frame of the others."""
        sequence, codebook = self._sequences[request]
        tokens = hypotheses[0].tokens
        sequence.ended[codebook] = len(tokens), int(tokens[-1])

    # -------------------------------------------------------------------- forward
    def forward(
        self,
        rows: Rows,
        proposal: Proposal,
        cache: RowCache,
        with_logits: bool = True,  # noqa: ARG002 - of the interface
    ) -> ForwardOutput:
        """Feed each sequence's pending frames; the logits [R, 1, V] of each codebook's next code."""
        assert isinstance(cache, TiedRowCache)
        assert proposal.drafts is None  # no drafter supports these rows
        self._tie_new_rows(rows, cache)
        layout = self._layout_of(rows, cache)
        codes = self._pending_codes(rows, layout)
        logits = self.frame_network.run(codes, _network_rows(rows, cache, layout), cache.inner)
        logits = logits.view(len(layout.source), self.family.num_rows, -1)  # [N, C, V]
        if self.family.reads_hidden:
            self._store_hidden(rows, layout)
        if layout.guided_frames:
            cond, uncond = logits[layout.guided], logits[layout.unconditional]
            guided = self.family.guide(cond, uncond, layout.scales, layout.guided_frames)
            logits = logits.index_copy(0, layout.guided, guided)
        count = len(rows)
        return ForwardOutput(logits[layout.network_row[:count], layout.codebook[:count]][:, None])

    def _tie_new_rows(self, rows: Rows, cache: TiedRowCache) -> None:
        """Give the sequences of new rows their rows in the cache."""
        members: dict[int, list[int]] = {}
        sequences: dict[int, _Sequence] = {}
        for row in cache.untied:
            sequence, _ = self._sequences[int(rows.request[row])]
            sequences[sequence.number] = sequence
            members.setdefault(sequence.number, []).append(row)
        for number, group in members.items():
            frames = sequences[number].frames
            cache.tie(group, frames.prefix_length, frames.uncond_inputs is not None)

    def _layout_of(self, rows: Rows, cache: TiedRowCache) -> _Layout:
        layout = self._layout
        if layout is None or layout.version != rows.version or layout.row_index is not cache.row_index:
            layout = self._layout = self._make_layout(rows, cache)
        return layout

    def _make_layout(self, rows: Rows, cache: TiedRowCache) -> _Layout:
        own, other = cache.row_index.numpy(), cache.uncond_index.numpy()
        members = [self._sequences[request] for request in rows.request.tolist()]
        codebook: Array = np.array([index for _, index in members])
        guided_rows = np.flatnonzero(other >= 0)
        all_rows = np.arange(len(rows))
        num_network = int(max(own.max(), other.max())) + 1
        source, sequence_of = np.zeros(num_network, dtype=np.int64), [members[0][0]] * num_network
        for row, (sequence, _) in enumerate(members):
            for network_row in {int(own[row]), int(other[row])} - {-1}:
                source[network_row], sequence_of[network_row] = row, sequence
        is_uncond = np.zeros(num_network, dtype=np.int64)
        is_uncond[other[guided_rows]] = 1
        first_guided = {int(own[row]): int(other[row]) for row in guided_rows}
        frames = tuple(sequence_of[row].frames for row in first_guided)
        device = self.device
        return _Layout(
            rows.version,
            cache.row_index,
            torch.from_numpy(source),
            torch.tensor([2 * one.number for one in sequence_of]) + torch.from_numpy(is_uncond),
            torch.from_numpy(np.concatenate((own, other[guided_rows]))).to(device),
            torch.from_numpy(np.concatenate((all_rows, guided_rows))).to(device),
            torch.from_numpy(np.concatenate((codebook, codebook[guided_rows]))).to(device),
            self._forced_codes(members),
            torch.tensor([one.frames.pad_token_id for one in sequence_of], device=device),
            torch.tensor(list(first_guided), dtype=torch.long, device=device),
            torch.tensor(list(first_guided.values()), dtype=torch.long, device=device),
            torch.tensor([one.guidance_scale for one in frames], device=device),
            frames,
            tuple((row, one) for row, one in enumerate(sequence_of) if one.ended),
        )

    def _forced_codes(self, members: Sequence[tuple[_Sequence, int]]) -> Tensor | None:
        """The codes that are fed whatever is chosen [R, L]; None: there are none."""
        lines = [
            torch.zeros(0, dtype=torch.long)
            if sequence.frames.forced is None
            else sequence.frames.forced[index]
            for sequence, index in members
        ]
        if not any(len(line) for line in lines):
            return None
        padded = torch.nn.utils.rnn.pad_sequence(lines, batch_first=True, padding_value=-1)
        return padded.to(self.device)

    def _pending_codes(self, rows: Rows, layout: _Layout) -> Tensor:
        """The codes [N, T, C] of each network row that are not cached yet, from the first of these on."""
        uniform = rows.uniform_length
        if uniform is not None:
            columns = torch.arange(uniform.cached_length, uniform.length, device=self.device)[None]
            tokens = rows.tokens[:, uniform.cached_length : uniform.length]
        else:
            width = int((rows.length - rows.cached_length).max())
            columns = rows.cached_length.to(self.device)[:, None] + torch.arange(width, device=self.device)
            tokens = rows.tokens.gather(1, columns.clamp(max=rows.tokens.shape[1] - 1))
        if layout.forced is not None:
            tokens = _with_forced(tokens, columns, layout.forced)
            if self.family.processes_forced:
                # In the table, where processors read them; beyond a row's end this is no token yet.
                index = columns.clamp(max=rows.tokens.shape[1] - 1).expand(len(rows), -1)
                rows.tokens.scatter_(1, index, tokens)
        codes = layout.pad[:, None, None].repeat(1, tokens.shape[1], self.family.num_codebooks)
        codes[layout.network_row, :, layout.codebook] = tokens[layout.token_row]
        if self.family.num_rows < self.family.num_codebooks:
            self._add_more_codes(codes, rows, layout)
        for network_row, sequence in layout.has_ended:
            row = int(layout.source[network_row])
            first = int(rows.cached_length[row] - rows.prompt_length[row])
            for codebook, (num_new, last) in sequence.ended.items():
                if 0 <= num_new - 1 - first < codes.shape[1]:
                    codes[network_row, num_new - 1 - first, codebook] = last
        return codes

    def _add_more_codes(self, codes: Tensor, rows: Rows, layout: _Layout) -> None:
        """Write the codes that are no rows into frames [N, T, C]."""
        first = (rows.cached_length - rows.prompt_length).tolist()
        pending = (rows.length - rows.cached_length).tolist()
        for network_row, row in enumerate(layout.source.tolist()):
            more = self._sequences[int(rows.request[row])][0].frames.state.more_codes
            # The codes of a prompt are not fed, only those that stand for its last position.
            for place in range(max(0, -first[row]), pending[row]):
                codes[network_row, place, self.family.num_rows :] = more[first[row] + place]

    def _store_hidden(self, rows: Rows, layout: _Layout) -> None:
        """Give each sequence the last hidden state of its row."""
        hidden = self.frame_network.last_hidden
        assert hidden is not None
        for network_row, row in enumerate(layout.source.tolist()):
            self._sequences[int(rows.request[row])][0].frames.state.hidden = hidden[network_row]


def _with_forced(tokens: Tensor, columns: Tensor, forced: Tensor) -> Tensor:
    """The tokens [R, T] at these columns, replaced by forced ones where there are any."""
    inside = columns < forced.shape[1]
    index = columns.clamp(max=forced.shape[1] - 1).expand(len(tokens), -1)
    values = forced.gather(1, index)
    return torch.where((values >= 0) & inside, values, tokens)


def _network_rows(rows: Rows, cache: TiedRowCache, layout: _Layout) -> Rows:
    """The rows of the network [N], with the lengths of those that they serve."""
    source = layout.source
    cached, prefix = rows.cached_length[source], cache.prefix[source]
    return Rows(
        torch.zeros(len(source), 1, dtype=torch.long, device=rows.tokens.device),
        length=rows.length[source],
        cached_length=torch.where(cached > 0, cached + prefix, 0),
        offset=prefix,
        prompt_length=rows.prompt_length[source],
        request=layout.request,
        slot=torch.zeros_like(source),
        columns={},
        version=(rows.version, "network"),
    )
