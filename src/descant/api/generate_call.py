"""One call of generate(): a Session that admits all prompts, runs to the end, and builds the output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import Any, Final, Self

import torch
from torch import Tensor
from tqdm.auto import tqdm

from descant.api.call import Call, CallOptions
from descant.api.step_recorder import CriterionScores, OutputLayout, ScoredCriterion, StepRecorder
from descant.config.generation_config import STEP_OUTPUT_FIELDS, GenerationConfig
from descant.core.records import Hypothesis
from descant.engine.planning.planner import pad_token_id
from descant.engine.session import Event, Failed, Finished, Session, Tokens
from descant.errors import ConfigError, ConstraintError, InputError
from descant.models.model_output import GenerateOutput
from descant.models.wrapping.wrapped_model import with_eager_attention


class ProgressBar:
    """A bar on stderr, or in a notebook, that counts prompts and shows the tokens a second."""

    def __init__(self, num_prompts: int) -> None:
        self._bar: Any = tqdm(total=num_prompts, unit="prompt", desc="generate")
        self._num_tokens = 0

    def count(self, event: Event) -> None:
        """Count an event of the session."""
        if isinstance(event, Tokens):
            self._num_tokens += len(event.token)
            elapsed = self._bar.format_dict["elapsed"]
            speed = f"{self._num_tokens / elapsed:.0f} tokens/s" if elapsed > 0 else ""
            self._bar.set_postfix_str(speed, refresh=False)
            self._bar.update(0)
        elif isinstance(event, Finished):
            self._bar.update()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()


_DECODER_STATES: Final = ("decoder_attentions", "cross_attentions", "decoder_hidden_states")


class GenerateCall(Call):
    """One call of generate(): admits all prompts, runs them to the end, and builds the documented output."""

    def __init__(self, model: Any, options: CallOptions) -> None:
        if options.streamer is not None:
            _check_streamer(options)
        for config in options.configs:
            is_returned = config.return_dict_in_generate or config.logprobs is None
            if not is_returned and config.source("logprobs") != "model":
                do = "set return_dict_in_generate=True or leave it out"
                must = "has no use while `return_dict_in_generate` is False"
                raise ConfigError("logprobs", must, config.logprobs, do)
        self.config = options.configs[0]
        self.results: list[list[Hypothesis]] = []  # after `run`: the sequences of each prompt
        self._pad_token_id = pad_token_id(self.config)
        names: set[str] = set()
        if self.config.return_dict_in_generate:
            requested = [name for name in STEP_OUTPUT_FIELDS if getattr(self.config, name)]
            names.update([name.removeprefix("output_") for name in requested])
        self.states = tuple(sorted(names & {"attentions", "hidden_states"}))
        self.recorder = StepRecorder(frozenset(names)) if names else None
        if options.scheduler is not None and self.states:
            must = f"must be None with `output_{self.states[0]}`, since prompts are read in pieces"
            raise InputError("scheduler", must, options.scheduler, "leave one of them out")
        if "attentions" in self.states:
            model = with_eager_attention(model)
        super().__init__(model, options, states=self.states, observe=self.recorder)
        if "attentions" in self.states and self.session.traits.attn_implementation != "eager":
            backend = self.session.traits.attn_implementation
            do = 'load the model with attn_implementation="eager"'
            must = f"needs attention weights, which {backend!r} does not return"
            raise InputError("output_attentions", must, True, do)
        if self.recorder is not None and "scores" in names:
            scores = CriterionScores(self.recorder, self._output_layout)
            self.criteria = tuple(
                ScoredCriterion(criterion, scores) if callable(criterion) else criterion
                for criterion in self.criteria
            )

    @torch.no_grad()
    def run(self, inputs: Mapping[str, Any]) -> Tensor | GenerateOutput:
        """Run the call with these model inputs."""
        self.admit(inputs)
        finished: dict[int, Finished] = {}
        try:
            feed = None if self.options.streamer is None else self._start_streamer(self.options.streamer)
            with ProgressBar(len(self.request_ids)) if self.options.progress else nullcontext() as bar:
                while len(self.session):
                    for event in self.session.step():
                        if bar is not None:
                            bar.count(event)
                        if isinstance(event, Finished):
                            finished[event.request] = event
                            if feed is not None:
                                feed.finish(event)
                        elif isinstance(event, Failed):  # a user's own exception as it was raised
                            raise event.error.__cause__ or event.error
                        elif feed is not None:
                            feed.put(event)
            if self.options.streamer is not None:
                self.options.streamer.end()
        except BaseException:
            self.cancel()
            raise
        events: list[Finished] = []
        for request in self.request_ids:
            events.append(finished[request])
            self.results.append(finished[request].hypotheses)
        return self._build_output(self.result_cache(events) if self.returns_cache else None)

    def _start_streamer(self, streamer: Any) -> _StreamerFeed:
        """Give a streamer the prompts; the feed of its tokens."""
        counts = torch.tensor(self.row_counts)
        streamer.put(self.prompts.padded_ids.cpu().repeat_interleave(counts, 0))
        first_rows = self.first_rows(self.row_counts)
        return _StreamerFeed(streamer.put, first_rows, int(counts.sum()), self._pad_token_id)

    def _build_output(self, cache: Any) -> Tensor | GenerateOutput:
        """The padded prompts, each followed by its new tokens and padded on the right [N, W + T]."""
        results, prompts = self.results, self.prompts
        tokens = [hypothesis.tokens for group in results for hypothesis in group]
        num_new = max(map(len, tokens))
        new_tokens = torch.full((len(tokens), num_new), self._pad_token_id)
        for row, own in enumerate(tokens):
            new_tokens[row, : len(own)] = own
        device = self.session.device
        counts = torch.tensor(list(map(len, results)), device=device)
        sequences = torch.cat((prompts.padded_ids.repeat_interleave(counts, 0), new_tokens.to(device)), 1)
        if not self.config.return_dict_in_generate:
            for prompt, group in enumerate(results):
                for hypothesis in group:
                    if hypothesis.unmet_constraints:  # a tensor of tokens cannot report them
                        raise _unmet_constraints_error(prompt, hypothesis)
            return sequences
        output = self._build_output_object(sequences, num_new)
        if cache is None:
            return output
        legacy = bool(self.config.return_legacy_cache)
        # Rebuilt, as the entries of an output are in a documented order.
        return type(output)(**output, past_key_values=cache.to_legacy_cache() if legacy else cache)

    def _build_output_object(self, sequences: Tensor, num_new: int) -> GenerateOutput:
        """The output object without its cache."""
        from descant.models.compat.generate_outputs import OUTPUT_CLASSES

        results = self.results
        hypotheses = [hypothesis for group in results for hypothesis in group]
        values: dict[str, Any] = {"sequences": sequences, **self._recorded_tensors()}
        if self.options.forks:
            values["sequence_counts"] = tuple(map(len, results))
        if any(hypothesis.logprobs is not None for hypothesis in hypotheses):
            values["logprobs"] = tuple(hypothesis.logprobs for hypothesis in hypotheses)
        if any(hypothesis.speculation is not None for hypothesis in hypotheses):
            values["speculation"] = tuple(hypothesis.speculation for hypothesis in hypotheses)
        values["trace"] = self.session.trace
        has_beams = any(config.num_beams > 1 for config in self.configs)
        if has_beams:
            if self.config.output_scores:
                scores = [
                    torch.nan if hypothesis.score is None else hypothesis.score for hypothesis in hypotheses
                ]
                values["sequences_scores"] = torch.tensor(scores, device=sequences.device)
            if any(hypothesis.unmet_constraints is not None for hypothesis in hypotheses):
                values["unmet_constraints"] = tuple(
                    hypothesis.unmet_constraints or () for hypothesis in hypotheses
                )
            starts = self.first_rows(list(map(_num_score_rows, self.configs))).values()
            values["beam_indices"] = _beam_indices(results, list(starts), num_new).to(sequences.device)
        is_encoder_decoder = self.session.traits.is_encoder_decoder
        return OUTPUT_CLASSES[has_beams, is_encoder_decoder](**values)

    def _output_layout(self, prompt_width: int = 0) -> OutputLayout:
        """Where the rows of each request are in the scores of a step."""
        counts = list(map(_num_score_rows, self.configs))
        by_request = dict(zip(self.request_ids, counts, strict=True))
        return OutputLayout(self.first_rows(counts), by_request, self._pad_token_id, prompt_width)

    def _recorded_tensors(self) -> dict[str, Any]:
        """The requested scores, logits, attentions and hidden states of every step."""
        if self.recorder is None:
            return {}
        layout = self._output_layout(self.prompts.width)
        values: dict[str, Any] = {
            name: self.recorder.step_tensors(name, layout) for name in ("scores", "logits")
        }
        is_encoder_decoder = self.session.traits.is_encoder_decoder
        for name in _DECODER_STATES if is_encoder_decoder else self.states:
            if name.endswith(self.states):
                values[name] = self._drop_cached_positions(name, self.recorder.states(name, layout))
        if is_encoder_decoder:
            assert isinstance(self.session, Session)
            encoder_output = self.session.model.encoder.last_output
            values |= {f"encoder_{name}": encoder_output.get(name) for name in self.states}
        return values

    def _drop_cached_positions(self, name: str, states: Any) -> Any:
        """The states of all steps; those of the first step without the positions of the user's cache."""
        if self.user_cache is None or states is None or self.recorder is None:
            return states
        parts = [part for step in self.recorder.observations for part in step.output.states if name in part]
        size = max(int((part["fed_length"] - part["num_drafts"]).max()) for part in parts)
        dim = 2 if "attentions" in name else 1
        first = tuple(layer.narrow(dim, layer.shape[dim] - size, size) for layer in states[0])
        return (first, *states[1:])


def _check_streamer(options: CallOptions) -> None:
    """Raise for a streamer that this call cannot feed."""
    streamer = options.streamer
    if options.forks or any(config.num_beams > 1 for config in options.configs):
        method = "a recipe that forks" if options.forks else "beam search"
        do = "use descant.stream, which emits the common prefix of all sequences"
        raise InputError("streamer", f"must be None with {method}, whose tokens are not final", streamer, do)
    if not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise InputError("streamer", "must have `put` and `end`", streamer)


class _StreamerFeed:
    """Gives a streamer one token of every output row at a time, as the documented loop does.

    Tokens of rows that are ahead are buffered until the other rows have one.
    """

    def __init__(
        self, put: Callable[[Tensor], None], first_rows: Mapping[int, int], num_rows: int, pad: int
    ) -> None:
        self._put, self._first_rows, self._pad_token_id = put, first_rows, pad
        self._tokens: list[list[int]] = [[] for _ in range(num_rows)]
        self._is_finished = [False] * num_rows
        self._num_streamed = 0

    def put(self, event: Tokens) -> None:
        """Take the tokens of a step and emit every column that is complete."""
        columns = (event.request.tolist(), event.slot.tolist(), event.token.tolist())
        for index, (request, slot, token) in enumerate(zip(*columns, strict=True)):
            row = self._first_rows[request] + slot
            self._tokens[row].append(token)
            self._is_finished[row] = index in event.finished
        self._flush()

    def finish(self, event: Finished) -> None:
        """Take the tokens of a finished request that were not in an event before."""
        for slot, hypothesis in enumerate(event.hypotheses):
            row = self._first_rows[event.request] + slot
            self._tokens[row] += hypothesis.tokens[len(self._tokens[row]) :].tolist()
            self._is_finished[row] = True
        self._flush()

    def _flush(self) -> None:
        while self._has_full_column():
            index, pad = self._num_streamed, self._pad_token_id
            column = [tokens[index] if index < len(tokens) else pad for tokens in self._tokens]
            self._put(torch.tensor(column))
            self._num_streamed += 1

    def _has_full_column(self) -> bool:
        """Whether every unfinished row, and at least one row, has a token for the next column."""
        lengths = [len(tokens) for tokens in self._tokens]
        running = [size for size, done in zip(lengths, self._is_finished, strict=True) if not done]
        return max(lengths) > self._num_streamed and min(running, default=max(lengths)) > self._num_streamed


def _unmet_constraints_error(prompt: int, hypothesis: Hypothesis) -> ConstraintError:
    """The error of a sequence that does not meet all constraints."""
    unmet = ", ".join(map(str, hypothesis.unmet_constraints or ()))
    do = "raise max_new_tokens or num_beams, or set return_dict_in_generate=True to see which"
    got = f"{len(hypothesis.tokens)} tokens without number {unmet}"
    return ConstraintError(
        f"the result of prompt {prompt} must meet all constraints, got {got}: {do}",
        prompt,
        hypothesis.unmet_constraints or (),
    )


def _num_score_rows(config: GenerationConfig) -> int:
    """The number of rows of a request in the scores of a step."""
    return config.num_beams if config.num_beams > 1 else config.num_return_sequences


def _beam_indices(results: Sequence[list[Hypothesis]], first_rows: Sequence[int], num_new: int) -> Tensor:
    """The row of the scores that each token of each sequence was selected from, -1 beyond its end [N, T]."""
    indices = []
    for first_row, group in zip(first_rows, results, strict=True):
        for slot, hypothesis in enumerate(group):
            # A request without beams, next to others with beams, keeps its own row.
            own_row = [slot] * len(hypothesis.tokens)
            slots = own_row if hypothesis.beam_indices is None else hypothesis.beam_indices
            indices.append([first_row + beam for beam in slots] + [-1] * (num_new - len(slots)))
    return torch.tensor(indices, dtype=torch.int32)
