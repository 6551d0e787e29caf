"""One way to run a case's requests: in a session by a schedule, or each alone; and the comparison."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import isclose
from typing import Any

import torch
from torch import Tensor

import descant
from descant import (
    AsyncEngine,
    ConfigError,
    DescantError,
    Failed,
    Finished,
    Hypothesis,
    InputError,
    Logprobs,
    PrefixCache,
    Recipe,
    Request,
    RowError,
    SchedulerConfig,
    Session,
    Tokens,
)
from tools.fuzz.branching import Branching
from tools.fuzz.cases import Action, Ask, Case
from tools.fuzz.changes import CHANGES, OF_ADAPTERS
from tools.fuzz.subjects import Subject, tokenizer

__all__ = [
    "Result",
    "active_adapter",
    "alone",
    "compare",
    "crowd",
    "generated",
    "is_close",
    "prompt_logprobs",
    "together",
]

TOLERANCE = 1e-4
_MAX_STEPS = 400  # far more than any case takes


@dataclass
class Result:
    """What became of a request."""

    hypotheses: Sequence[Hypothesis] = ()
    error: DescantError | None = None  # with which it failed or was refused
    is_refused: bool = False
    is_cancelled: bool = False
    streamed: dict[int, list[int]] = field(default_factory=dict)  # by slot
    peeked: list[list[int]] = field(default_factory=list)  # common prefixes while it ran
    prompt_logprobs: Logprobs | None = None

    @property
    def has_ended(self) -> bool:
        """Whether it needs no more steps."""
        return bool(self.hypotheses) or self.error is not None or self.is_cancelled

    @property
    def tokens(self) -> list[list[int]]:
        """The new tokens of each sequence."""
        return [one.tokens.tolist() for one in self.hypotheses]


class _Driver:
    """A session, the requests that it is given, and their results."""

    def __init__(self, session: Session, on: Subject, asks: Sequence[Ask]) -> None:
        self.session, self.on, self.asks = session, on, asks
        self.results = [Result() for _ in asks]
        self.number: dict[int, int] = {}  # of a request by its index
        self.index: dict[int, int] = {}

    def run(self, actions: Mapping[int, Sequence[Action]]) -> list[Result]:
        """Step until every request has ended."""
        last = max(actions, default=0)
        for step in range(_MAX_STEPS):
            for action in actions.get(step, ()):
                self.act(action)
            if step >= last and not len(self.session):
                break
            for event in self.session.step():
                self.handle(event)
        if len(self.session) or self.session.rows:
            raise AssertionError(f"{len(self.session)} requests and {self.session.rows} rows are left")
        return self.results

    def act(self, action: Action) -> None:
        if action.kind == "admit":
            self.admit(action.asks)
        elif action.kind == "refuse":
            self.refuse()
        elif action.asks[0] not in self.number or self.results[action.asks[0]].has_ended:
            return
        elif action.kind == "cancel":
            self.results[action.asks[0]].is_cancelled = True
            self.session.cancel(self.number[action.asks[0]])
        else:
            found = self.session.common_prefix(self.number[action.asks[0]])
            self.results[action.asks[0]].peeked.append(found.tolist())

    def admit(self, indices: Sequence[int]) -> None:
        try:
            requests = [self.asks[index].request(self.on) for index in indices]
            numbers = self.session.admit(*requests)
        except DescantError as error:
            if len(indices) > 1:  # all or none: find the one that is wrong
                for index in indices:
                    self.admit([index])
                return
            self.results[indices[0]].error = error
            self.results[indices[0]].is_refused = True
            return
        for index, number in zip(indices, numbers, strict=True):
            self.number[index], self.index[number] = number, index

    def refuse(self) -> None:
        """Try a request that cannot be admitted."""
        prompt = list(self.asks[0].prompt)
        inputs = {"input_ids": torch.tensor(self.asks[0].source)} if self.on.encodes else {}
        store = self.asks[0].store
        fields = {} if store is None else store.fields()
        config = descant.GenerationConfig(max_new_tokens=3, stop_strings="a", **fields)
        try:
            self.session.admit(Request(prompt, config, inputs))
        except DescantError:
            return
        raise AssertionError("a request with stop_strings and without a tokenizer was admitted")

    def handle(self, event: object) -> None:
        if isinstance(event, Tokens):
            for request, slot, token in torch.stack((event.request, event.slot, event.token), 1).tolist():
                self.results[self.index[request]].streamed.setdefault(slot, []).append(token)
        elif isinstance(event, Finished):
            self.results[self.index[event.request]].hypotheses = event.hypotheses
        elif isinstance(event, Failed):
            self.results[self.index[event.request]].error = event.error


def crowd(case: Case, on: Subject) -> list[Result]:
    """The case as its schedule says; raises for what no single request is to blame for."""
    shared = PrefixCache(block=case.prefix_cache) if case.prefix_cache else None
    given: dict[str, Any] = {"prefix_cache": shared, "scheduler": _scheduler(case, on)}
    run = _in_engine if case.in_engine else _in_session
    if case.change:
        run(case, on, given)
        {**CHANGES, **OF_ADAPTERS}[case.change](on.model)
    results = run(case, on, given)
    for index, result in enumerate(results):
        _check_peeks(index, result)
        if case.asks[index].fails_after is not None and result.error is not None and not result.is_refused:
            assert isinstance(result.error, RowError), f"request {index} failed with {result.error!r}"
        if case.asks[index].branches and result.streamed and result.hypotheses:
            made = f"{len(result.streamed)} sequences were made, {len(result.hypotheses)} returned"
            assert len(result.streamed) == len(result.hypotheses), f"request {index}: {made}"
    return results


def _in_session(case: Case, on: Subject, given: Mapping[str, Any]) -> list[Result]:
    """The results in a session."""
    session = Session(on.model, trace=case.trace or None, **given)
    return _Driver(session, on, case.asks).run(case.actions)


def _in_engine(case: Case, on: Subject, given: Mapping[str, Any]) -> list[Result]:
    """The results in an engine that is given all requests at once."""
    results = [Result() for _ in case.asks]
    with AsyncEngine(on.model, **given) as engine:
        handles = []
        for ask, result in zip(case.asks, results, strict=True):
            try:
                handles.append((result, engine.submit(ask.request(on))))
            except DescantError as error:
                result.error, result.is_refused = error, True
        for result, handle in handles:
            try:
                ended = handle.result()
            except DescantError as error:
                # The engine admits in a thread: a refusal is the cause of the error that a request ends with.
                is_refused = isinstance(error.__cause__, ConfigError | InputError)
                result.error, result.is_refused = error.__cause__ if is_refused else error, is_refused
            else:
                result.hypotheses, result.prompt_logprobs = ended.hypotheses, ended.prompt_logprobs
    return results


def _scheduler(case: Case, on: Subject) -> SchedulerConfig | None:
    """The scheduler's config; its pool has room for the largest request."""
    if case.scheduler is None:
        return None
    config = SchedulerConfig(**case.scheduler)
    if case.spare_blocks is None:
        return config
    session = Session(on.model, scheduler=replace(config, num_blocks=10**6))
    needed = [1]
    for ask in case.asks:
        try:
            needed.append(session.demand(replace(ask, prompt_logprobs=None).request(on)).max_blocks(config))
        except DescantError:
            continue  # it is refused
    return replace(config, num_blocks=max(needed) + case.spare_blocks)


@contextmanager
def active_adapter(model: Any, name: str | None) -> Iterator[None]:
    """A block in which an adapter is the active one; None: the model as it is."""
    if name is None:
        yield
        return
    before = model.active_adapters()
    if name == "__base__":
        model.disable_adapters()
    else:
        model.set_adapter(name)
    try:
        yield
    finally:
        model.enable_adapters()
        model.set_adapter(before)


@torch.no_grad()
def prompt_logprobs(on: Subject, ask: Ask) -> Tensor:
    """The log-probability of each prompt token after the first, by the model itself."""
    prompt = torch.tensor(ask.prompt)
    logits = on.model(prompt[None]).logits[0, :-1]
    found: Tensor = logits.log_softmax(-1).gather(1, prompt[1:, None])[:, 0]
    return found


def _check_peeks(index: int, result: Result) -> None:
    """Every sequence must begin with what was common to all while the request ran."""
    for prefix in result.peeked if result.hypotheses else ():
        for tokens in result.tokens:
            if tokens[: len(prefix)] != prefix:
                raise AssertionError(f"request {index}: common prefix {prefix}, returned {tokens}")


def together(on: Subject, asks: Sequence[Ask]) -> list[Result]:
    """All requests at once in one session."""
    if not asks:
        return []
    return _Driver(Session(on.model), on, asks).run({0: (Action("admit", tuple(range(len(asks)))),)})


def alone(on: Subject, ask: Ask) -> Result:
    """A request in a session of its own."""
    return together(on, [ask])[0]


def generated(on: Subject, ask: Ask) -> Result:
    """A request by `generate`; its reasons, streams and log-probabilities are not known."""
    given: dict[str, Any] = {"logits_processor": ask.processors, "stopping_criteria": ask.criteria}
    if ask.source:
        given |= {"input_ids": torch.tensor([ask.source]), "decoder_input_ids": torch.tensor([ask.prompt])}
    else:
        given["input_ids"] = torch.tensor([ask.prompt])
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    if ask.negative:
        given["negative_prompt_ids"] = torch.tensor([ask.negative])
    if ask.needs_text:
        given["tokenizer"] = tokenizer(on.vocab)
    if ask.drafts:
        given["assistant_model"] = on.draft
    if ask.branches:
        given["recipe"] = Recipe.from_object(Branching)(most=ask.branches)
    try:
        config = ask.config().replace(return_dict_in_generate=True)
        if config.num_beams > 1:
            config = config.replace(output_scores=True)
        out = descant.generate(on.model, generation_config=config, **given)
    except RowError as error:
        return Result(error=error)
    except DescantError as error:
        return Result(error=error, is_refused=True)
    scores = out.sequences_scores if config.num_beams > 1 else None
    return Result([
        Hypothesis(row[len(ask.prompt) :], "", None if scores is None else float(scores[index]))
        for index, row in enumerate(out.sequences)
    ])  # fmt: skip


def compare(expected: Result, found: Result, fills: Collection[int]) -> str | None:
    """What differs between two results of one request, rows being filled up with `fills`; None: nothing."""
    if type(expected.error) is not type(found.error):
        return f"error {found.error!r}, expected {expected.error!r}"
    if len(expected.hypotheses) != len(found.hypotheses):
        return f"{len(found.hypotheses)} sequences, expected {len(expected.hypotheses)}"
    for rank, (one, two) in enumerate(zip(expected.hypotheses, found.hypotheses, strict=True)):
        told = _compare_sequences(one, two, fills)
        if told is not None:
            return f"sequence {rank}: {told}"
    if expected.streamed and found.streamed and not _same_streams(expected, found):
        return f"streamed {found.streamed}, expected {expected.streamed}"
    return None


def _same_streams(expected: Result, found: Result) -> bool:
    """Whether two results streamed the same tokens; where a request fails, as far as both had come.

    With drafts a sequence may be ahead of the one that ends the request with an error.
    """
    if expected.error is None:
        return expected.streamed == found.streamed
    pairs = [(tokens, found.streamed.get(slot, [])) for slot, tokens in expected.streamed.items()]
    return all(one[: len(two)] == two[: len(one)] for one, two in pairs)


def _compare_sequences(expected: Hypothesis, found: Hypothesis, fills: Collection[int]) -> str | None:
    mine, wanted = found.tokens.tolist(), expected.tokens.tolist()
    if not (expected.reason and found.reason):  # one of them is padded
        size = min(len(mine), len(wanted))
        rest = {*mine[size:], *wanted[size:]}
        if mine[:size] != wanted[:size] or not rest <= set(fills):
            return f"tokens {mine}, expected {wanted}"
    elif mine != wanted:
        return f"tokens {mine}, expected {wanted}"
    elif found.reason != expected.reason:
        return f"ended by {found.reason}, expected {expected.reason}"
    else:
        for name in ("beam_indices", "unmet_constraints", "constraint_steps"):
            if getattr(found, name) != getattr(expected, name):
                return f"{name} {getattr(found, name)}, expected {getattr(expected, name)}"
        if (found.logprobs is None) != (expected.logprobs is None):
            return "one has log-probabilities"
        if found.logprobs is not None and expected.logprobs is not None:
            for name in ("raw", "processed", "top_raw", "top_processed"):
                if not is_close(getattr(found.logprobs, name), getattr(expected.logprobs, name)):
                    return (
                        f"logprobs.{name} {getattr(found.logprobs, name).tolist()}, "
                        f"expected {getattr(expected.logprobs, name).tolist()}"
                    )
    if expected.score is None and not expected.reason:
        return None  # unknown
    if (found.score is None) != (expected.score is None):
        return f"score {found.score}, expected {expected.score}"
    if found.score is not None and expected.score is not None:
        # A score may be as large as a float when nothing but impossible tokens was left.
        near = isclose(found.score, expected.score, rel_tol=1e-6, abs_tol=TOLERANCE)
        return None if near else f"score {found.score}, expected {expected.score}"
    return None


def is_close(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors differ by rounding alone."""
    if one.shape != two.shape:
        return False
    same = (one == two) | ((one - two).abs() <= TOLERANCE * (1 + two.abs())) | (one.isnan() & two.isnan())
    return bool(same.all())
