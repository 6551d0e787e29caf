"""Faults of code from outside the engine: which requests they belong to, and a step without those."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from descant.core.interfaces import Array, Model, RowCache
from descant.core.records import ForwardOutput, Proposal, RequestFault, Selection, Tokens, row_params
from descant.core.rows import Rows, index_rows, take_rows
from descant.errors import DescantError, InputError, RowError, format_value, printable
from descant.kv_cache.row_views import row_subset

Probe = Callable[[Rows, Proposal, RowCache], object]


def request_error(request: int, cause: Exception) -> RowError:
    """The error of a request whose own code, or whose forward, has raised `cause`."""
    if isinstance(cause, RowError):
        return cause
    text = str(cause) if isinstance(cause, DescantError) else printable(cause)
    error = RowError(f"{type(cause).__name__}: {text} (request {request})", request)
    error.__cause__ = cause
    return error


def forward_or_fault(
    model: Model, probe: Probe, rows: Rows, proposal: Proposal, cache: RowCache, **chunks: Any
) -> ForwardOutput:
    """The output of a forward; raises `RequestFault` for the requests that break it."""
    try:
        return check_logits(model.forward(rows, proposal, cache, **chunks), rows, proposal)
    except Exception:
        return retry_forward(model, probe, rows, proposal, cache)


def retry_forward(
    model: Model, probe: Probe, rows: Rows, proposal: Proposal, cache: RowCache
) -> ForwardOutput:
    """The output of a forward that has raised: a fault that does not come back is none.

    A forward writes only slots that no commit has accepted, so it can be repeated. `probe` feeds the rows of
    one request alone.
    """
    try:
        return check_logits(model.forward(rows, proposal, cache), rows, proposal)
    except Exception as error:
        raise RequestFault(_find_culprits(probe, rows, proposal, cache, error)) from error


def check_logits(output: ForwardOutput, rows: Rows, proposal: Proposal) -> ForwardOutput:
    """The output of a forward; raises if its logits do not have the shape that the proposal asks for."""
    lines = 1 if proposal.drafts is None else proposal.drafts.shape[1] + 1
    if output.logits.shape[:-1] != (rows.length.shape[0], lines):
        must = f"of a forward must have the shape [{len(rows)}, {lines}, V]"
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


def check_proposal(proposal: Proposal, rows: Rows) -> None:
    """Raise for a proposal that does not fit the rows."""
    parents, drafts, counts, num_rows = proposal.parents, proposal.drafts, proposal.num_drafts, len(rows)
    if parents is not None:
        values, num_rows = parents.numpy(), len(parents)
        if not set(range(len(rows))) == set(values.tolist()):
            raise InputError("parents", f"of a proposal must hold every row (0 to {len(rows) - 1})", parents)
    if drafts is None:
        return
    if drafts.ndim != 2 or len(drafts) != num_rows or drafts.is_floating_point():
        raise InputError("drafts", f"must be token ids [{num_rows}, K]", drafts)
    if counts is not None and (
        len(counts) != num_rows or not 0 <= counts.numpy().min() <= counts.numpy().max() <= drafts.shape[1]
    ):
        raise InputError("num_drafts", f"must be from 0 to {drafts.shape[1]} for {num_rows} rows", counts)


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
                raise RequestFault({request: InputError("max_rows", must, counts[request], do)})


def drop_requests(selection: Selection, rows: Rows, dropped: Collection[int]) -> Selection:
    """A selection of the fed rows without these requests."""
    parents = torch.arange(len(rows)) if selection.parents is None else selection.parents
    index = _remaining(rows.request[parents], dropped)
    fields: dict[str, Any] = {
        name: [request for request in getattr(selection, name) if request not in dropped]
        for name in ("finished", "failed")
    }
    for name in ("tokens", "accepted", "slot", "emit_mode", "host_tokens"):
        value = getattr(selection, name)
        if isinstance(value, Tensor):
            fields[name] = index_rows(value, index)
    ended = [entry for entry in selection.finished_sequences if int(rows.request[entry[0]]) not in dropped]
    return selection._replace(
        parents=parents[index],
        columns={name: take_rows(value, index) for name, value in selection.columns.items()},
        emitted=drop_tokens(selection.emitted, dropped),
        finished_sequences=ended,
        **fields,
    )


def drop_tokens(emitted: Tokens | None, dropped: Collection[int]) -> Tokens | None:
    """The emitted tokens without those of these requests; None: none is left."""
    if emitted is None or not dropped:
        return emitted
    index = _remaining(emitted.request, dropped)
    if len(index) == len(emitted.request):
        return emitted
    if not len(index):
        return None
    columns: dict[str, Any] = {"row": index}
    for name, value in emitted._asdict().items():
        if isinstance(value, Tensor):
            columns[name] = value[index]
    new_index = {old: new for new, old in enumerate(index.tolist())}
    finished = {new_index[old]: each for old, each in emitted.finished.items() if old in new_index}
    return emitted._replace(finished=finished, **columns)


def _remaining(requests: Tensor, dropped: Collection[int]) -> Tensor:
    """The indices of the entries [N] (host) that belong to other requests."""
    is_dropped: Array = np.isin(requests.numpy(), list(dropped))
    return torch.from_numpy(np.flatnonzero(~is_dropped))
