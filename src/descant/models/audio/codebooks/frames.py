"""Sequences of frames: what they need besides their codes, and what differs between model families."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, NamedTuple, cast

import torch
from torch import Tensor
from transformers.masking_utils import create_bidirectional_mask

from descant.config.generation_config import GenerationConfig
from descant.config.registry import GenerationMode
from descant.core.interfaces import KVCache, KVSpan, ModelTraits, RowCache
from descant.core.records import Proposal
from descant.core.rows import Rows, index_rows
from descant.core.sampling_noise import MAX_SEED
from descant.decoding.pipeline import LOGITS_WARPERS, PROCESSOR_SPECS
from descant.errors import NotInThisVersion
from descant.models.compat.custom_generate import PreparedLoop
from descant.models.forward.batches import ForwardBatch
from descant.models.forward.encoder import SelfAttentionView
from descant.models.forward.traits import traits_of
from descant.models.transformers_model import TransformersModel

CODEBOOK_INPUT = "codebook"  # the name of a request's `Codebook` among its inputs


# (depth model, its config, prompts [B, 2], seeds) -> [B, 1 + C]: a place and all codes of each frame
DecodeDepth = Callable[[Any, Any, Tensor, list[int] | None], Tensor]


@dataclass(eq=False)
class FrameState:
    """The state of a running sequence besides the codes in its rows."""

    seed: int | None = None  # of the sequence
    decode: DecodeDepth | None = None  # the loop that decodes the other codes of a frame
    hidden: Tensor | None = None  # [D] the network's last state at the last position that was fed
    more_codes: list[Tensor] = field(default_factory=list)  # [C - rows] each: the other codes of new frames


@dataclass(frozen=True, eq=False)
class FrameInputs:
    """Inputs of one sequence of frames besides its codes.

    A sequence begins with given codes, or behind a prompt of another kind (text). The first code of such a
    sequence stands for the last position of its prompt, and is never fed.
    """

    inputs: Mapping[str, Any]  # of the network
    pad_token_id: int  # the code of a codebook that has ended
    forced: Tensor | None = None  # [C, L] codes that are fed whatever is chosen; -1: the chosen one
    prefix: Tensor | None = None  # [E, D] embeddings before the first frame
    prompt: Mapping[str, Tensor] | None = None  # the prompt, where it is of another kind; [E, ...] each
    prompt_length: int = 0  # E
    guidance_scale: float = 1.0
    uncond_inputs: Mapping[str, Any] | None = None  # of the unconditional row; None: no guidance
    uncond_prefix: Tensor | None = None  # [E, D]
    options: Mapping[str, Any] = field(default_factory=dict)  # of the family
    state: FrameState = field(default_factory=FrameState)

    @property
    def prefix_length(self) -> int:
        """The number of positions before the first frame."""
        if self.prompt is not None:
            return self.prompt_length - 1
        return 0 if self.prefix is None else len(self.prefix)


@dataclass(frozen=True, eq=False)
class Codebook:
    """One codebook of a sequence."""

    frames: FrameInputs
    number: int


class StepInputs(NamedTuple):
    """One more frame of rows that all have the same length."""

    codes: Tensor  # [N, 1, C]
    past: Any  # the cache, as the network takes it
    position: int  # of the frame
    encoder_states: Tensor | None = None  # [N, S, D]
    encoder_mask: Tensor | None = None  # [N, S]


class LoopChanges(NamedTuple):
    """Additions of a family to a call; processors and criteria get all rows of the call at once."""

    processors: tuple[Any, ...] = ()
    criteria: tuple[Any, ...] = ()
    fields: Mapping[str, Any] = {}


class CodebookFamily:
    """The network of one architecture: its inputs and outputs as frames.

    The defaults are those of a network that returns the logits of all codebooks at once.
    """

    network: Any  # the module that is run in every step
    codes_name: str  # the argument of the network that holds codes [N, T, C]
    num_codebooks: int  # codes in a frame
    num_rows: int  # codebooks that are rows; the others are in `FrameState.more_codes`
    num_known_codes: int  # codes that may be fed, special ones included
    reads_hidden = False  # whether it reads `FrameState.hidden`
    has_guidance = True  # whether it has logits without condition, so that `guidance_scale` has a meaning
    processors: frozenset[str] | None = None  # the fields of those that it supports; None: all
    processes_forced = False  # whether processors see forced codes, or those that were chosen in their place
    changed_traits: ClassVar[Mapping[str, Any]] = {}  # traits of the network as it is fed here

    def network_traits(self) -> ModelTraits:
        """The traits of the network, as it is fed here."""
        return replace(traits_of(self.network), prepares_own_inputs=False, **self.changed_traits)

    # -------------------------------------------------------------------- a call
    def frame_inputs(self, loop: PreparedLoop) -> tuple[Tensor, list[FrameInputs]]:
        """The first codes of each sequence [B, C, L], and what it needs besides."""
        raise NotImplementedError

    def first_codes(self, loop: PreparedLoop) -> Tensor:
        """The codes before the first step [B, C, L], of ids with a row for each codebook."""
        ids = loop.input_ids
        return ids.view(-1, self.num_codebooks, ids.shape[1])

    def encoded_texts(self, loop: PreparedLoop, count: int) -> list[list[dict[str, Any]]]:
        """The encoded text of each of `count` sequences; behind it that of its unconditional row, if any."""
        kwargs = loop.model_kwargs
        states, mask = kwargs["encoder_outputs"][0], kwargs.get("attention_mask")
        if mask is None:
            mask = states.new_ones(states.shape[:2]).long()
        texts = [
            {"encoder_outputs": own, "attention_mask": visible}
            for own, visible in zip(states, mask, strict=True)
        ]
        return [texts[row::count] for row in range(count)]

    def loop_changes(self, loop: PreparedLoop, frames: Sequence[FrameInputs]) -> LoopChanges:  # noqa: ARG002
        """Its additions to a call for these sequences."""
        return LoopChanges()

    def loop_result(self, loop: PreparedLoop, frames: Sequence[FrameInputs], output: Any) -> Any:  # noqa: ARG002
        """The result of transformers' loop, from ours: ids [B * R, L], or an output that has them."""
        return output

    # -------------------------------------------------------------------- a forward
    def token_inputs(self, codes: Tensor) -> dict[str, Any]:
        """The arguments of the network that hold the codes [N, T, C]."""
        return {self.codes_name: codes}

    def prompt_inputs(self, prompts: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
        """The arguments of the network that hold prompts of another kind, right-padded."""
        raise NotImplementedError

    def embed(self, codes: Tensor) -> Tensor:
        """The embeddings of frames [T, C] -> [T, D]."""
        raise NotImplementedError

    def frame_logits(self, output: Any, count: int) -> Tensor:
        """The logits [N, T, R * V] of the network's output, which may have a row for each codebook."""
        logits: Tensor = output.logits
        return logits.view(count, -1, *logits.shape[1:]).transpose(1, 2).flatten(2)

    def guide(self, cond: Tensor, uncond: Tensor, scales: Tensor, frames: Sequence[FrameInputs]) -> Tensor:  # noqa: ARG002
        """The guided logits [N, C, V] of rows with and without condition, with scales [N].

        Classifier-free guidance (Ho and Salimans 2022).
        """
        return uncond + (cond - uncond) * scales[:, None, None]

    # -------------------------------------------------------------------- a step
    @property
    def skipped_modules(self) -> Sequence[Any]:
        """The modules that `step` does not call: one with hooks is called. Empty: there is no `step`."""
        return ()

    def step(self, inputs: StepInputs) -> Tensor:
        """The logits [N, 1, R * V] after one more frame.

        It runs the layers of the network without what is around them, and takes less time than a call of the
        network. Only a family with `skipped_modules` has it.
        """
        raise NotImplementedError


class CrossAttentionMask:
    """The mask of cross-attention, made once for a batch: most steps have the rows of the one before."""

    def __init__(self) -> None:
        self._last: tuple[Tensor, Any] | None = None  # as given and as made

    def of(self, config: Any, hidden: Tensor, states: Tensor, mask: Tensor) -> Any:
        """The mask of hidden states [N, 1, D] on encoder states [N, S, D], for a mask [N, S]."""
        if self._last is None or self._last[0] is not mask:
            made = create_bidirectional_mask(
                config=config, inputs_embeds=hidden, attention_mask=mask, encoder_hidden_states=states
            )
            self._last = mask, made
        return self._last[1]


_NO_DRAFTS = Proposal()


class FrameNetwork(TransformersModel):
    """The network of a codebook family: a row is one sequence of frames, or its row without condition."""

    def __init__(self, family: CodebookFamily) -> None:
        states = ("hidden_states",) if family.reads_hidden else ()
        super().__init__(family.network, states, traits=family.network_traits())
        self._packed.off_reason = "frames are padded, not packed"
        self.last_hidden: Tensor | None = None  # [N, D] of the last forward, where the family reads it
        self._family = family
        self._codes: Tensor | None = None  # [N, T, C] of the current forward
        self._steps: bool | None = None  # whether the layers can run alone; None: not looked at yet
        self._prefixes: dict[int, Tensor] = {}  # by request: embeddings before the first frame
        self._prompts: dict[int, Mapping[str, Tensor]] = {}  # by request: prompts of another kind

    def add_sequences(self, sequences: Sequence[tuple[Sequence[int], FrameInputs]]) -> None:
        """Register the requests of new sequences: with condition, and without where there is guidance."""
        requests: list[int] = []
        inputs: list[dict[str, Any]] = []
        for numbers, frames in sequences:
            conditions = (frames.inputs, frames.uncond_inputs)
            prefixes = (frames.prefix, frames.uncond_prefix)
            for number, given, prefix in zip(numbers, conditions, prefixes, strict=False):
                requests.append(number)
                inputs.append(dict(given or {}))
                if prefix is not None:
                    self._prefixes[number] = prefix.to(self.device)
                if frames.prompt is not None:
                    self._prompts[number] = {
                        name: value.to(self.device) for name, value in frames.prompt.items()
                    }
        names = dict.fromkeys(name for own in inputs for name in own)
        if names:
            self.add_requests(requests, {name: [own.get(name) for own in inputs] for name in names})

    def remove_requests(self, requests: Sequence[int]) -> None:
        """Drop the inputs of finished requests."""
        super().remove_requests(requests)
        for request in requests:
            self._prefixes.pop(request, None)
            self._prompts.pop(request, None)

    def run(self, codes: Tensor, rows: Rows, cache: RowCache) -> Tensor:
        """Feed the pending codes [N, T, C] of each row; the logits [N, R * V] of its next frame."""
        self._codes = codes
        try:
            output = self.forward(rows, _NO_DRAFTS, cache)
            if self._family.reads_hidden:
                self.last_hidden = _last_hidden(output.states, len(rows))
            return output.logits[:, 0]
        finally:
            self._codes = None

    def _token_inputs(self, rows: Rows, proposal: Proposal, batch: ForwardBatch) -> dict[str, Any]:  # noqa: ARG002
        """The fed codes, or embeddings where something comes before the first frame."""
        assert self._codes is not None
        codes = self._codes if batch.rows is None else index_rows(self._codes, batch.rows)
        if batch.start == 0 and (self._prefixes or self._prompts):
            requests = (rows.request if batch.rows is None else rows.request[batch.rows]).tolist()
            if self._prompts:
                return self._family.prompt_inputs([self._prompts[request] for request in requests])
            return {"inputs_embeds": self._prefixed(requests, codes, batch)}
        return self._family.token_inputs(codes[:, : batch.width])

    def _prefixed(self, requests: Sequence[int], codes: Tensor, batch: ForwardBatch) -> Tensor:
        """The embeddings of prefixes and frames [N, T, D], right-padded."""
        lines = []
        for row, request in enumerate(requests):
            prefix = self._prefixes.get(request)
            size = int(batch.fed_length[row]) - (0 if prefix is None else len(prefix))
            embedded = self._family.embed(codes[row, :size])
            lines.append(embedded if prefix is None else torch.cat((prefix.to(embedded.dtype), embedded)))
        return torch.nn.utils.rnn.pad_sequence(lines, batch_first=True)

    def _can_step(self) -> bool:
        """Whether the layers can run without what is around them: nothing looks at a call of the network."""
        if self._steps is None:
            modules = self._family.skipped_modules
            has_hooks = any(
                module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_hf_hook")
                for module in modules
            )
            is_plain = not (self._is_multi_device or self._barrier or self._output_states)
            self._steps = bool(modules) and is_plain and not has_hooks
        return self._steps and not self._adapters.in_use

    @torch.no_grad()
    def run_step(self, codes: Tensor, requests: Tensor, cache: RowCache, position: int) -> Tensor | None:
        """The same for one frame [N, 1, C] at the same position of all rows; None: the network is called."""
        if not self._can_step():
            return None
        return self._run_layers(codes, requests, cache, KVSpan(None, position, 1, position + 1))[:, 0]

    def _run_layers(self, codes: Tensor, requests: Tensor, cache: RowCache, span: KVSpan) -> Tensor:
        """The logits [N, 1, R * V] after one frame of rows of equal length, by the layers alone."""
        assert isinstance(span.start, int)
        past: Any = SelfAttentionView(cast(KVCache, cache), span, self._is_sliding)
        states = mask = None
        if self.encoder is not None:
            entries = self.encoder.entry_index(requests)
            states, mask = self.encoder.states_and_mask(entries)
            past = self.encoder.decoder_cache(entries, past, span)
        self._count_forward(len(codes))
        return self._to_float_logits(self._family.step(StepInputs(codes, past, span.start, states, mask)))

    def _run_batch(
        self, rows: Rows, proposal: Proposal, cache: RowCache, batch: ForwardBatch
    ) -> tuple[Tensor, Mapping[str, Any]]:
        """One forward: logits [N, 1, R * V] in float32, and the requested states."""
        if batch.width == 1 and batch.start and self._can_step():
            assert self._codes is not None
            index, requests, codes = None, rows.request, self._codes
            if batch.rows is not None:
                index = batch.rows.to(self.device, non_blocking=True)
                requests, codes = requests[batch.rows], index_rows(codes, batch.rows)
            span = KVSpan(index, batch.start, 1, batch.start + 1, batch.rows)
            return self._run_layers(codes[:, :1], requests, cache, span), {}
        return super()._run_batch(rows, proposal, cache, batch)

    def _call_model(self, inputs: dict[str, Any], batch: ForwardBatch, request: Tensor) -> Any:
        """Call the network; its logits as [N, T, R * V]."""
        output = super()._call_model(inputs, batch, request)
        output.logits = self._family.frame_logits(output, batch.num_rows)
        return output


def _last_hidden(states: Sequence[Mapping[str, Any]], count: int) -> Tensor:
    """The hidden state of the last layer [N, D] at each row's last fed position."""
    last: Tensor | None = None
    for part in states:
        hidden: Tensor = part["hidden_states"][-1]
        index = (part["fed_length"] - 1).to(hidden.device)
        found = hidden[torch.arange(len(hidden), device=hidden.device), index]
        if last is None:
            last = found.new_zeros(count, found.shape[-1])
        last[part["rows"].to(last.device)] = found
    assert last is not None
    return last


# Fields of processors that read scores alone: a warper reads the tokens before only by its state, or as a
# watermark.
SAMPLING_PROCESSORS: Final = frozenset(
    {"remove_invalid_values", *(spec.name for spec in LOGITS_WARPERS if not spec.processor.state)}
) - {"watermarking_config"}

_SEED_STEP: Final = 0x9E3779B97F4A7C15  # odd and irregular, so that the seeds of rows are far apart

_TEXT: Final = "needs the text of tokens, and codes have none"
_ONE_SEQUENCE: Final = "needs rows that move alone, and the codebooks of a sequence move together"
_REASONS: Final = {
    "stop_strings": _TEXT,
    "stop_regex": _TEXT,
    "token_healing": _TEXT,
    "grammar": _TEXT,
    "banned_phrases": _TEXT,
    "num_return_sequences": "must be 1 for codebooks: pass the prompt several times",
    "cache_implementation": "is not supported for codebooks, whose rows share a cache of their own",
    "prefill_chunk_size": "is not supported for codebooks",
    "logprobs": "is not supported for codebooks",
    "output_attentions": "is not supported for codebooks: attention is that of sequences",
    "output_hidden_states": "is not supported for codebooks: hidden states are those of sequences",
}


def check_codebook_config(
    config: GenerationConfig, family: CodebookFamily, assistant_model: Any = None
) -> None:
    """Raise for a field that has no meaning for codebooks, or no support."""
    model = type(family.network).__name__
    mode = config.get_generation_mode(assistant_model)
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        names = {
            "num_beams": config.num_beams > 1,
            "dola_layers": config.dola_layers is not None,
            "penalty_alpha": mode is GenerationMode.CONTRASTIVE_SEARCH,
        }
        name = next((name for name, is_set in names.items() if is_set), "assistant_model")
        value = getattr(config, name, type(assistant_model).__name__)
        raise NotInThisVersion(name, f"{_ONE_SEQUENCE} ({model})", value, "leave it out")
    for name, reason in _REASONS.items():
        value = getattr(config, name)
        is_neutral = value is None or value is False or (value == 1 and value is not True)
        if not is_neutral and config.source(name) != "model":
            raise NotInThisVersion(name, f"{reason} ({model})", value, "leave it out")
    if config.guidance_scale not in (None, 1.0) and not family.has_guidance:
        must = f"has no meaning for {model}, which reads nothing that could be left out"
        raise NotInThisVersion("guidance_scale", must, config.guidance_scale, "leave it out")
    if config.use_cache is False and config.source("use_cache") != "model":
        must = f"must not be False for codebooks, whose rows share a cache ({model})"
        raise NotInThisVersion("use_cache", must, False, "leave it out")
    if family.processors is None:
        return
    for spec in PROCESSOR_SPECS:
        if spec.name not in family.processors and spec.is_enabled(config):
            must = f"reads tokens before the code, and frames of {model} are no tokens"
            raise NotInThisVersion(spec.name, must, getattr(config, spec.name), "leave it out")


def row_seed(seed: int, number: int) -> int:
    """The seed of a row of a sequence with this seed: rows must not share their noise."""
    return (seed + number * _SEED_STEP) % MAX_SEED


def codebook_config(config: GenerationConfig, max_new_tokens: int, **values: Any) -> GenerationConfig:
    """The config of a codebook's row: guidance is the network's, and the length is that of the sequence."""
    return config.replace(guidance_scale=None, max_length=None, max_new_tokens=max_new_tokens, **values)
