"""Sampling without a model: tokens are chosen from logits that another engine computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from descant.config.generation_config import GenerationConfig
from descant.config.registry import DRAFTER_FIELDS
from descant.core.interfaces import Array, ModelTraits, RowCache
from descant.core.records import ForwardOutput, Proposal, RequestFault
from descant.core.rows import Rows, index_rows
from descant.decoding.stopping import StopChecker
from descant.engine.explain import no_candidates_error
from descant.engine.planning.planner import DecodingPlan
from descant.engine.protocol import request_error
from descant.engine.request import MERGED, Admission, Request
from descant.engine.step.step import run_step
from descant.engine.tables.running_requests import RunningRequests
from descant.engine.tables.table import join_rows, new_rows, restored_rows
from descant.errors import ConfigError, InputError, RowError


class NoStops(StopChecker):
    """Ends no row."""

    def finish_reasons(
        self,
        rows: Rows,  # noqa: ARG002
        parents: Tensor | None,  # noqa: ARG002
        tokens: Tensor,  # noqa: ARG002
    ) -> Sequence[tuple[str, Array]]:
        """No reason for any row."""
        return []


def logits_traits(vocab_size: int, context_length: int | None) -> ModelTraits:
    """The traits of a decoder that another engine runs."""
    return ModelTraits(
        is_encoder_decoder=False,
        supports_position_ids=True,
        supports_logits_to_keep=True,
        supports_inputs_embeds=False,
        vocab_size=vocab_size,
        num_layers=1,
        attn_implementation="sdpa",
        sliding_windows={},
        max_positions=None,
        context_length=context_length,
    )


class LogitsSource:
    """In place of a model: its forward returns the logits of the batch."""

    network = None
    rank_group = None

    def __init__(self, traits: ModelTraits, device: torch.device) -> None:
        self.traits, self.device = traits, device
        self.logits: Tensor | None = None  # [N, 1, V]

    def new_cache(self) -> RowCache:
        """The other engine has the cache."""
        return NO_CACHE

    def add_requests(self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]]) -> None:
        """Nothing is fed."""

    def remove_requests(self, requests: Sequence[int]) -> None:
        """Nothing is fed."""

    def set_output_states(self, states: Sequence[str]) -> None:
        """There are logits only."""

    def forward(self, rows: Rows, proposal: Proposal, cache: RowCache) -> ForwardOutput:  # noqa: ARG002
        """The logits of the batch."""
        assert self.logits is not None
        return ForwardOutput(self.logits)


class EmptyCache:
    """In place of a cache: the other engine has it."""

    max_rewind: int | None = None
    capacity: int | None = None

    def __len__(self) -> int:
        return 0

    def extend(self, rows: int) -> None:
        """Nothing is stored."""

    def commit(self, parents: Tensor | None, lengths: Tensor) -> None:
        """Nothing is stored."""


NO_CACHE: Final[RowCache] = EmptyCache()


# What decides where a sequence ends, and what is recorded of it: both belong to the engine with the model.
_ENGINE_FIELDS: Final = ("stop_strings", "stop_regex", "max_time", "logprobs")

# Of each strategy but sampling, what keeps it from running on logits alone.
_FORKS: Final = "forks and ranks rows, which needs Descant's own loop"
_REWINDS: Final = "takes tokens back, which needs Descant's own loop"
_STATES: Final = "needs hidden states and a second forward, so Descant's own loop"
_REASONS: Final[Mapping[str, str]] = {
    "beam": _FORKS,
    "constrained": _FORKS,
    "backtracking": _REWINDS,
    "contrastive": _STATES,
    "low-memory contrastive": _STATES,
    "speculative": "drafts tokens, which the engine with the model must verify",
    "recipe": "may move rows, which needs Descant's own loop",
}
_WRAPPER_FIELDS: Final = {"dola": "dola_layers", "guidance": "guidance_scale"}


def check_external_plan(plan: DecodingPlan) -> None:
    """Raise a ConfigError for a plan that needs more than the logits of its own rows."""
    config, do = plan.config, "leave it out, or use a Descant session"
    if plan.strategy.name != "sampling":
        name = plan.strategy.requested_by or "recipe"
        value = getattr(config, name, None)
        if name == "a drafter":
            name, value = _drafter_field(config)
        raise ConfigError(name, _REASONS[plan.strategy.name], value, do)
    if plan.wrappers:
        name = _WRAPPER_FIELDS.get(plan.wrappers[0], "recipe")
        must = "changes what the model computes, so it needs Descant's own loop"
        raise ConfigError(name, must, getattr(config, name, plan.recipe), do)
    if config.token_healing:
        must = "replaces the end of the prompt, which needs Descant's own loop"
        raise ConfigError("token_healing", must, True, do)


def _drafter_field(config: GenerationConfig) -> tuple[str, Any]:
    """The field that selects a drafter, and its value."""
    for name in (*DRAFTER_FIELDS, "grammar"):
        value = getattr(config, name, None)
        if value is not None:
            return name, value
    return "assistant_model", None


class _NewRequest(NamedTuple):
    """A request that has not been in a batch yet: its new tokens, and the index of its sequence."""

    tokens: Sequence[int]
    slot: int


class BatchSampler:
    """Chooses the next tokens of requests that another engine runs, as a session would choose them.

    Processors, their states and the seeded noise are those of a session. The other engine decides which
    requests are in a batch, in which order, and where each one ends. A request may sit out any number of
    batches. The engine may also discard the last token that was chosen for a request: how many new tokens
    each request has is said with every batch.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device | str = "cpu",
        *,
        tokenizer: Any = None,
        context_length: int | None = None,
    ) -> None:
        self.errors: dict[int, RowError] = {}  # of requests for which no token could be chosen
        self._model = LogitsSource(logits_traits(vocab_size, context_length), torch.device(device))
        self._admission = Admission(None, self._model)
        self._running = RunningRequests(self._model.device, make_stop_checker=NoStops)
        self._tokenizer = tokenizer
        self._next_id = 0
        self._new: dict[int, _NewRequest] = {}  # that have not been in a batch yet
        self._last: _LastBatch | None = None
        self._absent: dict[int, _LastBatch] = {}  # that were in an earlier batch, each alone

    def __len__(self) -> int:
        """The number of requests."""
        return len(self._running.requests)

    def plan(self, config: GenerationConfig) -> DecodingPlan:
        """The plan of a merged config, or a ConfigError that names what cannot run on logits alone."""
        return self._plan(self._request(Request((), config, _call=MERGED)))

    def add(self, request: Request, new_tokens: Sequence[int] = (), slot: int = 0) -> int:
        """Add a request that has these new tokens already, as sequence `slot` of its request; its id.

        Its config is merged with that of a model already. States of processors begin anew.
        """
        request = self._request(request)
        self._plan(request)
        [resolved] = self._admission.resolve([request], self._model.traits)
        prepared = self._running.prepare(resolved)
        request_id = self._next_id
        self._running.add(request_id, prepared, is_encoder_decoder=False)
        self._next_id += 1
        self._new[request_id] = _NewRequest(list(new_tokens), slot)
        return request_id

    def remove(self, request_id: int) -> None:
        """Forget a request."""
        self._running.remove(request_id)
        self._new.pop(request_id, None)
        self._absent.pop(request_id, None)
        self.errors.pop(request_id, None)

    def fail(self, request_id: int, cause: Exception) -> None:
        """End a request: it gets an end token from now on."""
        self.errors.setdefault(request_id, request_error(request_id, cause))

    def is_stateful(self, request_id: int) -> bool:
        """Whether a request has a processor with a state, which its tokens alone do not restore."""
        return any(getattr(processor, "state", None) for processor in self._running.processors(request_id))

    def num_new(self, request_id: int) -> int:
        """The number of new tokens of a request, the last one chosen included."""
        if request_id in self._new:
            return len(self._new[request_id].tokens)
        batch = self._absent.get(request_id, self._last)
        if batch is None or request_id not in batch.place:
            return 0
        return batch.num_new[batch.place[request_id]]

    def new_tokens(self, request_id: int) -> list[int]:
        """The new tokens of a request with the last one chosen; none if it failed in an earlier batch."""
        if request_id in self._new:
            return list(self._new[request_id].tokens)
        batch = self._absent.get(request_id, self._last)
        tokens: list[int] = []
        for rows in () if batch is None else (batch.after, batch.before):
            row = next(iter((rows.request == request_id).nonzero()[:, 0].tolist()), None)
            if row is not None:
                tokens = rows.tokens[row, int(rows.prompt_length[row]) : int(rows.length[row])].tolist()
                break
        return tokens

    def choose(self, request_ids: Sequence[int], num_new: Sequence[int], logits: Tensor) -> Tensor:
        """The next token [N] of each request, which has `num_new` new tokens, from its logits [N, V].

        A request for which none can be chosen is listed in `errors` and gets an end token from then on.
        """
        tokens = torch.empty(len(request_ids), dtype=torch.long, device=logits.device)
        live = [index for index, request_id in enumerate(request_ids) if request_id not in self.errors]
        while live:
            requests = [request_ids[index] for index in live]
            part = logits
            if len(live) < len(request_ids):
                part = index_rows(logits, torch.tensor(live))
            rows = self._arrange(requests, [num_new[index] for index in live])
            chosen = self._step(rows, part)
            if chosen is not None:
                going_on, found = chosen
                if len(going_on) == len(request_ids):
                    return found
                place = {request_id: index for index, request_id in enumerate(request_ids)}
                places = torch.tensor([place[request_id] for request_id in going_on], dtype=torch.long)
                tokens.index_copy_(0, places.to(tokens.device), found)
                break
            live = [index for index in live if request_ids[index] not in self.errors]
        for index, request_id in enumerate(request_ids):
            if request_id in self.errors:
                params = self._running.requests[request_id].plan.params
                tokens[index] = next(iter(params.end_token_ids), 0)
        return tokens

    # -------------------------------------------------------------------- one batch
    def _step(self, rows: Rows, logits: Tensor) -> tuple[list[int], Tensor] | None:
        """The requests that go on and their tokens [N]; None: some cannot, and are in `errors` now."""
        self._model.logits, errors = logits[:, None], self._running.errors
        assert errors is not None
        try:
            after, [selection] = run_step(self._model, NO_CACHE, rows, self._running.strategy_groups)
        except RequestFault as fault:
            errors |= fault.errors
            self._last = _LastBatch.of(rows, rows)  # for the next attempt, without these
            return None
        finally:
            self._model.logits = None
            for request_id, cause in errors.items():
                self.fail(request_id, cause)
            errors.clear()
        for request_id in selection.failed:
            plan = self._running.requests[request_id].plan
            is_nonfinite = request_id in selection.nonfinite
            error = no_candidates_error(request_id, plan, False, nonfinite=is_nonfinite)
            self.errors.setdefault(request_id, error)
        self._last = _LastBatch.of(rows, after)
        tokens = selection.tokens
        if len(after) < len(rows):  # those that are left are in another order than in the selection
            tokens = after.tokens.gather(1, (after.length[:, None] - 1).to(tokens.device))[:, 0]
        return self._last.request_ids, tokens

    # -------------------------------------------------------------------- which rows are in it
    def _arrange(self, request_ids: Sequence[int], num_new: Sequence[int]) -> Rows:
        """The rows of these requests in this order."""
        last = self._last
        if last is not None and last.request_ids == request_ids and last.num_new == num_new:
            return last.after
        wanted = dict(zip(request_ids, num_new, strict=True))
        parts: list[Rows] = []
        if last is not None:
            self._store_absent(last, wanted)
            going_on = [request_id for request_id in last.request_ids if request_id in wanted]
            if going_on:
                parts.append(last.rows(going_on, [wanted[request_id] for request_id in going_on]))
        back = [request_id for request_id in request_ids if request_id in self._absent]
        parts += [
            self._absent.pop(request_id).rows([request_id], [wanted[request_id]]) for request_id in back
        ]
        new = [request_id for request_id in request_ids if request_id in self._new]
        if new:
            parts.append(self._new_rows(new))
        rows = parts[0]
        for part in parts[1:]:
            rows = join_rows(self._running, rows, restored_rows(self._running, part))
        order = {request_id: index for index, request_id in enumerate(rows.request.tolist())}
        if len(order) != len(request_ids):
            unknown = sorted(set(request_ids) - order.keys())
            raise InputError("numbers", "must be of added requests, each once", unknown or list(request_ids))
        if list(order) != list(request_ids):
            rows = rows.take(torch.tensor([order[request_id] for request_id in request_ids]))
        return rows

    def _store_absent(self, last: _LastBatch, wanted: Mapping[int, int]) -> None:
        """Store the requests of the last batch that are not in this one."""
        for index, request_id in enumerate(last.request_ids):
            if request_id not in wanted and request_id in self._running.requests:
                self._absent[request_id] = last.take(index)

    def _new_rows(self, request_ids: Sequence[int]) -> Rows:
        rows = new_rows(self._running, request_ids, self._model.device)
        lines = [self._new.pop(request_id) for request_id in request_ids]
        rows = rows.replace(slot=torch.tensor([line.slot for line in lines]))
        width = max(len(line.tokens) for line in lines)
        if not width:
            return rows
        count = torch.tensor([len(line.tokens) for line in lines])
        padded = [[*line.tokens, *[0] * (width - len(line.tokens))] for line in lines]
        return rows.append(torch.tensor(padded, device=rows.tokens.device), rows.length + count)

    # -------------------------------------------------------------------- checks
    def _request(self, request: Request) -> Request:
        """The request as it is sampled: one sequence, without what the other engine decides."""
        config = request.generation_config
        changes: dict[str, Any] = {name: None for name in _ENGINE_FIELDS if getattr(config, name) is not None}
        if config.num_beams == 1 and config.num_return_sequences > 1:
            changes["num_return_sequences"] = 1  # the others are requests of their own
        if config.grammar is not None:
            changes["grammar"] = {**config.grammar, "drafts": False}
        config = config.replace(**changes) if changes else config
        tokenizer = self._tokenizer if request.tokenizer is None else request.tokenizer
        return replace(
            request,
            generation_config=config,
            tokenizer=tokenizer,
            _call=replace(request._call, config_merged=True),
        )

    def _plan(self, request: Request) -> DecodingPlan:
        plan = self._admission.make_plan(request, self._model.traits)
        check_external_plan(plan)
        return plan


class _LastBatch(NamedTuple):
    """The rows of a batch before and after their tokens were chosen."""

    before: Rows
    after: Rows
    request_ids: list[int]
    num_new: list[int]  # new tokens of each afterwards
    place: dict[int, int]  # of each request

    @classmethod
    def of(cls, before: Rows, after: Rows) -> _LastBatch:
        """The rows before and after a step."""
        request_ids = after.request.tolist()
        counts = (after.length - after.prompt_length).tolist()
        return cls(
            before,
            after,
            request_ids,
            counts,
            {request_id: row for row, request_id in enumerate(request_ids)},
        )

    def take(self, index: int) -> _LastBatch:
        """One of its requests alone."""
        request_id = self.request_ids[index]
        row = int((self.before.request == request_id).nonzero()[0])
        before = self.before.take(torch.tensor([row]))
        after = self.after.take(torch.tensor([index]))
        return _LastBatch(before, after, [request_id], [self.num_new[index]], {request_id: 0})

    def rows(self, request_ids: Sequence[int], num_new: Sequence[int]) -> Rows:
        """The rows of these requests, each with so many new tokens: its last one may be discarded."""
        index = self.place
        excess = [
            self.num_new[index[request_id]] - now
            for request_id, now in zip(request_ids, num_new, strict=True)
        ]
        if not any(excess):
            return self.after.take(torch.tensor([index[request_id] for request_id in request_ids]))
        if not set(excess) <= {0, 1}:
            must = f"must be that of the last batch or one less ({self.num_new})"
            raise InputError("num_new", must, list(num_new))
        old = {request_id: place for place, request_id in enumerate(self.before.request.tolist())}
        parents = [
            len(self.after) + old[request_id] if discarded else index[request_id]
            for request_id, discarded in zip(request_ids, excess, strict=True)
        ]
        return self.after.cat(self.before).take(torch.tensor(parents))
