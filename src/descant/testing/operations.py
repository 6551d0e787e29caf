"""Traces: what a cache may be asked for, one thing after another, as plain data that shrinks well.

An operation names rows by any number, taken modulo those that there are, and lists go round: so every trace
has a meaning, and what is left of one when parts are taken out of it has too.
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

CUT_ALL = 99  # as a cut: everything


class ExtendOp(NamedTuple):
    """Empty rows are appended."""

    rows: int = 1


class WriteOp(NamedTuple):
    """One forward; several between two commits are drafts, or feed the rows in parts."""

    width: int = 1
    skipped_rows: tuple[bool, ...] = (False,)  # rows that are not fed
    start_offsets: tuple[int, ...] = (0,)  # how far behind its length a row begins, of what is written there
    first_layer_only: bool = False  # only the first layer is run
    num_drafts: int | None = None  # how many of the last are told to be guesses: the rest will be committed


class CommitOp(NamedTuple):
    """Rows move, fork and leave, and are cut."""

    parents: tuple[int, ...] | None = None
    cuts: tuple[int, ...] = (0,)  # how much of what is written each gives back


class SelectOp(NamedTuple):
    """Some rows go on in a cache of their own too."""

    rows: tuple[int, ...] = (0,)


class JoinOp(NamedTuple):
    """The rows of another cache come in."""


class NewCacheOp(NamedTuple):
    """Another cache, with empty rows."""

    rows: int = 1


class SwitchCacheOp(NamedTuple):
    """The next cache is looked at."""


class SaveOp(NamedTuple):
    """What the cache holds is written down, and read by another."""


class MoveOp(NamedTuple):
    """The cache is moved to the device where it is."""


Operation = ExtendOp | WriteOp | CommitOp | SelectOp | JoinOp | NewCacheOp | SwitchCacheOp | SaveOp | MoveOp


# How an operation is drawn: a few bytes each, of which all zeros are nothing. Drawn field by field, as
# hypothesis would have it, most of the time would be spent on drawing.
_BYTES_PER_OP = 10
_OP_CHOICES = (
    "nothing", *["write"] * 9, *["commit"] * 6, "extend", "extend", "select", "fresh", "join", "turn", "turn",
    "save", "move",
)  # fmt: skip
_CUT_CHOICES = (0, 0, 0, 1, 1, 2, 3, 5, CUT_ALL)


def operation_lists(strategies: Any, widest: int = 7, least: int = 10, most: int = 24) -> Any:
    """A hypothesis strategy of traces: forwards at most so wide, so many operations."""
    drawn = strategies.binary(min_size=_BYTES_PER_OP, max_size=_BYTES_PER_OP)
    whole = strategies.lists(drawn, min_size=least, max_size=most)
    return whole.map(
        lambda records: [made for one in records if (made := _decode_operation(one, widest)) is not None]
    )


def _decode_operation(drawn: bytes, widest: int) -> Operation | None:
    """What some bytes say; small ones say something simple."""
    one, two, three, four = drawn[1:5]
    match _OP_CHOICES[drawn[0] % len(_OP_CHOICES)]:
        case "write":
            idle = tuple(bool(two >> at & 1) for at in range(4)) if two > 128 else (False,)
            ahead = tuple(three >> 2 * at & 3 for at in range(3)) if three > 160 else (0,)
            guesses = four % 4 if 140 < four <= 200 else None
            return WriteOp(1 + one % widest, idle, ahead, four > 200, guesses)
        case "commit":
            parents = tuple(at % 6 for at in drawn[2 : 2 + one % 7]) if one > 128 else None
            cuts = (
                tuple(_CUT_CHOICES[at % len(_CUT_CHOICES)] for at in drawn[8:10]) if drawn[8] > 150 else (0,)
            )
            return CommitOp(parents, cuts)
        case "extend":
            return ExtendOp(1 + one % 3)
        case "select":
            return SelectOp(tuple(at % 6 for at in drawn[2 : 2 + one % 5]))
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
    """So many of the values, from the first again after the last."""
    return [values[at % len(values)] for at in range(count)]
