"""Cache operations as plain data, for hypothesis.

Row numbers are taken modulo the number of rows, and lists are cycled. So every list of operations is valid,
also a shrunk one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

__all__ = [
    "CommitOp",
    "ExtendOp",
    "JoinOp",
    "MoveOp",
    "NewCacheOp",
    "Operation",
    "SaveOp",
    "SelectOp",
    "SwitchCacheOp",
    "WriteOp",
    "operation_lists",
]

CUT_ALL = 99  # a cut of everything


class ExtendOp(NamedTuple):
    """Append empty rows."""

    rows: int = 1


class WriteOp(NamedTuple):
    """One forward; several between two commits are drafts or prefill chunks."""

    width: int = 1
    skipped_rows: tuple[bool, ...] = (False,)
    start_offsets: tuple[int, ...] = (0,)  # start of each row after its committed length
    first_layer_only: bool = False
    num_drafts: int | None = None  # number of last positions that are drafts: the others will be committed


class CommitOp(NamedTuple):
    """Reorder, fork, drop and truncate rows."""

    parents: tuple[int, ...] | None = None
    cuts: tuple[int, ...] = (0,)  # positions to truncate per row


class SelectOp(NamedTuple):
    """Copy rows into another cache."""

    rows: tuple[int, ...] = (0,)


class JoinOp(NamedTuple):
    """Append the rows of another cache."""


class NewCacheOp(NamedTuple):
    """Create another cache with empty rows."""

    rows: int = 1


class SwitchCacheOp(NamedTuple):
    """Switch to the next cache."""


class SaveOp(NamedTuple):
    """Save the cache and load it into another one."""


class MoveOp(NamedTuple):
    """Move the cache to its own device."""


Operation = ExtendOp | WriteOp | CommitOp | SelectOp | JoinOp | NewCacheOp | SwitchCacheOp | SaveOp | MoveOp


# An operation is decoded from a few bytes, all zeros being no operation. Drawing field by field with
# hypothesis would take most of the time.
_BYTES_PER_OP = 10
_OP_CHOICES = (
    "nothing", *["write"] * 9, *["commit"] * 6, "extend", "extend", "select", "fresh", "join", "turn", "turn",
    "save", "move",
)  # fmt: skip
_CUT_CHOICES = (0, 0, 0, 1, 1, 2, 3, 5, CUT_ALL)


def operation_lists(strategies: Any, max_width: int = 7, min_size: int = 10, max_size: int = 24) -> Any:
    """A hypothesis strategy for lists of operations, with forwards of at most `max_width` positions."""
    encoded = strategies.binary(min_size=_BYTES_PER_OP, max_size=_BYTES_PER_OP)
    encoded_lists = strategies.lists(encoded, min_size=min_size, max_size=max_size)
    return encoded_lists.map(
        lambda records: [
            operation for record in records if (operation := _decode_operation(record, max_width)) is not None
        ]
    )


def _decode_operation(data: bytes, max_width: int) -> Operation | None:
    """Decode an operation; small bytes give simple ones."""
    one, two, three, four = data[1:5]
    match _OP_CHOICES[data[0] % len(_OP_CHOICES)]:
        case "write":
            skipped = tuple(bool(two >> at & 1) for at in range(4)) if two > 128 else (False,)
            offsets = tuple(three >> 2 * at & 3 for at in range(3)) if three > 160 else (0,)
            num_drafts = four % 4 if 140 < four <= 200 else None
            return WriteOp(1 + one % max_width, skipped, offsets, four > 200, num_drafts)
        case "commit":
            parents = tuple(at % 6 for at in data[2 : 2 + one % 7]) if one > 128 else None
            cuts = tuple(_CUT_CHOICES[at % len(_CUT_CHOICES)] for at in data[8:10]) if data[8] > 150 else (0,)
            return CommitOp(parents, cuts)
        case "extend":
            return ExtendOp(1 + one % 3)
        case "select":
            return SelectOp(tuple(at % 6 for at in data[2 : 2 + one % 5]))
        case "fresh":
            return NewCacheOp(1 + one % 3)
        case "join":
            return JoinOp()
        case "turn":
            return SwitchCacheOp()
        case "save":
            return SaveOp()
        case "move":
            return MoveOp()
        case _:
            return None


def cycle_values(values: Sequence[Any], count: int) -> list[Any]:
    """The first `count` values of a cycle."""
    return [values[index % len(values)] for index in range(count)]
