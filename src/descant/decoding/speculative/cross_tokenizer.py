"""Drafters whose model has another tokenizer than the target: by text, or by the tokens that both have.

By text: the target's tokens are decoded and encoded anew for the assistant, which goes on greedily, and what
it says is encoded anew for the target (universal assisted decoding). By tokens: the assistant's law is kept
to the tokens that both vocabularies have and drawn from as it is, so that sampling stays lossless (Timor et
al. 2025, Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous
Vocabularies; token-level intersection).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from descant.core.context import row_params
from descant.core.interfaces import Model, ModelTraits, NoiseSource, RowCache
from descant.core.records import DraftContext, Proposal
from descant.core.rows import Rows, index_rows, stable_row_order
from descant.decoding.speculative.draft_loop import DraftLoop, limit_to_positions
from descant.decoding.speculative.token_alignment import (
    AlignedRow,
    ByteTokenizer,
    LookbehindWindows,
    TokenTranslator,
    shared_tokens,
)
from descant.errors import InputError, UnsupportedModel
from descant.kv_cache.row_subset import row_subset

__all__ = ["RetokenizingDrafter", "SharedVocabDrafter", "check_draft_model", "check_shared_vocab"]


def check_draft_model(facts: ModelTraits) -> None:
    """Raise for a draft model that cannot be shown a text encoded anew."""
    if facts.is_encoder_decoder and facts.main_input_name == "input_ids":
        raise UnsupportedModel(
            "a draft model whose encoder reads tokens needs the target's own tokenizer: leave out "
            "`assistant_tokenizer`, or give a draft model that has no encoder"
        )


def check_shared_vocab(tokenizer: Any, assistant_tokenizer: Any) -> None:
    """Raise for tokenizers that have no token in common."""
    if not shared_tokens(ByteTokenizer(tokenizer), ByteTokenizer(assistant_tokenizer)):
        raise _no_shared_tokens_error(assistant_tokenizer)


def _no_shared_tokens_error(tokenizer: Any) -> InputError:
    must = "must have tokens in common with `tokenizer`"
    return InputError("assistant_tokenizer", must, tokenizer, "draft with another model")


@dataclass
class _DraftRow:
    """A row as the assistant sees it, and what of it the assistant's cache holds."""

    aligned_row: AlignedRow
    lookbehind: LookbehindWindows = field(default_factory=LookbehindWindows)
    cached_tokens: list[int] = field(default_factory=list)  # the tokens that the cache holds of it
    cached_length: int = 0  # how many it holds in all, before it is cut
    pending_tokens: list[int] = field(default_factory=list)  # what is to be fed next
    cache_row: int = -1  # its row in the cache; -1: none
    buffer_row: int = -1  # its row in the store of tokens

    def fork(self) -> _DraftRow:
        """The same line once more; a row of its own it gets when rows are moved."""
        return replace(self, aligned_row=self.aligned_row.fork(), cached_tokens=list(self.cached_tokens))

    def truncate(self, kept: int, ids: Sequence[int]) -> None:
        """Forget what was fed beyond the ids as they are now, of which `kept` are as they were."""
        stop = min(len(self.cached_tokens), len(ids) - 1)  # the last is fed again, for what it says
        same = min(kept, stop)
        while same < stop and self.cached_tokens[same] == ids[same]:
            same += 1
        del self.cached_tokens[same:]


class _CrossTokenizerDrafter:
    """The draft model with its rows and its cache, which follow the target's rows by their text.

    What the cache holds of a row and what the row's text comes to now are two sequences of the assistant's
    tokens: it is cut to what they have in common, whatever has become of the row in between.
    """

    is_model_free = False

    def __init__(self, model: Model, cache: RowCache, tokenizer: Any, assistant_tokenizer: Any) -> None:
        check_draft_model(model.traits)
        self.forwards = 0
        self._model, self._cache = model, cache
        self._translator = TokenTranslator(ByteTokenizer(tokenizer), ByteTokenizer(assistant_tokenizer))
        tongue = self._translator.assistant
        # What a row without any token begins with.
        self._empty_row_ids = [
            next((one for one in (tongue.bos_token_id, tongue.eos_token_id) if one is not None), 0)
        ]
        self._draft_rows: list[_DraftRow] = []
        self._token_buffer = torch.zeros(0, 0, dtype=torch.long, device=model.device)  # [R, C]
        self._assistant_rows: Rows | None = None  # the assistant's rows, while it guesses

    def add_requests(self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]]) -> None:
        """Take what new requests give an encoder; tokens and embeddings are the target's alone."""
        self._model.add_requests(requests, inputs if self._model.traits.is_encoder_decoder else {})

    def remove_requests(self, requests: Sequence[int]) -> None:
        """Forget those requests."""
        self._model.remove_requests(requests)

    def commit(self, parents: Tensor, lengths: Tensor) -> None:  # noqa: ARG002 - the tokens say it all
        """Follow the rows; what was decided is read when the next guess is asked for."""
        old, taken, lines = self._draft_rows, set[int](), list[_DraftRow]()
        for parent in parents.tolist():
            if parent < 0:
                lines.append(_DraftRow(self._translator.new_row()))
            else:
                lines.append(old[parent].fork() if parent in taken else old[parent])
                taken.add(parent)
        self._draft_rows = lines

    # -------------------------------------------------------------------- what is decided
    def _sync_rows(self, rows: Rows, most: Tensor) -> Tensor:
        """Read what has been decided: how many tokens each row can try now, at most `most` [R] (host)."""
        if not bool(most.any()):
            return most
        params = row_params(rows).values
        sizes = [
            _param_values(params.get(f"{whose}_lookbehind"), 10, len(rows))
            for whose in ("target", "assistant")
        ]
        for line, target, assistant in zip(self._draft_rows, *sizes, strict=True):
            line.lookbehind = LookbehindWindows(max(1, int(target)), max(1, int(assistant)))
        lines = most.nonzero().squeeze(1).tolist()
        for row, kept in zip(lines, self._read_new_tokens(rows, lines), strict=True):
            self._draft_rows[row].truncate(kept, self._row_ids(row))
        length = torch.tensor([len(self._row_ids(row)) for row in range(len(rows))])
        whole = torch.tensor([line.aligned_row.is_complete for line in self._draft_rows])
        most = torch.where(whole, limit_to_positions(most, length, self._model.traits.max_positions), 0)
        active = most.nonzero().squeeze(1).tolist()
        if active:
            self._arrange_cache(active)
            self._build_assistant_rows(rows, active)
        return most

    def _row_ids(self, row: int) -> list[int]:
        return self._draft_rows[row].aligned_row.assistant_ids or self._empty_row_ids

    def _read_new_tokens(self, rows: Rows, lines: Sequence[int]) -> list[int]:
        """Read what rows have decided since; how many of their ids are as they were."""
        readings = [self._draft_rows[row].aligned_row for row in lines]
        length, known = rows.length[lines].tolist(), [len(reading.target_ids) for reading in readings]
        first = [
            max(0, min(have, now) - self._draft_rows[row].lookbehind.target)
            for row, have, now in zip(lines, known, length, strict=True)
        ]
        width = max(1, *(now - start for now, start in zip(length, first, strict=True)))
        at = torch.tensor(first)[:, None] + torch.arange(width)
        some = torch.tensor(lines)[:, None]
        store = rows.tokens if rows.tokens.shape[1] else rows.tokens.new_zeros(len(rows), 1)
        at = at.clamp(max=store.shape[1] - 1)
        seen = store[some.to(store.device), at.to(store.device)].tolist()
        kept = []
        for row, have, now, start, tokens in zip(lines, known, length, first, seen, strict=True):
            line = self._draft_rows[row]
            new = tokens[: now - start]
            if line.aligned_row.target_ids[start:] == new[: have - start]:
                kept.append(
                    self._translator.append_tokens(line.aligned_row, new[have - start :], line.lookbehind)
                )
                continue
            # The row does not go on from where it was: it is read from its beginning.
            line.aligned_row = self._translator.new_row()
            self._translator.append_tokens(line.aligned_row, rows.tokens[row, :now].tolist(), line.lookbehind)
            kept.append(0)
        return kept

    def _arrange_cache(self, active: Sequence[int]) -> None:
        """Give every line its row in the cache, cut to what it was fed."""
        for row in active if self._cache.max_rewind is not None else ():
            line = self._draft_rows[row]
            # A state that cannot be cut, and that reads one token at a time after its first: begin again.
            if len(line.cached_tokens) < line.cached_length or len(line.cached_tokens) + 1 < len(
                self._row_ids(row)
            ):
                line.cache_row, line.cached_length = -1, 0
                line.cached_tokens.clear()
        held = [line for line in self._draft_rows if line.cache_row >= 0]
        whence = torch.tensor([line.cache_row for line in held], dtype=torch.long)
        cuts = torch.tensor([len(line.cached_tokens) for line in held], dtype=torch.long)
        order = stable_row_order(whence, len(self._cache))
        self._cache.commit(*((None, cuts) if order is None else (whence[order], cuts[order])))
        for place, at in enumerate(range(len(held)) if order is None else order.tolist()):
            held[at].cache_row = place
        fresh = [line for line in self._draft_rows if line.cache_row < 0]
        if fresh:
            self._cache.extend(len(fresh))
        for place, line in enumerate(fresh, len(held)):
            line.cache_row = place

    def _build_assistant_rows(self, rows: Rows, active: Sequence[int]) -> None:
        """The assistant's rows, with the tokens of those that go on which the cache does not hold."""
        lines, device = self._draft_rows, self._model.device
        seats = torch.tensor([line.buffer_row for line in lines])
        if len(self._token_buffer) != len(lines) or not torch.equal(seats, torch.arange(len(lines))):
            empty = self._token_buffer.new_zeros(1, self._token_buffer.shape[1])
            self._token_buffer = torch.cat((self._token_buffer, empty))[
                seats.to(device)
            ]  # the last is of no row
        for seat, line in enumerate(lines):
            line.buffer_row = seat
        cached = torch.tensor([len(line.cached_tokens) for line in lines])
        for row in active:
            lines[row].pending_tokens = self._row_ids(row)[len(lines[row].cached_tokens) :]
        pending = [lines[row].pending_tokens for row in active]
        width = max(map(len, pending))
        need, have = int(cached.max()) + width, self._token_buffer.shape[1]
        if need > have:
            self._token_buffer = torch.nn.functional.pad(self._token_buffer, (0, need + need // 2 - have))
        block = torch.tensor([part + [0] * (width - len(part)) for part in pending])
        block = block.clamp(max=self._model.traits.vocab_size - 1).to(device)  # of a model that lacks tokens
        index = torch.tensor(active)
        at = cached[index][:, None] + torch.arange(width)
        self._token_buffer[index[:, None].to(device), at.to(device)] = block
        length = cached.clone()
        length[index] += torch.tensor([len(part) for part in pending])
        nothing = torch.zeros_like(length)
        self._assistant_rows = Rows(
            self._token_buffer, length, cached, nothing, length, rows.request, rows.slot
        )

    # -------------------------------------------------------------------- what may follow
    def _forward_pending(self, index: Tensor) -> Tensor:
        """Feed some rows what is pending: the logits [N, V'] of their last positions."""
        own = self._assistant_rows
        assert own is not None
        part = own if len(index) == len(own) else own.take(index)
        lines = [self._draft_rows[row] for row in index.tolist()]
        place = torch.tensor([line.cache_row for line in lines])
        self.forwards += 1
        logits = self._model.forward(part, Proposal(), row_subset(self._cache, place)).logits[:, 0]
        for line in lines:
            line.cached_tokens += line.pending_tokens
            line.cached_length, line.pending_tokens = len(line.cached_tokens), []
        cached = own.cached_length.clone()
        cached[index] = own.length[index]
        self._assistant_rows = own.replace(cached_length=cached)
        return logits

    def _append_tokens(self, index: Tensor, tokens: Tensor, host: Sequence[int]) -> None:
        """Take a further token [N] of the assistant's after some rows."""
        own = self._assistant_rows
        assert own is not None
        for row, token in zip(index.tolist(), host, strict=True):
            self._draft_rows[row].pending_tokens = [token]
        whole = tokens.new_zeros(len(own)).index_copy(0, index.to(tokens.device), tokens)
        length = own.length.clone()
        length[index] += 1
        self._assistant_rows = own.append(whole[:, None], length)
        self._token_buffer = self._assistant_rows.tokens


class RetokenizingDrafter(_CrossTokenizerDrafter):
    """A draft model with another tokenizer, which is shown the text and whose text is tried.

    It goes on greedily, for rows that sample as well: what it guesses hangs on nothing but the text. Tried
    are the target's tokens that begin just where the row ends; where its last token would be another with
    the text that follows, none are.
    """

    def __init__(
        self,
        model: Model,
        cache: RowCache,
        tokenizer: Any,
        assistant_tokenizer: Any,
        vocabulary: int | None = None,
    ) -> None:
        super().__init__(model, cache, tokenizer, assistant_tokenizer)
        # How many tokens the target's model knows; its tokenizer may have been given more.
        self._target_vocab_size = (
            len(self._translator.target.token_bytes) if vocabulary is None else vocabulary
        )

    @torch.no_grad()
    def draft(self, rows: Rows, most: Tensor, aid: DraftContext) -> Proposal:  # noqa: ARG002 - the port
        """Tokens that may follow each row, at most so many [R] (host)."""
        most = self._sync_rows(rows, most)
        guesses: list[list[int]] = [[] for _ in self._draft_rows]
        least = _param_values(row_params(rows).values.get("assistant_confidence_threshold"), -1.0, len(rows))
        active = most.nonzero().squeeze(1)
        while len(active):
            logits = self._forward_pending(active)
            best, tokens = logits.max(-1)
            sure = (best - logits.logsumexp(-1)).exp()
            host, likely = tokens.tolist(), sure.tolist()
            goes = []
            for at, row in enumerate(active.tolist()):
                mine = guesses[row]
                mine.append(host[at])
                more = len(mine) < most[row] and likely[at] >= least[row]
                if more and self._translator.assistant.is_text(host[at]):
                    goes.append(at)
            on = torch.tensor(goes, dtype=torch.long)
            active = active[on]
            if goes:
                self._append_tokens(active, tokens[on.to(tokens.device)], [host[at] for at in goes])
        answers = [
            self._to_target_tokens(line, mine)[:tries] if mine else []
            for line, mine, tries in zip(self._draft_rows, guesses, most.tolist(), strict=True)
        ]
        n = torch.tensor([len(one) for one in answers], dtype=torch.long)
        width = int(n.max()) if len(n) else 0
        if not width:
            return Proposal()
        drafts = torch.tensor([one + [0] * (width - len(one)) for one in answers])
        return Proposal(None, drafts.to(rows.tokens.device), n)

    def _to_target_tokens(self, line: _DraftRow, guesses: Sequence[int]) -> list[int]:
        """The target's tokens for what the assistant guesses, up to one that its model does not know."""
        found = self._translator.to_target_tokens(line.aligned_row, guesses, line.lookbehind)
        return list(itertools.takewhile(lambda token: token < self._target_vocab_size, found))


class SharedVocabDrafter(_CrossTokenizerDrafter):
    """A draft model with another tokenizer, whose law is kept to the tokens that the target has, too.

    It is shown the text in its own tokens; a token that it draws is the target's of the same bytes, so that
    its law is known and sampling with it exact.
    """

    def __init__(
        self,
        model: Model,
        cache: RowCache,
        noise: NoiseSource,
        tokenizer: Any,
        assistant_tokenizer: Any,
        vocabulary: int,
    ) -> None:
        super().__init__(model, cache, tokenizer, assistant_tokenizer)
        self._draft_loop = DraftLoop(noise, vocabulary)
        pairs = shared_tokens(self._translator.target, self._translator.assistant).items()
        both = [(one, other) for one, other in pairs if one < model.traits.vocab_size and other < vocabulary]
        if not both:
            raise _no_shared_tokens_error(assistant_tokenizer)
        self._shared_assistant_ids, self._shared_target_ids = (
            torch.tensor(both).to(model.device).T.contiguous()
        )
        self._assistant_by_target = torch.full(
            (vocabulary,), -1, device=model.device
        )  # the assistant's token by ours
        self._assistant_by_target[self._shared_target_ids] = self._shared_assistant_ids

    def draft(self, rows: Rows, most: Tensor, aid: DraftContext) -> Proposal:
        """Tokens that may follow each row, at most so many [R] (host)."""
        most = self._sync_rows(rows, most)
        return self._draft_loop.run(
            rows, most, aid, lambda grown, index: self._shared_logits(rows, grown, index)
        )

    def _shared_logits(self, rows: Rows, grown: Rows, index: Tensor) -> Tensor:
        """The assistant's logits [N, V] after some rows, of which it knows nothing but what both can say."""
        device, here = self._model.device, torch.arange(len(index))
        if grown is not rows:
            last = grown.tokens.gather(1, (grown.length - 1).to(grown.tokens.device)[:, None])[:, 0]
            tokens = self._assistant_by_target[index_rows(last, index).to(device)]
            host = tokens.tolist()
            # A token that only a processor can have put there: the assistant cannot go on from it.
            here = torch.tensor([at for at, token in enumerate(host) if token >= 0], dtype=torch.long)
            if len(here):
                self._append_tokens(index[here], tokens[here.to(device)], [host[at] for at in here.tolist()])
        laws = torch.full((len(index), self._draft_loop.vocab_size), -torch.inf, device=device)
        if len(here):
            logits = self._forward_pending(index[here])
            laws[here.to(device)[:, None], self._shared_target_ids] = logits[:, self._shared_assistant_ids]
        return laws


def _param_values(values: Any, default: float, count: int) -> list[float]:
    """A parameter of each row; below 0, or absent, it is the default."""
    if values is None:
        return [default] * count
    return [default if value < 0 else value for value in values.tolist()]
