"""One call of generate(): a Session that admits all prompts, runs to the end, and builds the output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Final

import torch
from torch import Tensor

from descant.api.call import Call, CallOptions, num_rows
from descant.api.criterion_scores import CriterionScores, ScoredCriterion
from descant.api.inputs import RaggedPrompts
from descant.api.progress_bar import ProgressBar
from descant.api.step_recorder import OutputLayout, StepRecorder
from descant.config.generation_config import STEP_OUTPUT_FIELDS, GenerationConfig
from descant.core.records import Hypothesis
from descant.engine.planner import pad_token_id
from descant.engine.session import Failed, Finished, Session, Tokens
from descant.errors import ConfigError, ConstraintError, InputError
from descant.models.eager_attention import with_eager_attention
from descant.models.model_output import GenerateOutput

__all__ = ["GenerateCall"]

_DECODER_STATES: Final = ("decoder_attentions", "cross_attentions", "decoder_hidden_states")


class GenerateCall:
    """One call of generate(): admits all prompts, runs them to the end, and builds the documented output."""

    def __init__(self, model: Any, options: CallOptions, streamer: Any, progress: bool = False) -> None:
        if streamer is not None and (
            options.forks or any(config.num_beams > 1 for config in options.configs)
        ):
            method = "a recipe that forks" if options.forks else "beam search"
            do = "use descant.stream, which emits the common prefix of all sequences"
            raise InputError(
                "streamer", f"must be None with {method}, whose tokens are not final", streamer, do
            )
        if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
            raise InputError("streamer", "must have `put` and `end`", streamer)
        for config in options.configs:
            _validate_logprobs_returned(config)
        self.config = options.config
        self.streamer = streamer
        self.progress = progress  # whether a bar counts the finished prompts
        # After `run`: the prompts as they were fed, and the sequences of each.
        self.prompts: RaggedPrompts | None = None
        self.results: list[list[Hypothesis]] = []
        fields = STEP_OUTPUT_FIELDS if self.config.return_dict_in_generate else ()
        names = {name.removeprefix("output_") for name in fields if getattr(self.config, name)}
        self.states = tuple(sorted(names & {"attentions", "hidden_states"}))
        self.recorder = StepRecorder(frozenset(names)) if names else None
        if options.scheduler is not None and self.states:
            must = f"must be None with `output_{self.states[0]}`, since prompts are read in pieces"
            raise InputError("scheduler", must, options.scheduler, "leave one of them out")
        if "attentions" in self.states:
            model = with_eager_attention(model)
        self.call = Call(model, options, states=self.states, observe=self.recorder)
        self.session = self.call.session
        self._validate_attention_backend()
        if self.recorder is not None and "scores" in names:
            scores = CriterionScores(self.recorder, self._output_layout)
            self.call.criteria = tuple(
                ScoredCriterion(one, scores) if callable(one) else one for one in options.criteria
            )

    @torch.no_grad()
    def run(self, inputs: Mapping[str, Any]) -> Tensor | GenerateOutput:
        """Run the call with these model inputs."""
        prompts = self.prompts = self.call.admit(inputs)
        try:
            finished = self._drain(prompts)
        except BaseException:
            self.call.cancel()
            raise
        events = [finished[request] for request in self.call.request_ids]
        results = self.results = [event.hypotheses for event in events]
        cache = self.call.result_cache(events, prompts)
        return self._build_output(prompts, results, cache)

    def _drain(self, prompts: RaggedPrompts) -> dict[int, Finished]:
        """Step until all requests are finished; their events by request id."""
        feed = None
        if self.streamer is not None:
            counts = torch.tensor([num_rows(config) for config in self.call.configs])
            self.streamer.put(prompts.padded_ids.cpu().repeat_interleave(counts, 0))
            first_rows = self.call.first_output_rows(num_rows)
            feed = _StreamerFeed(self.streamer.put, first_rows, int(counts.sum()), self._pad_token_id)
        finished: dict[int, Finished] = {}
        with ProgressBar(len(self.call.request_ids)) if self.progress else nullcontext() as bar:
            while len(self.session):
                for event in self.session.step():
                    if bar is not None:
                        bar.count(event)
                    if isinstance(event, Finished):
                        finished[event.request] = event
                        if feed is not None:
                            feed.finish(event)
                    elif isinstance(event, Failed):
                        raise event.error.__cause__ or event.error  # a user's own exception as it was raised
                    elif feed is not None:
                        feed.put(event)
        if self.streamer is not None:
            self.streamer.end()
        return finished

    @property
    def _pad_token_id(self) -> int:
        return pad_token_id(self.config)

    def _build_output(
        self, prompts: RaggedPrompts, results: Sequence[list[Hypothesis]], cache: Any
    ) -> Tensor | GenerateOutput:
        """The padded prompts, each followed by its new tokens and padded on the right [N, W + T]."""
        hypotheses = _flatten(results)
        num_new = max(len(hypothesis.tokens) for hypothesis in hypotheses)
        new_tokens = torch.full((len(hypotheses), num_new), self._pad_token_id)
        for row, hypothesis in enumerate(hypotheses):
            new_tokens[row, : len(hypothesis.tokens)] = hypothesis.tokens
        device = self.session.device
        counts = torch.tensor([len(group) for group in results], device=device)
        sequences = torch.cat((prompts.padded_ids.repeat_interleave(counts, 0), new_tokens.to(device)), 1)
        if not self.config.return_dict_in_generate:
            _validate_constraints_met(results)
            return sequences
        output = self._build_output_object(sequences, prompts, results, num_new)
        if cache is None:
            return output
        legacy = bool(self.config.return_legacy_cache)
        # Rebuilt, as the entries of an output are in a documented order.
        return type(output)(**output, past_key_values=cache.to_legacy_cache() if legacy else cache)

    def _build_output_object(
        self, sequences: Tensor, prompts: RaggedPrompts, results: Sequence[list[Hypothesis]], num_new: int
    ) -> GenerateOutput:
        """The output object without its cache."""
        from descant.models.generate_outputs import OUTPUT_CLASSES

        hypotheses = _flatten(results)
        first_rows = self.call.first_output_rows(_num_score_rows)
        values: dict[str, Any] = {"sequences": sequences, **self._recorded_tensors(prompts)}
        if self.call.options.forks:
            values["sequence_counts"] = tuple(map(len, results))
        if any(hypothesis.logprobs is not None for hypothesis in hypotheses):
            values["logprobs"] = tuple(hypothesis.logprobs for hypothesis in hypotheses)
        if any(hypothesis.speculation is not None for hypothesis in hypotheses):
            values["speculation"] = tuple(hypothesis.speculation for hypothesis in hypotheses)
        values["trace"] = self.session.trace
        has_beams = any(config.num_beams > 1 for config in self.call.configs)
        if has_beams:
            if self.config.output_scores:
                scores = [torch.nan if one.score is None else one.score for one in hypotheses]
                values["sequences_scores"] = torch.tensor(scores, device=sequences.device)
            if any(hypothesis.unmet_constraints is not None for hypothesis in hypotheses):
                values["unmet_constraints"] = tuple(one.unmet_constraints or () for one in hypotheses)
            starts = [first_rows[request] for request in self.call.request_ids]
            values["beam_indices"] = _beam_indices(results, starts, num_new).to(sequences.device)
        is_encoder_decoder = self.session.traits.is_encoder_decoder
        return OUTPUT_CLASSES[has_beams, is_encoder_decoder](**values)

    def _output_layout(self, prompt_width: int = 0) -> OutputLayout:
        """Where the rows of each request are in the scores of a step."""
        pairs = zip(self.call.request_ids, self.call.configs, strict=True)
        counts = {request: _num_score_rows(config) for request, config in pairs}
        first_rows = self.call.first_output_rows(_num_score_rows)
        return OutputLayout(first_rows, counts, self._pad_token_id, prompt_width)

    def _recorded_tensors(self, prompts: RaggedPrompts) -> dict[str, Any]:
        """The requested scores, logits, attentions and hidden states of every step."""
        if self.recorder is None:
            return {}
        layout = self._output_layout(prompts.width)
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
        if self.call.user_cache is None or states is None or self.recorder is None:
            return states
        parts = [part for step in self.recorder.observations for part in step.output.states if name in part]
        size = max(int((part["fed_length"] - part["num_drafts"]).max()) for part in parts)
        dim = 2 if "attentions" in name else 1
        first = tuple(layer.narrow(dim, layer.shape[dim] - size, size) for layer in states[0])
        return (first, *states[1:])

    def _validate_attention_backend(self) -> None:
        if "attentions" in self.states and self.session.traits.attn_implementation != "eager":
            backend = self.session.traits.attn_implementation
            do = 'load the model with attn_implementation="eager"'
            must = f"needs attention weights, which {backend!r} does not return"
            raise InputError("output_attentions", must, True, do)


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


def _flatten(results: Sequence[list[Hypothesis]]) -> list[Hypothesis]:
    """The hypotheses of all prompts in order."""
    return [hypothesis for group in results for hypothesis in group]


def _validate_constraints_met(results: Sequence[list[Hypothesis]]) -> None:
    """Raise for unmet constraints, as a tensor of tokens cannot report them."""
    for prompt, group in enumerate(results):
        for hypothesis in group:
            if hypothesis.unmet_constraints:
                unmet = ", ".join(map(str, hypothesis.unmet_constraints))
                do = "raise max_new_tokens or num_beams, or set return_dict_in_generate=True to see which"
                raise ConstraintError(
                    f"the result of prompt {prompt} must meet all constraints, got "
                    f"{len(hypothesis.tokens)} tokens without number {unmet}: {do}",
                    prompt,
                    hypothesis.unmet_constraints,
                )


def _validate_logprobs_returned(config: GenerationConfig) -> None:
    """Raise for `logprobs` in a call that returns a tensor only."""
    is_returned = config.return_dict_in_generate or config.logprobs is None
    if not is_returned and config.source("logprobs") != "model":
        do = "set return_dict_in_generate=True or leave it out"
        must = "has no use while `return_dict_in_generate` is False"
        raise ConfigError("logprobs", must, config.logprobs, do)


def _num_score_rows(config: GenerationConfig) -> int:
    """How many rows a request has in the scores of a step."""
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
