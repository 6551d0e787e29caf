"""Descant's requests on vLLM: its scheduler and kernels, Descant's processors and events."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from secrets import randbits
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import torch
from torch import Tensor

from descant.config.generation_config import GenerationConfig
from descant.core.interfaces import ModelTraits, RankGroup
from descant.core.records import Hypothesis, Tokens
from descant.decoding.processors.base import as_id_list
from descant.engine.protocol import Engine, Event, Failed, Finished, Report, single_entry
from descant.engine.request import Request, TextMatchers, build_text_matchers, compile_request_grammar
from descant.engine.scheduling.config import SchedulerConfig
from descant.engine.vllm.batch_sampler import BatchSampler, logits_traits
from descant.engine.vllm.loading import read_model_config, start_llm
from descant.engine.vllm.request_failures import FAILURES, REQUEST_ID_KEY
from descant.errors import DeadlineExceeded, DescantError, EngineFull, InputError, RowError
from descant.trace.trace import Trace

if TYPE_CHECKING:
    from vllm import SamplingParams


class SequenceStops:
    """The stop conditions of a request's sequences, checked token by token."""

    def __init__(self, request: Request, config: GenerationConfig) -> None:
        self._matchers: TextMatchers = build_text_matchers(request, config)
        self._deadline = None if config.max_time is None else time.monotonic() + config.max_time
        self._eos = frozenset(as_id_list(config.eos_token_id))
        self._stops = frozenset(as_id_list(config.stop_token_ids))
        matcher = self._matchers.stop_strings
        # A stop string may begin in the prompt.
        self.first_state = 0 if matcher is None else matcher.state_after([int(one) for one in request.prompt])

    def next_state(self, state: int, token: int) -> int:
        """The state of the stop strings after a token."""
        matcher = self._matchers.stop_strings
        if matcher is None or token >= matcher.vocab_size:
            return state
        return int(matcher.transition[token, state])

    def reason(self, state: int, tokens: Sequence[int], max_tokens: int) -> str | None:
        """Why a sequence of these new tokens ends, in `state` before the last one; None: it does not."""
        token = tokens[-1]
        if token in self._eos:
            return "eos"
        if token in self._stops:
            return "stop"
        if len(tokens) >= max_tokens:
            return "length"
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return "time"
        strings, regex = self._matchers.stop_strings, self._matchers.stop_regex
        if strings is not None and token < strings.vocab_size and bool(strings.matches[token, state]):
            return "stop"
        return "stop" if regex is not None and regex.matches(tokens) else None


# Parts of a request that only a session can use.
_REFUSED_PARTS: Final = {
    "logits_processor": "must be empty: functions cannot be sent to vLLM's workers",
    "stopping_criteria": "must be empty: vLLM does not call functions",
    "assistant_model": "must be None: vLLM drafts by its own settings",
    "past_key_values": "must be None: the keys and values are vLLM's",
    "return_past_key_values": "must be False: the keys and values are vLLM's",
    "recipe": "must be None: a recipe needs Descant's own loop",
    "prompt_logprobs": "must be None on vLLM",
    "adapter_name": "must be None on vLLM: its own requests name adapters",
}


@dataclass
class _Sequence:
    """One sequence of a request."""

    name: str  # of vLLM's request
    request: int
    slot: int
    state: int  # of its stop strings
    tokens: list[int] = field(default_factory=list)
    result: Hypothesis | None = None


@dataclass
class _VLLMRequest:
    """A request that vLLM runs, with one request of vLLM's own for each sequence."""

    stops: SequenceStops
    max_tokens: int
    deadline: float | None  # monotonic seconds
    sequences: list[_Sequence] = field(default_factory=list)

    @property
    def has_ended(self) -> bool:
        return all(sequence.result is not None for sequence in self.sequences)


class VLLM:
    """An engine of requests on vLLM: `descant.generate(None, ids, engine=descant.VLLM("models/smollm2"))`.

    It chooses the tokens that a session would choose with the same config and seed, up to the rounding of
    vLLM's kernels. What needs Descant's own loop (beams, contrastive search, DoLa, guidance, speculation) is
    refused; such fields of the model's own config are set aside, in `unused`. `options` are arguments of
    vLLM's `EngineArgs`. It runs in this process, and implements the `Engine` interface. A request without a
    seed has a random one.
    """

    def __init__(self, model: str, *, max_waiting: int | None = None, **options: Any) -> None:
        if options.get("speculative_config") is not None:
            do = "leave it out"
            raise InputError("speculative_config", "must be None with descant.VLLM", "a config", do)
        self.llm = start_llm(model, options)
        self.max_waiting = max_waiting
        model_config = self.llm.model_config
        # Of the model's own config: what vLLM can apply, and what it cannot.
        self.generation_config, self.unused = read_model_config(model_config)
        traits = logits_traits(model_config.get_vocab_size(), model_config.max_model_len)
        self.traits: ModelTraits = replace(traits, max_positions=model_config.max_model_len)
        self.device = torch.device("cpu")  # of the prompts
        self.steps = 0
        self.beam_requests: set[int] = set()
        self._busy_thread: int | None = None
        self._sampler = BatchSampler(self.traits.vocab_size)  # for checks alone
        self._requests: dict[int, _VLLMRequest] = {}
        self._sequences: dict[str, _Sequence] = {}  # by name
        self._request_ids = count()
        self._name = uuid4().hex[:8]  # of this engine, in the names of its requests

    @property
    def rank_group(self) -> RankGroup | None:
        """One process makes requests; vLLM's own ranks follow."""
        return None

    @property
    def trace(self) -> Trace | None:
        """It does not record."""
        return None

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of vLLM's model."""
        return self.llm.get_tokenizer()

    @property
    def scheduler_config(self) -> SchedulerConfig:
        """The limits of vLLM's scheduler in Descant's terms."""
        config = self.llm.vllm_config
        return SchedulerConfig(
            max_running_rows=config.scheduler_config.max_num_seqs,
            max_waiting=self.max_waiting,
            num_blocks=config.cache_config.num_gpu_blocks,
            block_size=config.cache_config.block_size,
        )

    @property
    def running(self) -> Iterable[int]:
        """The requests that have not ended."""
        return self._requests.keys()

    @property
    def rows(self) -> int:
        """The number of sequences that have not ended."""
        return len(self._sequences)

    @property
    def num_waiting(self) -> int:
        """The sequences that wait for vLLM's scheduler."""
        return 0 if self._scheduler is None else len(self._scheduler.waiting)

    @property
    def _scheduler(self) -> Any:
        """vLLM's scheduler, which runs in this process."""
        return getattr(getattr(self.llm.engine_core, "engine_core", None), "scheduler", None)

    def __len__(self) -> int:
        """The number of requests that have not ended."""
        return len(self._requests)

    # -------------------------------------------------------------------- requests come and go
    def supports(self, request: Request) -> DescantError | None:
        """The error that `admit` would raise because of the request itself; None: it can be admitted."""
        try:
            self._params(request)
        except DescantError as error:
            return error
        return None

    def has_grammar(self, request: Request) -> bool:
        """Whether a request has a grammar that is not compiled yet."""
        return request._call.compiled_grammar is None and request.generation_config.grammar is not None

    def compile_grammar(self, request: Request) -> Request:
        """The request with its grammar compiled; any thread may call it beside a step."""
        spec: Any = request.generation_config.grammar
        if not self.has_grammar(request):
            return request
        # With vLLM's tokenizer, for which the worker finds it in the cache of grammars.
        compiled = compile_request_grammar(replace(request, tokenizer=self.tokenizer), spec)
        return replace(request, _call=replace(request._call, compiled_grammar=compiled))

    @single_entry
    def admit(
        self,
        *requests: Request,
        noise_rows: int = 0,  # noqa: ARG002 - rows draw from their own streams
        numbers: Sequence[int] | None = None,
    ) -> list[int]:
        """Add requests, all or none; return their ids. Where a seed is needed and missing, one is drawn."""
        limit = self.max_waiting
        if limit is not None and requests and self.num_waiting >= limit:
            raise EngineFull(self.num_waiting, limit)
        configs = [self._merged_config(request) for request in requests]
        prepared = [
            (request, config, self._params(request, config))
            for request, config in zip(requests, configs, strict=True)
        ]
        request_ids = list(numbers or (next(self._request_ids) for _ in requests))
        if taken := [request_id for request_id in request_ids if request_id in self._requests]:
            raise InputError("numbers", "must not be of running requests", taken)
        try:
            for request_id, (request, config, params) in zip(request_ids, prepared, strict=True):
                self._add(request_id, request, config, params)
        except Exception as error:
            for request_id in request_ids:
                self._remove(request_id)
            # vLLM's errors of requests derive from ValueError, or from a class of their own.
            if isinstance(error, DescantError) or not (
                isinstance(error, ValueError) or type(error).__module__ == "vllm.exceptions"
            ):
                raise
            raise InputError("request", f"must be one that vLLM takes ({error})", "another") from error
        return request_ids

    def _merged_config(self, request: Request) -> GenerationConfig:
        config = request.generation_config
        if not request._call.config_merged:
            config = GenerationConfig.merge({}, config, self.generation_config)
        if config.do_sample and config.seed is None:
            # Not from torch's generator, which vLLM seeds with the same number at every start.
            config = config.replace(seed=randbits(62))
        return config

    def _params(self, request: Request, config: GenerationConfig | None = None) -> SamplingParams:
        """vLLM's parameters of a request, after all checks."""
        for name, must in _REFUSED_PARTS.items():
            value = getattr(request, name)
            if value is not None and value is not False and (not isinstance(value, Sequence) or len(value)):
                raise InputError(name, must, value, "leave it out, or use a Descant session")
        if request.inputs:
            name = next(iter(request.inputs))
            raise InputError(name, "must not be given on vLLM, which gets token ids", request.inputs[name])
        config = self._merged_config(request) if config is None else config
        length = len(request.prompt)
        if not length:
            raise InputError("prompt", "must have at least one token", request.prompt)
        from vllm.sampling_params import RequestOutputKind

        from descant.engine.vllm.request_config import read_params, to_sampling_params

        if config.num_return_sequences > 1:
            config = config.replace(num_return_sequences=1)  # each is a request of vLLM's own
        params = to_sampling_params(config, length, detokenize=False, output_kind=RequestOutputKind.DELTA)
        assert params.max_tokens is not None
        limit = self.traits.max_positions
        if limit is not None and length + params.max_tokens > limit:
            must = f"must leave room: vLLM has {limit} positions and the prompt takes {length}"
            raise InputError("max_new_tokens", must, params.max_tokens, "lower it or raise max_model_len")
        self._sampler.plan(config)
        read_params(params)  # as the plug-in does
        return params

    def _add(
        self, request_id: int, request: Request, config: GenerationConfig, params: SamplingParams
    ) -> None:
        assert params.max_tokens is not None
        deadline = None if request.deadline is None else time.monotonic() + request.deadline
        stops = SequenceStops(request, config)
        running = _VLLMRequest(stops, params.max_tokens, deadline)
        prompt: Any = {"prompt_token_ids": [int(token) for token in request.prompt]}
        if request.cache_salt:
            prompt["cache_salt"] = request.cache_salt.hex()
        for slot in range(config.num_return_sequences):
            sequence = _Sequence(f"{self._name}-{request_id}-{slot}", request_id, slot, stops.first_state)
            own = params.clone()
            own.seed = None if config.seed is None else config.seed + slot
            own.extra_args = {**(params.extra_args or {}), REQUEST_ID_KEY: sequence.name}
            self.llm.add_request(sequence.name, prompt, own, priority=request.priority)
            self._requests[request_id] = running
            running.sequences.append(sequence)
            self._sequences[sequence.name] = sequence

    @single_entry
    def cancel(self, request: int) -> None:
        """Remove a request and free what it holds before the next step."""
        if request not in self._requests:
            raise InputError("request", "must be a running request", request)
        self._remove(request)

    def _remove(self, request_id: int) -> None:
        running = self._requests.pop(request_id, None)
        if running is not None:
            self._abort([sequence for sequence in running.sequences if sequence.result is None])

    def _abort(self, sequences: Sequence[_Sequence]) -> None:
        for sequence in sequences:
            self._sequences.pop(sequence.name, None)
            FAILURES.pop(sequence.name, None)
        self.llm.abort_request([sequence.name for sequence in sequences])

    # -------------------------------------------------------------------- steps
    @single_entry
    def step(self) -> list[Event]:
        """One step of vLLM; return what happened."""
        events: list[Event] = [*self._expire()]
        if not self._requests:
            return events
        self.steps += 1
        found: list[tuple[_Sequence, int]] = []
        ended: list[_Sequence] = []  # by vLLM
        for output in self.llm.step():
            sequence = self._sequences.get(output.request_id)
            if sequence is not None:
                completions: Any = output.outputs  # of a model that generates
                tokens = [token for completion in completions for token in completion.token_ids]
                found += [(sequence, int(token)) for token in tokens]
                ended += [sequence] if output.finished else []
        return [*events, *self._take(found), *self._fail_unfinished(ended)]

    def _fail_unfinished(self, ended: Sequence[_Sequence]) -> Iterator[Failed]:
        """End the requests of sequences that vLLM has ended for a reason of its own, such as an error."""
        for request_id in dict.fromkeys(one.request for one in ended if one.result is None):
            if request_id in self._requests:
                self._remove(request_id)
                must = f"vLLM must run request {request_id} to its end, and has not"
                yield Failed(request_id, RowError(must, request_id))

    def _expire(self) -> Iterator[Failed]:
        """End the requests whose deadline has passed."""
        now = time.monotonic()
        for request_id, request in list(self._requests.items()):
            if request.deadline is not None and now >= request.deadline:
                self._remove(request_id)
                yield Failed(request_id, DeadlineExceeded(request_id))

    def _take(self, found: Sequence[tuple[_Sequence, int]]) -> Iterator[Event]:
        """The events of the new tokens."""
        taken: list[tuple[_Sequence, int]] = []
        finished: dict[int, Hypothesis] = {}
        failed: dict[int, RowError] = {}
        for sequence, token in found:
            error = FAILURES.pop(sequence.name, None)
            if error is not None:
                failed.setdefault(sequence.request, error)
            if sequence.result is not None or error is not None:
                continue
            taken.append((sequence, token))
            result = self._append(sequence, token)
            if result is not None:
                finished[len(taken) - 1] = result
        if taken:
            yield Tokens(
                torch.tensor([one.request for one, _ in taken]),
                torch.tensor([one.slot for one, _ in taken]),
                torch.tensor([token for _, token in taken]),
                finished=finished,
            )
        for request_id, cause in failed.items():
            self._remove(request_id)
            yield Failed(request_id, cause)
        for request_id in dict.fromkeys(one.request for one, _ in taken):
            if request_id in self._requests and self._requests[request_id].has_ended:
                ended = self._requests.pop(request_id)
                yield Finished(request_id, [one.result for one in ended.sequences if one.result is not None])

    def _append(self, sequence: _Sequence, token: int) -> Hypothesis | None:
        """Append a token; the sequence, if it ends with it."""
        running = self._requests[sequence.request]
        sequence.tokens.append(token)
        reason = running.stops.reason(sequence.state, sequence.tokens, running.max_tokens)
        sequence.state = running.stops.next_state(sequence.state, token)
        if reason is None:
            return None
        sequence.result = Hypothesis(torch.tensor(sequence.tokens), reason)
        self._abort([sequence])
        return sequence.result

    def drain(self) -> Iterator[Event]:
        """Step until no request is running."""
        while len(self):
            yield from self.step()

    def common_prefix(self, request: int) -> Tensor:
        """The new tokens with which every sequence of a running request begins (host)."""
        sequences = [sequence.tokens for sequence in self._requests[request].sequences]
        size = min(map(len, sequences))
        equal = next((at for at in range(size) if len({sequence[at] for sequence in sequences}) > 1), size)
        return torch.tensor(sequences[0][:equal], dtype=torch.long)

    def report(self) -> Report:
        """Its work so far, and its content."""
        manager = getattr(self._scheduler, "kv_cache_manager", None)
        blocks = 0 if manager is None else round(manager.usage * (self.scheduler_config.num_blocks or 0))
        return Report(self.steps, len(self), self.rows, None, None, waiting=self.num_waiting, blocks=blocks)

    def close(self) -> None:
        """Free vLLM's memory and end its workers."""
        for request_id in list(self._requests):
            self._remove(request_id)
        self.llm.engine_core.shutdown()

    def __enter__(self) -> VLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_ENGINE: type[Engine] = VLLM  # for the type checker
