"""Allowed sequences: only what stands in a list, however long, can be written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import Tensor

from descant.config.generation_config import GenerationConfig
from descant.core.context import Context, PromptInfo
from descant.decoding.processors.base import LogitsProcessor, check_number
from descant.decoding.processors.lengths import TokenIds, as_id_list
from descant.errors import InputError

__all__ = ["AllowedSequences", "AllowedSequencesLogitsProcessor"]

Array = np.ndarray[Any, np.dtype[Any]]
MAX_TOKEN_ID = 2**31 - 1


class AllowedSequences:
    """A trie of token sequences, compiled: what may follow a prefix is a slice of one array.

    `sequences` are lists of tokens, or an integer array [N, L] padded with -1; they say all that may be
    generated, without the prompt. One may be a prefix of another. After each its end tokens may come, and
    after these nothing; an end token that a sequence closes with itself is taken for that. It is given as
    `prefix_allowed_tokens_fn` (De Cao et al. 2021, there as a trie of Python objects).

    Nodes are numbered in the order of their edges, level by level, the root being 0: edge `e` leads to
    node `e + 1`, and the edges of node `n`, by token, are `offsets[n]` to `offsets[n + 1]`. The last node is
    where everything ends that is in no sequence.
    """

    def __init__(self, sequences: Iterable[Sequence[int]] | Array | Tensor, eos_token_id: TokenIds) -> None:
        ends = np.unique(np.array(as_id_list(eos_token_id)))
        if not len(ends) or ends.dtype.kind != "i" or ends[0] < 0 or ends[-1] > MAX_TOKEN_ID:
            raise InputError("eos_token_id", "must name at least one token", eos_token_id)
        self._set_arrays(*_build_trie(_flatten_sequences(sequences, ends), ends), ends)

    def _set_arrays(self, offsets: Array, tokens: Array, widest: Array, ends: Array) -> None:
        self._offsets = offsets  # [nodes + 1]
        self._tokens = tokens  # [edges]
        self._max_children = widest  # [levels] the most edges of a node at each depth, 0 at last
        self._eos_token_ids = ends
        self._num_sequences = int(np.isin(tokens, ends).sum()) // len(ends)
        self._min_vocab_size = int(tokens.max()) + 1
        self._device_tries: dict[torch.device, _DeviceTrie] = {}

    # -------------------------------------------------------------------- what it holds
    def __len__(self) -> int:
        """How many different sequences there are."""
        return self._num_sequences

    def __contains__(self, sequence: object) -> bool:
        """Whether that is one of the sequences, as a whole; without an end token."""
        node = self._find_node(_check_ids(sequence, "sequence"))
        return node >= 0 and self._child(node, int(self._eos_token_ids[0])) >= 0

    def __repr__(self) -> str:
        return f"AllowedSequences({len(self)} sequences of up to {self.depth} tokens, {self.nbytes} bytes)"

    @property
    def nbytes(self) -> int:
        """The size of its arrays."""
        return int(self._offsets.nbytes + self._tokens.nbytes)

    @property
    def depth(self) -> int:
        """How many tokens the longest sequence has."""
        return len(self._max_children) - 2

    @property
    def min_vocab_size(self) -> int:
        """How large a vocabulary must be to have all its tokens."""
        return self._min_vocab_size

    @property
    def eos_token_id(self) -> list[int]:
        """The end tokens, ascending."""
        return [int(end) for end in self._eos_token_ids]

    # -------------------------------------------------------------------- asked by hand
    def allowed(self, prefix: Sequence[int]) -> list[int]:
        """The tokens that may follow these new tokens, ascending; none after an end or a stranger."""
        node = self._find_node(_check_ids(prefix, "prefix"))
        if node < 0:
            return []
        return [int(token) for token in self._tokens[self._offsets[node] : self._offsets[node + 1]]]

    def prefix_fn(self, prompt_length: int) -> Callable[[int, Any], list[int]]:
        """A function `(batch_id, ids)` for ids that begin with a prompt of that length."""
        check_number("prompt_length", prompt_length, 0, integer=True)
        return partial(self._allowed_after, prompt_length)

    def __call__(self, batch_id: int, ids: Any) -> list[int]:  # noqa: ARG002
        """Refused: ids alone do not say where the prompt ends. In a config the loop knows it."""
        do = "call `after(prompt_length)(batch_id, ids)`, or `allowed(new_ids)`"
        raise InputError("ids", "must come without a prompt, whose length nobody tells", ids, do)

    def _allowed_after(self, prompt_length: int, batch_id: int, ids: Any) -> list[int]:  # noqa: ARG002
        if len(ids) < prompt_length:
            raise InputError("ids", f"must begin with the {prompt_length} tokens of the prompt", ids)
        return self.allowed(ids[prompt_length:])

    def _find_node(self, prefix: Sequence[int]) -> int:
        """The node of a prefix, -1 where there is none."""
        node = 0
        for token in prefix:
            node = self._child(node, token)
            if node < 0:
                break
        return node

    def _child(self, node: int, token: int) -> int:
        first, last = int(self._offsets[node]), int(self._offsets[node + 1])
        at = first + int(np.searchsorted(self._tokens[first:last], token))
        return at + 1 if at < last and self._tokens[at] == token else -1

    # -------------------------------------------------------------------- asked for many lines at once
    def max_children(self, depth: int) -> int:
        """The most tokens that may follow so many."""
        return int(self._max_children[min(depth, len(self._max_children) - 1)])

    def walk(self, tokens: Tensor, count: Tensor) -> Tensor:
        """The nodes [N] that lines come to by the first `count` [N] of their tokens [N, T]."""
        nodes = torch.zeros(len(tokens), dtype=torch.long, device=tokens.device)
        for depth, chosen in enumerate(tokens.unbind(1)):
            nodes = torch.where(depth < count, self._child_nodes(nodes, chosen, depth), nodes)
        return nodes

    def first_token_mask(self, device: torch.device) -> Tensor:
        """Which tokens may come first, of the first `size` [size]."""
        return self._on_device(device).root_children < len(self._tokens) + 1

    def next_tokens(self, nodes: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """The tokens that may follow the nodes [N], the first repeated up to the width [N, W]; if any [N, 1].

        Where there are none it is token 0, which then is not allowed.
        """
        offsets, tokens, _ = self._on_device(nodes.device)
        first, last = offsets[nodes].long()[:, None], offsets[nodes + 1].long()[:, None]
        at = first + torch.arange(max(width, 1), device=nodes.device)
        at = torch.where(at < last, at, first).clamp(max=len(tokens) - 1)
        return torch.where(first < last, tokens[at].long(), 0), first < last

    def _child_nodes(self, nodes: Tensor, chosen: Tensor, depth: int) -> Tensor:
        """The nodes [N], so deep, after a token each [N]: by a table from the root, else by bisection."""
        offsets, tokens, first = self._on_device(nodes.device)
        nowhere = len(tokens) + 1
        if depth == 0:
            known = (chosen >= 0) & (chosen < len(first))
            return torch.where(known, first[chosen.clamp(0, len(first) - 1)], nowhere)
        low, last = offsets[nodes].long(), offsets[nodes + 1].long()
        high = last
        for _ in range(self.max_children(depth).bit_length()):
            middle = (low + high) >> 1
            below = (low < high) & (tokens[middle.clamp(max=len(tokens) - 1)] < chosen)
            low, high = torch.where(below, middle + 1, low), torch.where(below, high, middle)
        found = (low < last) & (tokens[low.clamp(max=len(tokens) - 1)] == chosen)
        return torch.where(found, low + 1, nowhere)

    def _on_device(self, device: torch.device) -> _DeviceTrie:
        """Its arrays on a device, where they are put once."""
        if device not in self._device_tries:
            first = np.full(self.min_vocab_size, len(self._tokens) + 1)
            edges = self._tokens[: self._offsets[1]]
            first[edges] = np.arange(1, len(edges) + 1)
            arrays = (self._offsets, self._tokens, first)
            self._device_tries[device] = _DeviceTrie(*(torch.from_numpy(one).to(device) for one in arrays))
        return self._device_tries[device]

    # -------------------------------------------------------------------- kept
    def save(self, path: str | Path) -> None:
        """Write it to a safetensors file."""
        arrays = {
            "offsets": self._offsets,
            "tokens": self._tokens,
            "widest": self._max_children,
            "eos_token_id": self._eos_token_ids,
        }
        save_file(arrays, path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote."""
        try:
            arrays = load_file(path)
        except (SafetensorError, ValueError, TypeError) as error:
            raise InputError("path", f"must be a file that `save` wrote ({error})", str(path)) from None
        names = ("offsets", "tokens", "widest", "eos_token_id")
        if set(arrays) != set(names) or not _is_valid_trie(*(arrays[name] for name in names)):
            raise InputError("path", "must be a file that `save` wrote", str(path))
        made = cls.__new__(cls)
        made._set_arrays(*(arrays[name] for name in names))
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_device_tries": {}}

    def __copy__(self) -> Self:
        return self  # it never changes

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class _DeviceTrie(NamedTuple):
    """A trie on a device."""

    offsets: Tensor
    tokens: Tensor
    root_children: Tensor  # [size] the node that each token leads to from the root


class AllowedSequencesLogitsProcessor(LogitsProcessor):
    """Leaves only the tokens that go on with one of the allowed sequences, each row having its own trie.

    By hand, the first `prompt_length` ids are the prompt. A row that is in no sequence has nothing left.
    Every step walks from the root by the rows' new tokens, one lookup a token for all rows at once: a node
    kept in a column would have to follow tokens that are only tried or taken back, and costs more to bring
    forward than sequences of dozens of tokens cost to walk.
    """

    def __init__(self, allowed_sequences: AllowedSequences, prompt_length: int = 0) -> None:
        if not isinstance(allowed_sequences, AllowedSequences):
            raise InputError("allowed_sequences", "must be an AllowedSequences", allowed_sequences)
        self.allowed_sequences = allowed_sequences
        self.prompt_length = check_number("prompt_length", prompt_length, 0, integer=True)

    @classmethod
    def params_from_config(cls, config: GenerationConfig, prompt: PromptInfo) -> dict[str, Any]:  # noqa: ARG003
        """The trie."""
        return {"allowed_sequences": config.prefix_allowed_tokens_fn}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """New scores [N, V] after the ids [N, L], all of which count as real."""
        if input_ids.shape[1] < self.prompt_length:
            must = f"must begin with the {self.prompt_length} tokens of the prompt"
            raise InputError("input_ids", must, input_ids)
        return self.process(Context.standalone(input_ids, vars(self)), scores)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """The scores of the allowed tokens."""
        tries = context.object_param("allowed_sequences")
        depths = (context._length - context._prompt).numpy()  # `context.generated`, without asking the device
        new = _generated_tokens(context, int(depths.max()))
        answer = torch.full_like(scores, -torch.inf)
        places = np.array([id(trie) for trie in tries])
        for place in dict.fromkeys(places.tolist()):
            mine = np.flatnonzero(places == place)
            trie = tries[int(mine[0])]
            if trie.min_vocab_size > scores.shape[1]:
                must = f"must name tokens below {scores.shape[1]}, the vocabulary"
                raise InputError("allowed_sequences", must, trie.min_vocab_size - 1)
            lines = torch.from_numpy(mine).to(scores.device, non_blocking=True)
            nodes = trie.walk(new[lines], context.generated[lines, 0])
            for depth in np.unique(depths[mine]).tolist():
                some = torch.from_numpy(np.flatnonzero(depths[mine] == depth))
                some = some.to(scores.device, non_blocking=True)
                _copy_allowed_scores(answer, scores, lines[some], trie, nodes[some], depth)
        return answer


def _generated_tokens(context: Context, most: int) -> Tensor:
    """The new tokens of each line, with rubbish after its end [N, most]."""
    tokens, start = context.tokens, context.length - context.generated
    at = start + torch.arange(most, device=tokens.device)
    return tokens.gather(1, at.clamp(max=tokens.shape[1] - 1))


def _copy_allowed_scores(
    answer: Tensor, scores: Tensor, lines: Tensor, trie: AllowedSequences, nodes: Tensor, depth: int
) -> None:
    """Put the scores of the allowed tokens into the lines of the answer, which are equally deep."""
    if depth == 0:  # often nearly all tokens, and the same for all lines
        mask = trie.first_token_mask(scores.device)
        answer[lines, : len(mask)] = scores[lines, : len(mask)].masked_fill(~mask, -torch.inf)
        return
    # As wide as the widest node so deep, so that the device need not be asked how many there are.
    ids, any_left = trie.next_tokens(nodes, trie.max_children(depth))
    at = lines[:, None]
    answer[at, ids] = torch.where(any_left, scores[at, ids], -torch.inf)


# ------------------------------------------------------------------------ from sequences to arrays
class _FlatSequences(NamedTuple):
    """Sequences one after the other."""

    tokens: Array  # [T]
    starts: Array  # [N]
    lengths: Array  # [N]


def _flatten_sequences(sequences: Any, ends: Array) -> _FlatSequences:
    """The sequences, checked, without an end token at their end."""
    if isinstance(sequences, Tensor):
        sequences = sequences.cpu().numpy()
    if isinstance(sequences, np.ndarray):
        if sequences.ndim != 2:
            raise InputError("sequences", "must be an array [N, L] padded with -1", sequences)
        real = sequences != -1
        if (real[:, 1:] > real[:, :-1]).any():
            raise InputError("sequences", "must be padded at the right", sequences)
        tokens, lengths = sequences[real], real.sum(1)
    else:
        try:
            given = list(sequences)
            lengths = np.fromiter(map(len, given), np.int64, len(given))
            tokens = np.array(list(chain.from_iterable(given)) or np.zeros(0, np.int64))
        except (TypeError, ValueError):
            raise InputError("sequences", "must be sequences of token ids", sequences) from None
    if not len(lengths):
        raise InputError("sequences", "must hold at least one", sequences)
    if tokens.dtype.kind not in "iu" or tokens.ndim != 1:
        raise InputError("sequences", "must hold integers", tokens)
    if len(tokens) and (tokens.min() < 0 or tokens.max() > MAX_TOKEN_ID):
        odd = tokens[(tokens < 0) | (tokens > MAX_TOKEN_ID)][0]
        raise InputError("sequences", "must hold token ids", int(odd))
    tokens = tokens.astype(np.int32, copy=False)
    starts = np.cumsum(lengths) - lengths
    ending = np.isin(tokens, ends)
    if len(tokens):
        last = np.minimum(starts + np.maximum(lengths, 1) - 1, len(tokens) - 1)
        closed = ending[last] & (lengths > 0)
        ending[last[closed]] = False
        lengths = lengths - closed
    if ending.any():
        must = f"must not hold the end token {int(tokens[ending][0])} before their end"
        raise InputError("sequences", must, sequences)
    if not lengths.min():
        raise InputError("sequences", "must have at least one token each", [])
    return _FlatSequences(tokens, starts, lengths)


def _build_trie(given: _FlatSequences, ends: Array) -> tuple[Array, Array, Array]:
    """The edges of the trie level by level: `offsets`, `tokens` and `widest`.

    A level's edges are the different pairs of a node and a token, so that one sort makes a level.
    """
    starts, lengths = given.starts, given.lengths
    size = int(max(given.tokens.max(), ends[-1])) + 1
    node, known = np.zeros(len(starts), dtype=np.int64), 1  # of this level, counted from its first
    counts: list[Array] = []
    tokens: list[Array] = []
    depth = 0
    while known:
        over = lengths == depth
        closed = np.unique(node[over])
        going = ~over
        starts, lengths, node = starts[going], lengths[going], node[going]
        keys = node * size + given.tokens[starts + depth]
        both = np.concatenate((keys, (closed[:, None] * size + ends).ravel()))
        edges, whence = np.unique(both, return_inverse=True)
        counts.append(np.bincount(edges // size, minlength=known).astype(np.int32))
        tokens.append((edges % size).astype(np.int32))
        node, known = whence[: len(keys)], len(edges)
        depth += 1
    nothing = np.zeros(1, dtype=np.int32)
    nodes = np.concatenate((nothing, *counts, nothing))
    kind = np.int32 if len(nodes) <= MAX_TOKEN_ID else np.int64
    widest = np.array([int(level.max()) for level in counts])
    return np.cumsum(nodes, dtype=kind), np.concatenate(tokens), widest


def _is_valid_trie(offsets: Array, tokens: Array, widest: Array, ends: Array) -> bool:
    """Whether arrays fit together, so that no walk can leave them or miss an edge."""
    return bool(
        all(one.ndim == 1 and one.dtype.kind == "i" for one in (offsets, tokens, widest, ends))
        and len(tokens)
        and len(ends)
        and len(widest) > 2
        and len(offsets) == len(tokens) + 3
        and offsets[0] == 0
        and (offsets[1:] >= offsets[:-1]).all()
        and offsets[-1] == len(tokens)
        and tokens.min() >= 0
        and ends.min() >= 0
        and np.isin(np.flatnonzero(np.diff(tokens) <= 0) + 1, offsets).all()  # ascending in every node
        and widest.tolist() == _max_children_per_level(offsets)
    )


def _max_children_per_level(offsets: Array) -> list[int]:
    """The most edges of a node at each depth; nothing where the nodes do not lie level by level."""
    first, last, found = 0, 1, []
    while first < last:
        found.append(int(np.diff(offsets[first : last + 1]).max()))
        first, begin, last = last, int(offsets[first]) + 1, int(offsets[last]) + 1
        if begin != first:
            return []
    return found if last == len(offsets) - 2 else []


def _check_ids(given: object, name: str) -> list[int]:
    """Token ids as a list, whether of a sequence, an array or a tensor."""
    try:
        ids = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(name, "must be a sequence of token ids", given) from None
    if ids.numel() and (ids.ndim != 1 or ids.is_floating_point() or ids.dtype == torch.bool):
        raise InputError(name, "must be a sequence of token ids", given)
    return [int(token) for token in ids.flatten().tolist()]
