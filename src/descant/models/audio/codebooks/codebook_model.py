"""`CodebookModel`: a model that predicts several codebooks a step, behind the Model interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from descant.core.interfaces import Array, ModelTraits, RowCache
from descant.core.records import ForwardOutput, Hypothesis, Proposal
from descant.core.rows import Rows, uniform_value
from descant.errors import InputError, NotInThisVersion
from descant.kv_cache.row_views import TiedRowCache
from descant.models.audio.codebooks.families import (
    CsmFamily,
    DiaFamily,
    HiggsAudioFamily,
    MelodyFamily,
    MusicgenFamily,
)
from descant.models.audio.codebooks.frames import (
    CODEBOOK_INPUT,
    Codebook,
    CodebookFamily,
    FrameInputs,
    FrameNetwork,
)
from descant.models.wrapping.wrapped_model import decoding_base


@dataclass(eq=False)
class _FrameSequence:
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
    prefix: Tensor  # [N] (host) positions before the first frame
    shared_prefix: int | None  # that of all network rows; None: they differ
    code_row: Tensor  # [N * C] the row of each code of a frame; R: that of the pad token
    logit_row: Tensor | None  # [R] the logits of each row among [N * C]; None: these
    forced: Tensor | None  # [L, R] codes that are fed whatever is chosen; -1: the chosen one
    is_forced: Array | None  # [L] (host) whether any row has such a code
    guided: Tensor  # [G] network rows with guidance
    unconditional: Tensor  # [G] their network rows without condition
    scales: Tensor  # [G]
    guided_frames: tuple[FrameInputs, ...]
    incomplete: tuple[tuple[int, _FrameSequence], ...]  # network rows with ended codebooks


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
            ties_requests=True,
        )
        self._sequences: dict[int, tuple[_FrameSequence, int]] = {}  # by request, with the codebook
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
        new: dict[int, _FrameSequence] = {}
        for request, value in zip(requests, given, strict=True):
            codebook = value[0] if isinstance(value, list) else value
            if not isinstance(codebook, Codebook):
                do = "make the requests by descant.sound_request"
                raise InputError(CODEBOOK_INPUT, "must be a codebook of a sequence", codebook, do)
            key = id(codebook.frames)
            sequence = new.get(key)
            if sequence is None:
                sequence = new[key] = _FrameSequence(next(self._numbers), codebook.frames)
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
        if cache.untied:
            self._tie_new_rows(rows, cache)
        layout = self._layout
        if layout is None or layout.version != rows.version or layout.row_index is not cache.row_index:
            layout = self._layout = self._make_layout(rows, cache)
        codes = self._pending_codes(rows, layout)
        uniform, logits = rows.uniform_length, None
        is_step = uniform is not None and uniform.cached_length > 0 and codes.shape[1] == 1
        if is_step and uniform is not None and layout.shared_prefix is not None:
            position = uniform.cached_length + layout.shared_prefix
            logits = self.frame_network.run_step(codes, layout.request, cache.inner, position)
        if logits is None:
            logits = self.frame_network.run(codes, _network_rows(rows, layout), cache.inner)
        if self.family.reads_hidden:
            self._store_hidden(rows, layout)
        if layout.guided_frames:
            # The logits [N, R * V] with those of guided rows.
            by_row = logits.view(len(logits), self.family.num_rows, -1)
            cond, uncond = by_row[layout.guided], by_row[layout.unconditional]
            guided = self.family.guide(cond, uncond, layout.scales, layout.guided_frames)
            logits = by_row.index_copy(0, layout.guided, guided)
        flat = logits.view(len(layout.source) * self.family.num_rows, -1)
        return ForwardOutput((flat if layout.logit_row is None else flat[layout.logit_row])[:, None])

    def _tie_new_rows(self, rows: Rows, cache: TiedRowCache) -> None:
        """Give the sequences of new rows their rows in the cache."""
        members: dict[_FrameSequence, list[int]] = {}
        for row in cache.untied:
            sequence, _ = self._sequences[int(rows.request[row])]
            members.setdefault(sequence, []).append(row)
        for sequence, group in members.items():
            frames = sequence.frames
            cache.tie(group, frames.prefix_length, frames.uncond_inputs is not None)

    def _make_layout(self, rows: Rows, cache: TiedRowCache) -> _Layout:
        own, other = cache.row_index.numpy(), cache.uncond_index.numpy()
        members = [self._sequences[request] for request in rows.request.tolist()]
        num_network, num_codes, device = len(cache.inner), self.family.num_codebooks, self.device
        source, is_uncond = np.zeros(num_network, dtype=np.int64), np.zeros(num_network, dtype=np.int64)
        code_row: Array = np.full((num_network, num_codes), len(rows))
        logit_row = np.zeros(len(rows), dtype=np.int64)
        sequence_of = [members[0][0]] * num_network
        for row, (sequence, codebook) in enumerate(members):
            logit_row[row] = own[row] * self.family.num_rows + codebook
            for network_row in {int(own[row]), int(other[row])} - {-1}:
                source[network_row], sequence_of[network_row] = row, sequence
                code_row[network_row, codebook] = row
            is_uncond[other[row]] |= other[row] >= 0
        guided = {int(own[row]): int(other[row]) for row in np.flatnonzero(other >= 0)}
        frames = tuple(sequence_of[row].frames for row in guided)
        prefix = cache.prefix[torch.from_numpy(source)]
        forced = self._forced_codes(members)
        is_identity = num_network * self.family.num_rows == len(rows) and bool(
            (logit_row == np.arange(len(rows))).all()
        )
        return _Layout(
            rows.version,
            cache.row_index,
            torch.from_numpy(source),
            torch.tensor([2 * sequence.number for sequence in sequence_of]) + torch.from_numpy(is_uncond),
            prefix,
            uniform_value(prefix),
            torch.from_numpy(code_row.ravel()).to(device),
            None if is_identity else torch.from_numpy(logit_row).to(device),
            None if forced is None else forced.T.contiguous().to(device),
            None if forced is None else (forced >= 0).any(0).numpy(),
            torch.tensor(list(guided), dtype=torch.long, device=device),
            torch.tensor(list(guided.values()), dtype=torch.long, device=device),
            torch.tensor([sequence.guidance_scale for sequence in frames], device=device),
            frames,
            tuple((row, sequence) for row, sequence in enumerate(sequence_of) if sequence.ended),
        )

    def _forced_codes(self, members: Sequence[tuple[_FrameSequence, int]]) -> Tensor | None:
        """The codes that are fed whatever is chosen [R, L] (host); None: there are none."""
        lines = [
            torch.zeros(0, dtype=torch.long)
            if sequence.frames.forced is None
            else sequence.frames.forced[index]
            for sequence, index in members
        ]
        if not any(len(line) for line in lines):
            return None
        return torch.nn.utils.rnn.pad_sequence(lines, batch_first=True, padding_value=-1)

    def _pending_codes(self, rows: Rows, layout: _Layout) -> Tensor:
        """The codes [N, T, C] of each network row that are not cached yet, from the first of these on."""
        uniform = rows.uniform_length
        if uniform is not None:
            tokens = rows.tokens[:, uniform.cached_length : uniform.length]
            columns = np.arange(uniform.cached_length, uniform.length)[None]
        else:
            width = int((rows.length - rows.cached_length).max())
            columns = rows.cached_length.numpy()[:, None] + np.arange(width)
            index = torch.from_numpy(columns).clamp(max=rows.tokens.shape[1] - 1).to(self.device)
            tokens = rows.tokens.gather(1, index)
        if layout.forced is not None and layout.is_forced is not None:
            inside = columns[columns < len(layout.is_forced)]
            if layout.is_forced[inside].any():
                tokens = self._with_forced(rows, tokens, columns, layout.forced)
        count, width = len(layout.source), tokens.shape[1]
        if layout.incomplete or self.family.num_rows < self.family.num_codebooks:
            # One more line for the codes of no row; their pad tokens are written below.
            tokens = torch.cat((tokens, tokens.new_zeros(1, width)))
        codes = tokens.index_select(0, layout.code_row).view(count, -1, width).transpose(1, 2)
        if self.family.num_rows < self.family.num_codebooks:
            self._add_more_codes(codes, rows, layout)
        if layout.incomplete:
            self._add_ended_codes(codes, rows, layout)
        return codes

    def _with_forced(self, rows: Rows, tokens: Tensor, columns: Array, forced: Tensor) -> Tensor:
        """The tokens [R, T] at these columns [1 or R, T] (host), replaced by forced ones [L, R]."""
        places = torch.from_numpy(columns).to(self.device)
        inside = (places < len(forced)).expand(tokens.shape)
        values = forced[
            places.clamp(max=len(forced) - 1), torch.arange(len(rows), device=self.device)[:, None]
        ]
        tokens = torch.where((values >= 0) & inside, values, tokens)
        if self.family.processes_forced:
            # In the table, where processors read them; beyond a row's end this is no token yet.
            index = places.clamp(max=rows.tokens.shape[1] - 1).expand(tokens.shape)
            rows.tokens.scatter_(1, index, tokens)
        return tokens

    def _add_ended_codes(self, codes: Tensor, rows: Rows, layout: _Layout) -> None:
        """Write the codes of codebooks that have ended into frames [N, T, C]: the last one, then padding."""
        for network_row, sequence in layout.incomplete:
            row = int(layout.source[network_row])
            first = int(rows.cached_length[row] - rows.prompt_length[row])
            for codebook, (num_new, last) in sequence.ended.items():
                codes[network_row, :, codebook] = sequence.frames.pad_token_id
                if 0 <= num_new - 1 - first < codes.shape[1]:
                    codes[network_row, num_new - 1 - first, codebook] = last

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


def _network_rows(rows: Rows, layout: _Layout) -> Rows:
    """The rows of the network [N], with the lengths of those that they serve."""
    source, prefix = layout.source, layout.prefix
    cached = rows.cached_length[source]
    return Rows(
        rows.tokens[:1].expand(len(source), -1),  # not read: codes are fed
        length=rows.length[source],
        cached_length=torch.where(cached > 0, cached + prefix, 0),
        offset=prefix,
        prompt_length=rows.prompt_length[source],
        request=layout.request,
        slot=torch.zeros_like(source),
        columns={},
        version=(rows.version, "network"),
    )


_FAMILIES: Final[Mapping[str, Callable[[Any], CodebookFamily]]] = {
    "CsmForConditionalGeneration": CsmFamily,
    "DiaForConditionalGeneration": DiaFamily,
    "HiggsAudioV2ForConditionalGeneration": HiggsAudioFamily,
    "MusicgenForCausalLM": MusicgenFamily,
    "MusicgenForConditionalGeneration": MusicgenFamily,
    "MusicgenMelodyForCausalLM": MelodyFamily,
    "MusicgenMelodyForConditionalGeneration": MelodyFamily,
}

_DECODING_METHODS: Final = ("forward", "_sample", "prepare_inputs_for_generation")


def codebook_family_of(model: Any) -> CodebookFamily | None:
    """The family of a model that predicts several codebooks a step; None: it predicts one token."""
    name = decoding_base(type(model), _FAMILIES, _DECODING_METHODS)
    return None if name is None else _FAMILIES[name](model)
