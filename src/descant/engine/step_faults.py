"""Faults of code from outside the engine: which requests they belong to, and a step without those."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from descant.core.interfaces import Array, Model, RowCache
from descant.core.records import ForwardOutput, Proposal, Selection, Tokens, row_params
from descant.core.request_fault import RequestFault
from descant.core.rows import Rows, index_rows, take_rows
from descant.errors import DescantError, InputError, RowError, format_value, printable
from descant.kv_cache.row_subset import row_subset

__all__ = [
    "Probe",
    "StepFault",
    "check_selection",
    "checked_forward",
    "drop_requests",
    "drop_tokens",
    "forward_or_fault",
    "request_error",
]


Probe = Callable[[Rows, Proposal, RowCache], object]


class StepFault(Exception):
    """Requests that cannot take part in a step, each with its error; nothing of the step is committed."""

    def __init__(self, errors: Mapping[int, Exception]) -> None:
        super().__init__(*errors.values())
        self.errors = errors


def request_error(request: int, cause: Exception) -> RowError:
    """The error of a request whose own code, or whose forward, has raised `cause`."""
    if isinstance(cause, RowError):
        return cause
    text = str(cause) if isinstance(cause, DescantError) else printable(cause)
    error = RowError(f"{type(cause).__name__}: {text} (request {request})", request)
    error.__cause__ = cause
    return error


def forward_or_fault(
    model: Model, probe: Probe, rows: Rows, proposal: Proposal, cache: RowCache
) -> ForwardOutput:
    """The output of a forward, which is tried twice; raises `StepFault` for the requests that break it.

    A forward writes only slots that no commit has accepted, so it can be repeated. `probe` feeds the rows of
    one request alone.
    """
    try:
        return checked_forward(model, rows, proposal, cache)
    except Exception:  # a fault that does not come back is none
        try:
            return checked_forward(model, rows, proposal, cache)
        except Exception as error:
            raise StepFault(_find_culprits(probe, rows, proposal, cache, error)) from error


def checked_forward(model: Model, rows: Rows, proposal: Proposal, cache: RowCache) -> ForwardOutput:
    """The output of a forward, whose logits have the shape that the proposal asks for."""
    output = model.forward(rows, proposal, cache)
    if output.logits.shape[:-1] != (len(rows), proposal.width + 1):
        must = f"of a forward must have the shape [{len(rows)}, {proposal.width + 1}, V]"
        raise InputError("logits", must, output.logits)
    return output


def _find_culprits(
    probe: Probe, rows: Rows, proposal: Proposal, cache: RowCache, error: Exception
) -> dict[int, Exception]:
    """The requests whose forward raises by itself, each with its error; else the youngest request."""
    requests = sorted(set(rows.request.tolist()))
    culprits: dict[int, Exception] = {}
    for request in requests if len(requests) > 1 else ():
        index = (rows.request == request).nonzero().squeeze(1)
        try:
            probe(rows.take(index), proposal.take(index), row_subset(cache, index))
        except Exception as own:
            culprits[request] = own
    # If only the whole batch fails, for want of memory for one, it gets smaller until it does not.
    return culprits or {requests[-1]: error}


def check_selection(selection: Selection, rows: Rows) -> None:
    """Raise for a selection that does not fit the fed rows, or has more rows of a request than planned."""
    tokens, parents, num_rows = selection.tokens, selection.parents, len(rows)
    if parents is None and tokens.shape == (num_rows,):
        return
    if tokens.ndim != 1:
        raise InputError("tokens", "of a selection must be a tensor [R']", tokens)
    if parents is None:
        raise InputError("tokens", f"of a selection must have one entry per row ({num_rows})", tokens)
    values = parents.numpy()
    if len(values) != len(tokens) or (len(values) and not 0 <= values.min() <= values.max() < num_rows):
        must = f"of a selection must hold a fed row (0 to {num_rows - 1}) for each of {len(tokens)} tokens"
        raise InputError("parents", must, format_value(parents))
    limits = row_params(rows).values.get("max_rows")
    if isinstance(limits, Tensor):  # a recipe chooses
        counts = Counter(rows.request[parents].tolist())
        for request, limit in zip(rows.request.tolist(), limits.tolist(), strict=True):
            if 0 <= limit < counts[request]:
                must = f"must be the most rows that the strategy has for a request, it is {limit}"
                do = 'have its `params` return it, as `{"max_rows": 4}`'
                raise RequestFault(request, InputError("max_rows", must, counts[request], do))


def drop_requests(selection: Selection | None, rows: Rows, dropped: Collection[int]) -> Selection:
    """A selection of the fed rows without these requests; None: the strategy has made none."""
    if selection is None:
        return Selection(rows.tokens.new_zeros(0), torch.zeros(0, dtype=torch.long))
    parents = torch.arange(len(rows)) if selection.parents is None else selection.parents
    index = _kept_index(rows.request[parents], dropped)
    host, recorded = selection.host_tokens, selection.recorded_lines
    emit_mode = selection.emit_mode if isinstance(selection.emit_mode, bool) else selection.emit_mode[index]
    return selection._replace(
        tokens=index_rows(selection.tokens, index),
        parents=parents[index],
        accepted=None if selection.accepted is None else selection.accepted[index],
        slot=None if selection.slot is None else selection.slot[index],
        columns={name: take_rows(value, index) for name, value in selection.columns.items()},
        emit_mode=emit_mode,
        emitted=drop_tokens(selection.emitted, dropped),
        finished=[request for request in selection.finished if request not in dropped],
        failed=[request for request in selection.failed if request not in dropped],
        host_tokens=None if host is None else host[index],
        finished_sequences=[
            (row, sequence)
            for row, sequence in selection.finished_sequences
            if int(rows.request[row]) not in dropped
        ],
        recorded_lines=recorded,
    )


_TOKEN_COLUMNS = (
    *("raw", "processed", "new_index", "num_drafts", "is_draft"),
    *("num_top", "top", "top_raw", "top_processed"),
)


def drop_tokens(emitted: Tokens | None, dropped: Collection[int]) -> Tokens | None:
    """The emitted tokens without those of these requests; None: none is left."""
    if emitted is None or not dropped:
        return emitted
    index = _kept_index(emitted.request, dropped)
    if not len(index):
        return None
    if len(index) == len(emitted.request):
        return emitted
    row = index if emitted.row is None else emitted.row[index]
    new_index = {old: new for new, old in enumerate(index.tolist())}
    columns: dict[str, Any] = {
        name: None if getattr(emitted, name) is None else getattr(emitted, name)[index]
        for name in _TOKEN_COLUMNS
    }
    return emitted._replace(
        request=emitted.request[index],
        slot=emitted.slot[index],
        token=emitted.token[index],
        row=row,
        finished={new_index[old]: one for old, one in emitted.finished.items() if old in new_index},
        **columns,
    )


def _kept_index(requests: Tensor, dropped: Collection[int]) -> Tensor:
    """The indices of the entries [N] (host) that belong to other requests."""
    is_dropped: Array = np.isin(requests.numpy(), list(dropped))
    return torch.from_numpy(np.flatnonzero(~is_dropped))
