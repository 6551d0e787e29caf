"""Allowed sequences: generation restricted to a list of token sequences, compiled into a trie."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save
from torch import Tensor

from descant.config.generation_config import GenerationConfig
from descant.core.atomic_file import write_bytes
from descant.core.context import Context, PromptInfo
from descant.core.interfaces import Array
from descant.decoding.processors.base import LogitsProcessor, TokenIds, as_id_list, check_number
from descant.errors import InputError

MAX_TOKEN_ID = 2**31 - 1


class AllowedSequences:
    """A trie of token sequences in compressed arrays: the children of a node are a slice of one array.

    `sequences` are lists of tokens, or an integer array [N, L] padded with -1. Each is a complete generation
    without the prompt; one may be a prefix of another. Each sequence is followed by an end token, and nothing
    follows that. A sequence that already closes with an end token is accepted. Pass it as
    `prefix_allowed_tokens_fn` (De Cao et al. 2021, there a trie of Python objects).

    Nodes are numbered level by level in the order of their edges, the root being 0: edge `e` leads to node
    `e + 1`, and the edges of node `n`, sorted by token, are `offsets[n]` to `offsets[n + 1]`. The last node
    is the dead end for tokens in no sequence.
    """

    def __init__(self, sequences: Iterable[Sequence[int]] | Array | Tensor, eos_token_id: TokenIds) -> None:
        end_ids = np.unique(np.array(as_id_list(eos_token_id)))
        if not len(end_ids) or end_ids.dtype.kind != "i" or end_ids[0] < 0 or end_ids[-1] > MAX_TOKEN_ID:
            raise InputError("eos_token_id", "must be at least one token id", eos_token_id)
        self._set_arrays(*_build_trie(_flatten_sequences(sequences, end_ids), end_ids), end_ids)

    def _set_arrays(self, offsets: Array, tokens: Array, max_children: Array, end_ids: Array) -> None:
        self._offsets = offsets  # [nodes + 1]
        self._tokens = tokens  # [edges]
        self._max_children = max_children  # [levels] most edges of a node at each depth, 0 at the last
        self._eos_token_ids = end_ids
        self._num_sequences = int(np.isin(tokens, end_ids).sum()) // len(end_ids)
        self._min_vocab_size = int(tokens.max()) + 1
        self._device_tries: dict[torch.device, _DeviceTrie] = {}

    # -------------------------------------------------------------------- properties
    def __len__(self) -> int:
        """Number of distinct sequences."""
        return self._num_sequences

    def __contains__(self, sequence: object) -> bool:
        """Whether the sequence, without an end token, is one of the sequences."""
        node = self._find_node(_check_ids(sequence, "sequence"))
        return node >= 0 and self._child(node, int(self._eos_token_ids[0])) >= 0

    def __repr__(self) -> str:
        return f"AllowedSequences({len(self)} sequences of up to {self.depth} tokens, {self.nbytes} bytes)"

    @property
    def nbytes(self) -> int:
        """Size of the arrays in bytes."""
        return int(self._offsets.nbytes + self._tokens.nbytes)

    @property
    def depth(self) -> int:
        """Length of the longest sequence."""
        return len(self._max_children) - 2

    @property
    def min_vocab_size(self) -> int:
        """Smallest vocabulary size that contains all tokens."""
        return self._min_vocab_size

    @property
    def eos_token_id(self) -> list[int]:
        """The end tokens in ascending order."""
        return [int(end) for end in self._eos_token_ids]

    # -------------------------------------------------------------------- host lookups
    def allowed(self, prefix: Sequence[int]) -> list[int]:
        """Tokens that may follow the generated tokens, ascending; none after an end or an unknown prefix."""
        node = self._find_node(_check_ids(prefix, "prefix"))
        if node < 0:
            return []
        return [int(token) for token in self._tokens[self._offsets[node] : self._offsets[node + 1]]]

    def prefix_fn(self, prompt_length: int) -> Callable[[int, Any], list[int]]:
        """Return a function `(batch_id, ids)` for ids that start with a prompt of this length."""
        check_number("prompt_length", prompt_length, 0, integer=True)
        return partial(self._allowed_after, prompt_length)

    def __call__(self, batch_id: int, ids: Any) -> list[int]:  # noqa: ARG002
        """Raise: ids alone do not tell where the prompt ends. In a config, the engine knows it."""
        do = "call `prefix_fn(prompt_length)(batch_id, ids)`, or `allowed(new_ids)`"
        raise InputError("ids", "must not include a prompt of unknown length", ids, do)

    def _allowed_after(self, prompt_length: int, batch_id: int, ids: Any) -> list[int]:  # noqa: ARG002
        if len(ids) < prompt_length:
            raise InputError("ids", f"must start with the {prompt_length} tokens of the prompt", ids)
        return self.allowed(ids[prompt_length:])

    def _find_node(self, prefix: Sequence[int]) -> int:
        """The node of a prefix, -1 if there is none."""
        node = 0
        for token in prefix:
            node = self._child(node, token)
            if node < 0:
                break
        return node

    def _child(self, node: int, token: int) -> int:
        first, last = int(self._offsets[node]), int(self._offsets[node + 1])
        edge = first + int(np.searchsorted(self._tokens[first:last], token))
        return edge + 1 if edge < last and self._tokens[edge] == token else -1

    # -------------------------------------------------------------------- batched lookups
    def max_children(self, depth: int) -> int:
        """The largest number of allowed tokens at this depth."""
        return int(self._max_children[min(depth, len(self._max_children) - 1)])

    def walk(self, tokens: Tensor, count: Tensor) -> Tensor:
        """The nodes [N] that rows reach with the first `count` [N] of their tokens [N, T]."""
        nodes = torch.zeros(len(tokens), dtype=torch.long, device=tokens.device)
        for depth, chosen in enumerate(tokens.unbind(1)):
            nodes = torch.where(depth < count, self._child_nodes(nodes, chosen, depth), nodes)
        return nodes

    def first_token_mask(self, device: torch.device) -> Tensor:
        """Mask of the tokens that may come first [min_vocab_size]."""
        return self._on_device(device).root_children < len(self._tokens) + 1

    def next_tokens(self, nodes: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Tokens that may follow the nodes [N], padded with the first [N, W]; whether there are any [N, 1].

        Without any, the token is 0, which is not allowed then.
        """
        offsets, tokens, _ = self._on_device(nodes.device)
        first, last = offsets[nodes].long()[:, None], offsets[nodes + 1].long()[:, None]
        edges = first + torch.arange(max(width, 1), device=nodes.device)
        edges = torch.where(edges < last, edges, first).clamp(max=len(tokens) - 1)
        return torch.where(first < last, tokens[edges].long(), 0), first < last

    def _child_nodes(self, nodes: Tensor, chosen: Tensor, depth: int) -> Tensor:
        """The children [N] of the nodes [N] at this depth: by table from the root, else by bisection."""
        offsets, tokens, root_children = self._on_device(nodes.device)
        dead_end = len(tokens) + 1
        if depth == 0:
            known = (chosen >= 0) & (chosen < len(root_children))
            return torch.where(known, root_children[chosen.clamp(0, len(root_children) - 1)], dead_end)
        low, last = offsets[nodes].long(), offsets[nodes + 1].long()
        high = last
        for _ in range(self.max_children(depth).bit_length()):
            mid = (low + high) >> 1
            is_below = (low < high) & (tokens[mid.clamp(max=len(tokens) - 1)] < chosen)
            low, high = torch.where(is_below, mid + 1, low), torch.where(is_below, high, mid)
        exists = (low < last) & (tokens[low.clamp(max=len(tokens) - 1)] == chosen)
        return torch.where(exists, low + 1, dead_end)

    def _on_device(self, device: torch.device) -> _DeviceTrie:
        """The arrays on a device, copied there once."""
        if device not in self._device_tries:
            root_children = np.full(self.min_vocab_size, len(self._tokens) + 1)
            root_tokens = self._tokens[: self._offsets[1]]
            root_children[root_tokens] = np.arange(1, len(root_tokens) + 1)
            arrays = (self._offsets, self._tokens, root_children)
            self._device_tries[device] = _DeviceTrie(
                *(torch.from_numpy(array).to(device) for array in arrays)
            )
        return self._device_tries[device]

    # -------------------------------------------------------------------- serialisation
    def save(self, path: str | Path) -> None:
        """Write the trie to a safetensors file, whole or not at all."""
        arrays = {
            "offsets": self._offsets,
            "tokens": self._tokens,
            "widest": self._max_children,
            "eos_token_id": self._eos_token_ids,
        }
        # Not `save_file`: it writes under a temporary name of its own, which stays if the process is killed.
        write_bytes(path, save(arrays))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file written by `save`."""
        try:
            arrays = load_file(path)
        except (SafetensorError, ValueError, TypeError) as error:
            raise InputError("path", f"must be a file written by `save` ({error})", str(path)) from None
        names = ("offsets", "tokens", "widest", "eos_token_id")
        if set(arrays) != set(names) or not _is_valid_trie(*(arrays[name] for name in names)):
            raise InputError("path", "must be a file written by `save`", str(path))
        trie = cls.__new__(cls)
        trie._set_arrays(*(arrays[name] for name in names))
        return trie

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_device_tries": {}}

    def __copy__(self) -> Self:
        return self  # immutable

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class _DeviceTrie(NamedTuple):
    """The arrays of a trie on a device."""

    offsets: Tensor
    tokens: Tensor
    root_children: Tensor  # [min_vocab_size] node that each token leads to from the root


class AllowedSequencesLogitsProcessor(LogitsProcessor):
    """Allows only tokens that continue an allowed sequence; each row has its own trie.

    In a direct call, the first `prompt_length` ids are the prompt. A row outside all sequences has all tokens
    masked. Every step walks from the root along the rows' new tokens, one lookup per token for all rows. A
    node kept as row state would have to follow drafted and retracted tokens, which costs more than walking
    sequences of dozens of tokens.
    """

    def __init__(self, allowed_sequences: AllowedSequences, prompt_length: int = 0) -> None:
        if not isinstance(allowed_sequences, AllowedSequences):
            raise InputError("allowed_sequences", "must be an AllowedSequences", allowed_sequences)
        self.allowed_sequences = allowed_sequences
        self.prompt_length = check_number("prompt_length", prompt_length, 0, integer=True)

    @classmethod
    def params_from_config(cls, config: GenerationConfig, prompt: PromptInfo) -> dict[str, Any]:  # noqa: ARG003
        """Return the trie."""
        return {"allowed_sequences": config.prefix_allowed_tokens_fn}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return new scores [N, V] for the ids [N, L], none of which is treated as padding."""
        if input_ids.shape[1] < self.prompt_length:
            must = f"must start with the {self.prompt_length} tokens of the prompt"
            raise InputError("input_ids", must, input_ids)
        return self.process(Context.standalone(input_ids, vars(self)), scores)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Mask the tokens that are not allowed."""
        tries = context.object_param("allowed_sequences")
        depths = (context._length - context._prompt).numpy()  # `context.generated` on the host
        generated = _generated_tokens(context, int(depths.max()))
        masked = torch.full_like(scores, -torch.inf)
        trie_ids = np.array([id(trie) for trie in tries])
        for trie_id in dict.fromkeys(trie_ids.tolist()):
            members = np.flatnonzero(trie_ids == trie_id)
            trie = tries[int(members[0])]
            if trie.min_vocab_size > scores.shape[1]:
                must = f"must have token ids below {scores.shape[1]}, the vocabulary size"
                raise InputError("allowed_sequences", must, trie.min_vocab_size - 1)
            rows = torch.from_numpy(members).to(scores.device, non_blocking=True)
            nodes = trie.walk(generated[rows], context.generated[rows, 0])
            for depth in np.unique(depths[members]).tolist():
                group = torch.from_numpy(np.flatnonzero(depths[members] == depth))
                group = group.to(scores.device, non_blocking=True)
                _copy_allowed_scores(masked, scores, rows[group], trie, nodes[group], depth)
        return masked


def _generated_tokens(context: Context, max_generated: int) -> Tensor:
    """The generated tokens of each row [N, max_generated]; positions after its end hold arbitrary ids."""
    tokens, start = context.tokens, context.length - context.generated
    positions = start + torch.arange(max_generated, device=tokens.device)
    return tokens.gather(1, positions.clamp(max=tokens.shape[1] - 1))


def _copy_allowed_scores(
    masked: Tensor, scores: Tensor, rows: Tensor, trie: AllowedSequences, nodes: Tensor, depth: int
) -> None:
    """Copy the scores of the allowed tokens into `masked` for rows of equal depth."""
    if depth == 0:  # often most of the vocabulary, and the same for all rows
        mask = trie.first_token_mask(scores.device)
        masked[rows, : len(mask)] = scores[rows, : len(mask)].masked_fill(~mask, -torch.inf)
        return
    # The width is the maximum at this depth, which avoids a device synchronisation.
    ids, any_left = trie.next_tokens(nodes, trie.max_children(depth))
    index = rows[:, None]
    masked[index, ids] = torch.where(any_left, scores[index, ids], -torch.inf)


# ------------------------------------------------------------------------ construction
class _FlatSequences(NamedTuple):
    """Sequences concatenated into one array."""

    tokens: Array  # [T]
    starts: Array  # [N]
    lengths: Array  # [N]


def _flatten_sequences(sequences: Any, end_ids: Array) -> _FlatSequences:
    """Validate and concatenate the sequences, without their closing end tokens."""
    if isinstance(sequences, Tensor):
        sequences = sequences.cpu().numpy()
    if isinstance(sequences, np.ndarray):
        if sequences.ndim != 2:
            raise InputError("sequences", "must be an array [N, L] padded with -1", sequences)
        valid = sequences != -1
        if (valid[:, 1:] > valid[:, :-1]).any():
            raise InputError("sequences", "must be padded on the right", sequences)
        tokens, lengths = sequences[valid], valid.sum(1)
    else:
        try:
            items = list(sequences)
            lengths = np.fromiter(map(len, items), np.int64, len(items))
            tokens = np.array(list(chain.from_iterable(items)) or np.zeros(0, np.int64))
        except (TypeError, ValueError):
            raise InputError("sequences", "must be sequences of token ids", sequences) from None
    if not len(lengths):
        raise InputError("sequences", "must contain at least one sequence", sequences)
    if tokens.dtype.kind not in "iu" or tokens.ndim != 1:
        raise InputError("sequences", "must contain integers", tokens)
    if len(tokens) and (tokens.min() < 0 or tokens.max() > MAX_TOKEN_ID):
        invalid = tokens[(tokens < 0) | (tokens > MAX_TOKEN_ID)][0]
        raise InputError("sequences", f"must contain token ids between 0 and {MAX_TOKEN_ID}", int(invalid))
    tokens = tokens.astype(np.int32, copy=False)
    starts = np.cumsum(lengths) - lengths
    is_end = np.isin(tokens, end_ids)
    if len(tokens):
        last = np.minimum(starts + np.maximum(lengths, 1) - 1, len(tokens) - 1)
        has_end = is_end[last] & (lengths > 0)
        is_end[last[has_end]] = False
        lengths = lengths - has_end
    if is_end.any():
        must = f"must not contain the end token {int(tokens[is_end][0])} before their end"
        raise InputError("sequences", must, sequences)
    if not lengths.min():
        raise InputError("sequences", "must have at least one token each", [])
    return _FlatSequences(tokens, starts, lengths)


def _build_trie(flat: _FlatSequences, end_ids: Array) -> tuple[Array, Array, Array]:
    """Build the trie level by level: `offsets`, `tokens` and `max_children`.

    The edges of a level are the distinct pairs of a node and a token, so that one sort builds a level.
    """
    starts, lengths = flat.starts, flat.lengths
    vocab_size = int(max(flat.tokens.max(), end_ids[-1])) + 1
    node, num_nodes = np.zeros(len(starts), dtype=np.int64), 1  # node index within the level
    counts: list[Array] = []
    tokens: list[Array] = []
    depth = 0
    while num_nodes:
        finished = lengths == depth
        final_nodes = np.unique(node[finished])
        active = ~finished
        starts, lengths, node = starts[active], lengths[active], node[active]
        keys = node * vocab_size + flat.tokens[starts + depth]
        all_keys = np.concatenate((keys, (final_nodes[:, None] * vocab_size + end_ids).ravel()))
        edges, edge_index = np.unique(all_keys, return_inverse=True)
        counts.append(np.bincount(edges // vocab_size, minlength=num_nodes).astype(np.int32))
        tokens.append((edges % vocab_size).astype(np.int32))
        node, num_nodes = edge_index[: len(keys)], len(edges)
        depth += 1
    zero = np.zeros(1, dtype=np.int32)
    nodes = np.concatenate((zero, *counts, zero))
    dtype = np.int32 if len(nodes) <= MAX_TOKEN_ID else np.int64
    max_children = np.array([int(level.max()) for level in counts])
    return np.cumsum(nodes, dtype=dtype), np.concatenate(tokens), max_children


def _is_valid_trie(offsets: Array, tokens: Array, max_children: Array, end_ids: Array) -> bool:
    """Whether the arrays are consistent, so that no walk can leave them or miss an edge."""
    return bool(
        all(array.ndim == 1 and array.dtype.kind == "i" for array in (offsets, tokens, max_children, end_ids))
        and len(tokens)
        and len(end_ids)
        and len(max_children) > 2
        and len(offsets) == len(tokens) + 3
        and offsets[0] == 0
        and (offsets[1:] >= offsets[:-1]).all()
        and offsets[-1] == len(tokens)
        and tokens.min() >= 0
        and end_ids.min() >= 0
        and np.isin(np.flatnonzero(np.diff(tokens) <= 0) + 1, offsets).all()  # ascending in every node
        and max_children.tolist() == _max_children_per_level(offsets)
    )


def _max_children_per_level(offsets: Array) -> list[int]:
    """The most edges of a node at each depth; empty if the nodes are not stored level by level."""
    first, last, widths = 0, 1, []
    while first < last:
        widths.append(int(np.diff(offsets[first : last + 1]).max()))
        first, begin, last = last, int(offsets[first]) + 1, int(offsets[last]) + 1
        if begin != first:
            return []
    return widths if last == len(offsets) - 2 else []


def _check_ids(value: object, name: str) -> list[int]:
    """Convert a sequence, array or tensor of token ids to a list."""
    try:
        ids = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(name, "must be a sequence of token ids", value) from None
    if ids.numel() and (ids.ndim != 1 or ids.is_floating_point() or ids.dtype == torch.bool):
        raise InputError(name, "must be a sequence of token ids", value)
    return [int(token) for token in ids.flatten().tolist()]
