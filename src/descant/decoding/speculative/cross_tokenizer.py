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

from descant.core.context import params_of
from descant.core.interfaces import Cache, Facts, Model, Noise
from descant.core.records import Aid, Proposal
from descant.core.rows import Rows, pick, settle
from descant.decoding.speculative.draft_loop import Guessing, room
from descant.decoding.speculative.token_alignment import Interpreter, Reading, Tongue, Windows, common
from descant.errors import InputError, UnsupportedModel
from descant.kv_cache.row_subset import portion

__all__ = ["Intersection", "Translation", "check_assistant", "check_intersection"]


def check_assistant(facts: Facts) -> None:
    """Raise for a draft model that cannot be shown a text encoded anew."""
    if facts.encoder_decoder and facts.main == "input_ids":
        raise UnsupportedModel(
            "a draft model whose encoder reads tokens needs the target's own tokenizer: leave out "
            "`assistant_tokenizer`, or give a draft model that has no encoder"
        )


def check_intersection(tokenizer: Any, assistant_tokenizer: Any) -> None:
    """Raise for tokenizers that have no token in common."""
    if not common(Tongue(tokenizer), Tongue(assistant_tokenizer)):
        raise _stranger(assistant_tokenizer)


def _stranger(tokenizer: Any) -> InputError:
    must = "must have tokens in common with `tokenizer`"
    return InputError("assistant_tokenizer", must, tokenizer, "draft with another model")


@dataclass
class _Line:
    """A row as the assistant sees it, and what of it the assistant's cache holds."""

    reading: Reading
    windows: Windows = field(default_factory=Windows)
    fed: list[int] = field(default_factory=list)  # the tokens that the cache holds of it
    held: int = 0  # how many it holds in all, before it is cut
    pending: list[int] = field(default_factory=list)  # what is to be fed next
    place: int = -1  # its row in the cache; -1: none
    seat: int = -1  # its row in the store of tokens

    def fork(self) -> _Line:
        """The same line once more; a row of its own it gets when rows are moved."""
        return replace(self, reading=self.reading.fork(), fed=list(self.fed))

    def cut(self, kept: int, ids: Sequence[int]) -> None:
        """Forget what was fed beyond the ids as they are now, of which `kept` are as they were."""
        stop = min(len(self.fed), len(ids) - 1)  # the last is fed again, for what it says
        same = min(kept, stop)
        while same < stop and self.fed[same] == ids[same]:
            same += 1
        del self.fed[same:]


class _Assistant:
    """The draft model with its rows and its cache, which follow the target's rows by their text.

    What the cache holds of a row and what the row's text comes to now are two sequences of the assistant's
    tokens: it is cut to what they have in common, whatever has become of the row in between.
    """

    cheap = False

    def __init__(self, model: Model, cache: Cache, tokenizer: Any, assistant_tokenizer: Any) -> None:
        check_assistant(model.facts)
        self.forwards = 0
        self._model, self._cache = model, cache
        self._between = Interpreter(Tongue(tokenizer), Tongue(assistant_tokenizer))
        tongue = self._between.assistant
        # What a row without any token begins with.
        self._start = [next((one for one in (tongue.bos, tongue.eos) if one is not None), 0)]
        self._lines: list[_Line] = []
        self._store = torch.zeros(0, 0, dtype=torch.long, device=model.device)  # [R, C]
        self._own: Rows | None = None  # the assistant's rows, while it guesses

    def open(self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]]) -> None:
        """Take what new requests give an encoder; tokens and embeddings are the target's alone."""
        self._model.open(requests, inputs if self._model.facts.encoder_decoder else {})

    def close(self, requests: Sequence[int]) -> None:
        """Forget those requests."""
        self._model.close(requests)

    def commit(self, parents: Tensor, lengths: Tensor) -> None:  # noqa: ARG002 - the tokens say it all
        """Follow the rows; what was decided is read when the next guess is asked for."""
        old, taken, lines = self._lines, set[int](), list[_Line]()
        for parent in parents.tolist():
            if parent < 0:
                lines.append(_Line(self._between.new()))
            else:
                lines.append(old[parent].fork() if parent in taken else old[parent])
                taken.add(parent)
        self._lines = lines

    # -------------------------------------------------------------------- what is decided
    def _followed(self, rows: Rows, most: Tensor) -> Tensor:
        """Read what has been decided: how many tokens each row can try now, at most `most` [R] (host)."""
        if not bool(most.any()):
            return most
        params = params_of(rows).values
        sizes = [
            _column(params.get(f"{whose}_lookbehind"), 10, len(rows)) for whose in ("target", "assistant")
        ]
        for line, target, assistant in zip(self._lines, *sizes, strict=True):
            line.windows = Windows(max(1, int(target)), max(1, int(assistant)))
        lines = most.nonzero().squeeze(1).tolist()
        for row, kept in zip(lines, self._read(rows, lines), strict=True):
            self._lines[row].cut(kept, self._ids(row))
        length = torch.tensor([len(self._ids(row)) for row in range(len(rows))])
        whole = torch.tensor([line.reading.whole for line in self._lines])
        most = torch.where(whole, room(most, length, self._model.facts.table), 0)
        active = most.nonzero().squeeze(1).tolist()
        if active:
            self._place(active)
            self._seat(rows, active)
        return most

    def _ids(self, row: int) -> list[int]:
        return self._lines[row].reading.ids or self._start

    def _read(self, rows: Rows, lines: Sequence[int]) -> list[int]:
        """Read what rows have decided since; how many of their ids are as they were."""
        readings = [self._lines[row].reading for row in lines]
        length, known = rows.length[lines].tolist(), [len(reading.tokens) for reading in readings]
        first = [
            max(0, min(have, now) - self._lines[row].windows.target)
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
            line = self._lines[row]
            new = tokens[: now - start]
            if line.reading.tokens[start:] == new[: have - start]:
                kept.append(self._between.read(line.reading, new[have - start :], line.windows))
                continue
            # The row does not go on from where it was: it is read from its beginning.
            line.reading = self._between.new()
            self._between.read(line.reading, rows.tokens[row, :now].tolist(), line.windows)
            kept.append(0)
        return kept

    def _place(self, active: Sequence[int]) -> None:
        """Give every line its row in the cache, cut to what it was fed."""
        for row in active if self._cache.rewind is not None else ():
            line = self._lines[row]
            # A state that cannot be cut, and that reads one token at a time after its first: begin again.
            if len(line.fed) < line.held or len(line.fed) + 1 < len(self._ids(row)):
                line.place, line.held = -1, 0
                line.fed.clear()
        held = [line for line in self._lines if line.place >= 0]
        whence = torch.tensor([line.place for line in held], dtype=torch.long)
        cuts = torch.tensor([len(line.fed) for line in held], dtype=torch.long)
        order = settle(whence, len(self._cache))
        self._cache.commit(*((None, cuts) if order is None else (whence[order], cuts[order])))
        for place, at in enumerate(range(len(held)) if order is None else order.tolist()):
            held[at].place = place
        fresh = [line for line in self._lines if line.place < 0]
        if fresh:
            self._cache.extend(len(fresh))
        for place, line in enumerate(fresh, len(held)):
            line.place = place

    def _seat(self, rows: Rows, active: Sequence[int]) -> None:
        """The assistant's rows, with the tokens of those that go on which the cache does not hold."""
        lines, device = self._lines, self._model.device
        seats = torch.tensor([line.seat for line in lines])
        if len(self._store) != len(lines) or not torch.equal(seats, torch.arange(len(lines))):
            empty = self._store.new_zeros(1, self._store.shape[1])
            self._store = torch.cat((self._store, empty))[seats.to(device)]  # the last is of no row
        for seat, line in enumerate(lines):
            line.seat = seat
        cached = torch.tensor([len(line.fed) for line in lines])
        for row in active:
            lines[row].pending = self._ids(row)[len(lines[row].fed) :]
        pending = [lines[row].pending for row in active]
        width = max(map(len, pending))
        need, have = int(cached.max()) + width, self._store.shape[1]
        if need > have:
            self._store = torch.nn.functional.pad(self._store, (0, need + need // 2 - have))
        block = torch.tensor([part + [0] * (width - len(part)) for part in pending])
        block = block.clamp(max=self._model.facts.vocabulary - 1).to(device)  # of a model that lacks tokens
        index = torch.tensor(active)
        at = cached[index][:, None] + torch.arange(width)
        self._store[index[:, None].to(device), at.to(device)] = block
        length = cached.clone()
        length[index] += torch.tensor([len(part) for part in pending])
        nothing = torch.zeros_like(length)
        self._own = Rows(self._store, length, cached, nothing, length, rows.request, rows.slot)

    # -------------------------------------------------------------------- what may follow
    def _asked(self, index: Tensor) -> Tensor:
        """Feed some rows what is pending: the logits [N, V'] of their last positions."""
        own = self._own
        assert own is not None
        part = own if len(index) == len(own) else own.take(index)
        lines = [self._lines[row] for row in index.tolist()]
        place = torch.tensor([line.place for line in lines])
        self.forwards += 1
        logits = self._model.forward(part, Proposal(), portion(self._cache, place)).logits[:, 0]
        for line in lines:
            line.fed += line.pending
            line.held, line.pending = len(line.fed), []
        cached = own.cached.clone()
        cached[index] = own.length[index]
        self._own = own.changed(cached=cached)
        return logits

    def _said(self, index: Tensor, tokens: Tensor, host: Sequence[int]) -> None:
        """Take a further token [N] of the assistant's after some rows."""
        own = self._own
        assert own is not None
        for row, token in zip(index.tolist(), host, strict=True):
            self._lines[row].pending = [token]
        whole = tokens.new_zeros(len(own)).index_copy(0, index.to(tokens.device), tokens)
        length = own.length.clone()
        length[index] += 1
        self._own = own.append(whole[:, None], length)
        self._store = self._own.tokens


class Translation(_Assistant):
    """A draft model with another tokenizer, which is shown the text and whose text is tried.

    It goes on greedily, for rows that sample as well: what it guesses hangs on nothing but the text. Tried
    are the target's tokens that begin just where the row ends; where its last token would be another with
    the text that follows, none are.
    """

    def __init__(
        self,
        model: Model,
        cache: Cache,
        tokenizer: Any,
        assistant_tokenizer: Any,
        vocabulary: int | None = None,
    ) -> None:
        super().__init__(model, cache, tokenizer, assistant_tokenizer)
        # How many tokens the target's model knows; its tokenizer may have been given more.
        self._size = len(self._between.target.bytes) if vocabulary is None else vocabulary

    @torch.no_grad()
    def draft(self, rows: Rows, most: Tensor, aid: Aid) -> Proposal:  # noqa: ARG002 - the port
        """Tokens that may follow each row, at most so many [R] (host)."""
        most = self._followed(rows, most)
        guesses: list[list[int]] = [[] for _ in self._lines]
        least = _column(params_of(rows).values.get("assistant_confidence_threshold"), -1.0, len(rows))
        active = most.nonzero().squeeze(1)
        while len(active):
            logits = self._asked(active)
            best, tokens = logits.max(-1)
            sure = (best - logits.logsumexp(-1)).exp()
            host, likely = tokens.tolist(), sure.tolist()
            goes = []
            for at, row in enumerate(active.tolist()):
                mine = guesses[row]
                mine.append(host[at])
                more = len(mine) < most[row] and likely[at] >= least[row]
                if more and self._between.assistant.is_text(host[at]):
                    goes.append(at)
            on = torch.tensor(goes, dtype=torch.long)
            active = active[on]
            if goes:
                self._said(active, tokens[on.to(tokens.device)], [host[at] for at in goes])
        answers = [
            self._answer(line, mine)[:tries] if mine else []
            for line, mine, tries in zip(self._lines, guesses, most.tolist(), strict=True)
        ]
        n = torch.tensor([len(one) for one in answers], dtype=torch.long)
        width = int(n.max()) if len(n) else 0
        if not width:
            return Proposal()
        drafts = torch.tensor([one + [0] * (width - len(one)) for one in answers])
        return Proposal(None, drafts.to(rows.tokens.device), n)

    def _answer(self, line: _Line, guesses: Sequence[int]) -> list[int]:
        """The target's tokens for what the assistant guesses, up to one that its model does not know."""
        found = self._between.answer(line.reading, guesses, line.windows)
        return list(itertools.takewhile(lambda token: token < self._size, found))


class Intersection(_Assistant):
    """A draft model with another tokenizer, whose law is kept to the tokens that the target has, too.

    It is shown the text in its own tokens; a token that it draws is the target's of the same bytes, so that
    its law is known and sampling with it exact.
    """

    def __init__(
        self,
        model: Model,
        cache: Cache,
        noise: Noise,
        tokenizer: Any,
        assistant_tokenizer: Any,
        vocabulary: int,
    ) -> None:
        super().__init__(model, cache, tokenizer, assistant_tokenizer)
        self._guessing = Guessing(noise, vocabulary)
        pairs = common(self._between.target, self._between.assistant).items()
        both = [(one, other) for one, other in pairs if one < model.facts.vocabulary and other < vocabulary]
        if not both:
            raise _stranger(assistant_tokenizer)
        self._theirs, self._ours = torch.tensor(both).to(model.device).T.contiguous()
        self._known = torch.full((vocabulary,), -1, device=model.device)  # the assistant's token by ours
        self._known[self._ours] = self._theirs

    def draft(self, rows: Rows, most: Tensor, aid: Aid) -> Proposal:
        """Tokens that may follow each row, at most so many [R] (host)."""
        most = self._followed(rows, most)
        return self._guessing.run(rows, most, aid, lambda grown, index: self._law(rows, grown, index))

    def _law(self, rows: Rows, grown: Rows, index: Tensor) -> Tensor:
        """The assistant's logits [N, V] after some rows, of which it knows nothing but what both can say."""
        device, here = self._model.device, torch.arange(len(index))
        if grown is not rows:
            last = grown.tokens.gather(1, (grown.length - 1).to(grown.tokens.device)[:, None])[:, 0]
            tokens = self._known[pick(last, index).to(device)]
            host = tokens.tolist()
            # A token that only a processor can have put there: the assistant cannot go on from it.
            here = torch.tensor([at for at, token in enumerate(host) if token >= 0], dtype=torch.long)
            if len(here):
                self._said(index[here], tokens[here.to(device)], [host[at] for at in here.tolist()])
        laws = torch.full((len(index), self._guessing.vocabulary), -torch.inf, device=device)
        if len(here):
            logits = self._asked(index[here])
            laws[here.to(device)[:, None], self._ours] = logits[:, self._theirs]
        return laws


def _column(values: Any, default: float, count: int) -> list[float]:
    """A parameter of each row; below 0, or absent, it is the default."""
    if values is None:
        return [default] * count
    return [default if value < 0 else value for value in values.tolist()]
