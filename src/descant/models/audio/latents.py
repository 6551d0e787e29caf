"""Models that decode a continuous latent in a step: what their generate() prepares, steps, and output."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor

from descant.config.generation_config import FIELDS, GenerationConfig
from descant.core.interfaces import KVCache, RowCache
from descant.core.records import ForwardOutput, Proposal
from descant.core.rows import Rows
from descant.core.sampling_noise import MAX_SEED, keyed_normal
from descant.errors import InputError, NotInThisVersion, UnsupportedModel
from descant.kv_cache.row_views import CachedRow
from descant.models.compat.hf_caches.convert import to_descant_cache
from descant.models.forward.batches import ForwardBatch
from descant.models.forward.inputs import fed_tokens
from descant.models.forward.traits import has_dynamic_rope, traits_of
from descant.models.transformers_model import TransformersModel
from descant.models.wrapping.peft_adapters import ADAPTER_NAME_KEY
from descant.models.wrapping.wrapped_model import decoding_base

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from descant.models.compat.custom_generate import PreparedLoop


LATENT_INPUT = "latents"  # the name of a request's `LatentSequence` among its inputs


@dataclass(frozen=True)
class EndOfSpeech:
    """When a sequence ends: a number of frames after the first frame whose logit exceeds a threshold."""

    threshold: float
    frames_after: int  # frames that follow the one that exceeds it
    min_frames: int = 0  # first frames whose logit is ignored

    def is_last(self, logits: Sequence[float]) -> bool:
        """Whether the last of these frames, each with its logit, ends the sequence."""
        for frame in range(self.min_frames, len(logits)):
            if logits[frame] > self.threshold:
                return frame + self.frames_after == len(logits) - 1
        return False


class SharedNoise:
    """The noise of one call: a block for each frame by torch's generator, as transformers draws it.

    A block is kept, so that a repeated forward gets the same one and advances the generator once.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._blocks: list[Tensor] = []

    def block(self, frame: int, size: int, like: Tensor) -> Tensor:
        """The noise of that frame [B, D], on the device and in the dtype of `like`."""
        while len(self._blocks) <= frame:
            self._blocks.append(torch.randn(self._num_rows, size, device=like.device, dtype=like.dtype))
        return self._blocks[frame]


@dataclass(eq=False)
class LatentSequence:
    """One request's prompt and settings, and the latents that it has so far.

    Latents are stored by their frame: a forward that is repeated replaces what it wrote.
    """

    prompt: Tensor  # [L] token ids, without padding (host)
    max_frames: int
    end: EndOfSpeech
    num_flow_steps: int
    voice: Tensor | None = None  # [F, D'] latents of the prompt's voice positions; None: there are none
    past: CachedRow | None = None  # the keys and values of the prompt's first positions
    noise_scale: float = 0.0  # standard deviation of the noise; 0: there is none
    seed: int | None = None  # of its own noise; None: the noise is that of the call
    noise_row: int = 0  # its row in the noise of the call, or its index among the sequences of a prompt
    shared_noise: SharedNoise | None = None
    latents: list[Tensor] = field(default_factory=list)  # [D] each, normalised
    eos_logits: list[float] = field(default_factory=list)  # of each frame

    def write(self, frame: int, latent: Tensor, eos_logit: float) -> bool:
        """Store a frame; whether it is the last by the end-of-speech logits."""
        del self.latents[frame:], self.eos_logits[frame:]
        self.latents.append(latent)
        self.eos_logits.append(eos_logit)
        return self.end.is_last(self.eos_logits)

    def fed_latents(self, start: int, stop: int) -> list[Tensor]:
        """The latents that are fed at the positions from `start` to `stop`."""
        length = len(self.prompt)
        return self.latents[max(start - length, 0) : max(stop - length, 0)]


def draw_noise(sequences: Sequence[LatentSequence], frames: Sequence[int], size: int, like: Tensor) -> Tensor:
    """The scaled noise of one frame of each sequence [N, D], on the device and in the dtype of `like`."""
    lines = list(torch.zeros(len(sequences), size, device=like.device, dtype=like.dtype))
    keyed = [
        index
        for index, sequence in enumerate(sequences)
        if sequence.noise_scale and sequence.seed is not None
    ]
    if keyed:
        keys = [(sequences[index].seed, sequences[index].noise_row, frames[index]) for index in keyed]
        seed, slot, frame = torch.tensor(keys).unbind(1)
        values = keyed_normal(seed, slot, frame, size).to(like.device, like.dtype)
        for index, value in zip(keyed, values, strict=True):
            lines[index] = value * sequences[index].noise_scale
    for index, sequence in enumerate(sequences):
        if sequence.noise_scale and sequence.shared_noise is not None and sequence.seed is None:
            lines[index] = (
                sequence.shared_noise.block(frames[index], size, like)[sequence.noise_row]
                * sequence.noise_scale
            )
    return torch.stack(lines)


# The token of a last frame; that of all others is 0.
END_TOKEN: Final = 1

# The decoding loop and its end.
_LOOP_METHODS = ("_sample", "_get_stopping_criteria")


def is_latent_model(model: Any) -> bool:
    """Whether a model decodes latents by the loop of Pocket TTS, which no class of its own replaces."""
    return decoding_base(type(model), ("PocketTTSGenerationMixin",), _LOOP_METHODS) is not None


class LatentModel(TransformersModel):
    """A model whose steps give one latent [D] for a row, with a logit for the end of speech.

    A token of a row says whether its frame is the last. The latents are in the `LatentSequence` of each
    request, by position: a forward feeds the latent of the previous frame, and stores that of the next.
    """

    def __init__(self, model: PreTrainedModel, states: Sequence[str] = ()) -> None:
        traits = replace(
            traits_of(model),
            vocab_size=2,
            prepares_own_inputs=False,
            needs_equal_lengths=has_dynamic_rope(model.config),
            input_names=frozenset({LATENT_INPUT}),
            positioned_inputs=frozenset({LATENT_INPUT}),
        )
        super().__init__(model, states, traits)
        self._packed.off_reason = "the model predicts latents, not tokens"
        self._config: Any = model.config
        self._sequences: dict[int, LatentSequence] = {}

    def add_requests(self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]]) -> None:
        """Register requests, each with its `LatentSequence`."""
        sequences = inputs.get(LATENT_INPUT, [None] * len(requests))
        for sequence in sequences:
            if not isinstance(sequence, LatentSequence):
                do = "make the requests by descant.sound_request"
                raise InputError(LATENT_INPUT, "must be the latent sequence of the request", sequence, do)
            if any(sequence is other for other in self._sequences.values()):
                must = "must not be that of another running request"
                raise InputError(LATENT_INPUT, must, sequence, "make a request for each sequence")
        others = [name for name in inputs if name not in (LATENT_INPUT, ADAPTER_NAME_KEY)]
        if others:
            do = "pass the inputs to `latent_requests`"
            raise InputError(others[0], f"must not be given beside `{LATENT_INPUT}`", inputs[others[0]], do)
        super().add_requests(
            requests, {name: values for name, values in inputs.items() if name != LATENT_INPUT}
        )
        self._sequences.update(zip(requests, sequences, strict=True))

    def remove_requests(self, requests: Sequence[int]) -> None:
        """Drop finished requests."""
        super().remove_requests(requests)
        for request in requests:
            self._sequences.pop(request, None)

    def forward(
        self, rows: Rows, proposal: Proposal, cache: RowCache, with_logits: bool = True, chunks: Any = ()
    ) -> ForwardOutput:
        """Feed each row's pending positions; store its next latent, and return whether it is the last."""
        if proposal.drafts is not None or bool(rows.slot.any()):
            name = type(self.model).__name__
            raise UnsupportedModel(f"{name} predicts latents: beams, several rows and drafts are for tokens")
        return super().forward(rows, proposal, cache, with_logits, chunks)

    def _token_inputs(self, rows: Rows, proposal: Proposal, batch: ForwardBatch) -> dict[str, Any]:
        """The fed ids [N, T], and the latents of voice and audio positions in their order."""
        request = rows.request if batch.rows is None else rows.request[batch.rows]
        sequences = [self._sequences[number] for number in request.tolist()]
        starts, stops = batch.cached_length, _fed_stops(batch)
        prompt_length = torch.tensor([len(sequence.prompt) for sequence in sequences])
        positions = starts[:, None] + torch.arange(batch.width)
        is_fed = positions < stops[:, None]
        is_latent = is_fed & (positions >= prompt_length[:, None])
        ids = fed_tokens(rows, proposal, batch)
        ids = ids.masked_fill(is_latent.to(ids.device), self._config.audio_latent_token_id)
        # A placeholder in the padding would take the latent of another position.
        ids = ids.masked_fill(~is_fed.to(ids.device), self._config.pad_token_id or 0)
        inputs: dict[str, Any] = {"input_ids": ids}
        spans = list(zip(sequences, starts.tolist(), stops.tolist(), strict=True))
        # A prompt with a voice is read at once, from its first position.
        voices = [sequence.voice for sequence, start, _ in spans if sequence.voice is not None and start == 0]
        if any(len(voice) for voice in voices):
            inputs["audio_prompt_latents"] = torch.cat(voices).to(self.device)
        latents = [latent for sequence, start, stop in spans for latent in sequence.fed_latents(start, stop)]
        if latents:
            inputs["audio_latents"] = torch.stack(latents)[None]
        return inputs

    def _run_compiled(self, inputs: dict[str, Any], cache: RowCache, batch: ForwardBatch) -> Tensor | None:  # noqa: ARG002
        """None: a compiled step feeds tokens only."""
        return None

    def _call_model(self, inputs: dict[str, Any], batch: ForwardBatch, request: Tensor) -> Any:
        """Call the model and store the next latents; the logits [N, T, 2] say whether a frame is the last."""
        output = super()._call_model(inputs, batch, request)
        device, stops = output.logits.device, _fed_stops(batch)
        sequences = [self._sequences[number] for number in request.tolist()]
        frames = [
            stop - len(sequence.prompt) for sequence, stop in zip(sequences, stops.tolist(), strict=True)
        ]
        lines = torch.arange(batch.num_rows, device=device)
        last = (stops - batch.cached_length - 1).to(device)
        latents = self._sample_latents(sequences, frames, output.last_hidden_state[lines, last])
        eos_logits = output.logits[lines, last, 0].float().tolist()
        is_last = [
            sequence.write(frame, latent, logit)
            for sequence, frame, latent, logit in zip(sequences, frames, latents, eos_logits, strict=True)
        ]
        choice = torch.nn.functional.one_hot(torch.tensor(is_last).long(), num_classes=2).float().to(device)
        output.logits = choice[:, None].expand(-1, batch.width, -1)
        return output

    def _sample_latents(
        self, sequences: Sequence[LatentSequence], frames: Sequence[int], states: Tensor
    ) -> list[Tensor]:
        """The next latent [D] of each row, by its last hidden state [N, H]."""
        noise = draw_noise(sequences, frames, self._config.latent_dim, states)
        flow_steps = [sequence.num_flow_steps for sequence in sequences]
        latents: list[Tensor] = [noise[0]] * len(sequences)
        for count in dict.fromkeys(flow_steps):
            index = [row for row, steps in enumerate(flow_steps) if steps == count]
            sampled = self.model.sample_latent(states[index], noise[index], count)  # type: ignore[operator]
            for row, latent in zip(index, sampled, strict=True):
                latents[row] = latent
        return latents


def _fed_stops(batch: ForwardBatch) -> Tensor:
    """The position after the last fed one of each row [N] (host)."""
    return batch.cached_length + (batch.fed_length if batch.width > 1 else 1)


# Settings of the model's own generate() that may also be in a generation config.
_SETTINGS: Final = ("num_flow_steps", "eos_threshold", "min_frames_before_eos")
_INPUTS: Final = frozenset(
    {
        "input_ids", "attention_mask", "audio_prompt_latents", "audio_prompt_latents_mask",
        "frames_after_eos", "past_key_values", *_SETTINGS,
    }
)  # fmt: skip
# Fields that the model's own generate() reads.
_PASSED_FIELDS: Final = frozenset(
    {
        "do_sample", "temperature", "max_length", "max_new_tokens", "num_return_sequences",
        "return_dict_in_generate", "output_scores", "output_logits", "use_cache", "pad_token_id",
    }
)  # fmt: skip
_SUPPORTED_FIELDS: Final = _PASSED_FIELDS | {"seed"}


def check_latent_config(config: GenerationConfig, model: Any) -> None:
    """Raise for a field that was given and has no meaning for latents; `config` is merged."""
    for name in sorted(config.given - _SUPPORTED_FIELDS):
        value = getattr(config, name)
        if config.source(name) != "model" and value is not None and value != FIELDS[name].default:
            must = f"is not supported for {type(model).__name__}, which generates latents and not tokens"
            raise NotInThisVersion(name, must, value, "leave it out")


def check_latent_inputs(inputs: Mapping[str, Any], model: Any) -> None:
    """Raise for an argument that is no input of the model's own generate() here."""
    for name, value in inputs.items():
        if name not in _INPUTS and value is not None:
            must = f"is not supported for {type(model).__name__}, which generates latents"
            raise NotInThisVersion(name, must, type(value).__name__, "leave it out")
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        raise InputError("input_ids", "must be a tensor [B, L] that the model's processor has made", ids)
    if bool((ids == model.config.audio_latent_token_id).any()):
        must = "must not hold the token of generated latents (`audio_latent_token_id`)"
        raise InputError(
            "input_ids", must, model.config.audio_latent_token_id, "end with `audio_bos_token_id`"
        )


def latent_arguments(config: GenerationConfig, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the model's own generate(), for a merged config and the model's inputs."""
    given = {name for name in config.given & _PASSED_FIELDS if config.source(name) != "model"}
    settings = {name: config.extra[name] for name in _SETTINGS if config.extra.get(name) is not None}
    inputs = {name: value for name, value in inputs.items() if value is not None}
    return {**settings, **{name: getattr(config, name) for name in given}, **inputs}


def latent_sequences(
    model: Any, prepared: PreparedLoop, seeds: Sequence[int | None], shares_noise: bool
) -> list[LatentSequence]:
    """A sequence for each row; `seeds` are one for each prompt, or one for all.

    Without a seed a row has its row of torch's noise if the rows share it, else a seed by torch's generator.
    """
    config, ids = prepared.generation_config, prepared.input_ids
    _check_settings(config)
    per_prompt = config.num_return_sequences or 1
    past = _past_rows(prepared, per_prompt)
    mask = prepared.model_kwargs.get("attention_mask")
    keep = torch.ones_like(ids) if mask is None else mask[:, -ids.shape[1] :]  # None: no padding
    prompts = [row[own.bool()].cpu() for row, own in zip(ids, keep, strict=True)]
    voices = _split_voices(model, prepared, prompts)
    row_seeds = _row_seeds(seeds, len(ids), per_prompt)
    noise = SharedNoise(len(ids)) if shares_noise else None
    sequences = []
    for row, (prompt, end) in enumerate(zip(prompts, _end_rules(config, len(ids)), strict=True)):
        seed, cached = row_seeds[row], past[row]
        if cached is not None:  # its positions have no tokens, and are not fed
            positions = prompt.new_full((cached.length,), model.config.audio_prompt_token_id)
            prompt = torch.cat((positions, prompt))
        if seed is None and noise is None and config.do_sample:
            seed = int(torch.randint(MAX_SEED, ()))
        sequences.append(
            LatentSequence(
                prompt,
                config.max_length - ids.shape[1],
                end,
                config.num_flow_steps,
                voices[row],
                cached,
                noise_scale=math.sqrt(config.temperature) if config.do_sample else 0.0,
                seed=seed,
                noise_row=row if seed is None else row % per_prompt,
                shared_noise=noise if seed is None else None,
            )
        )
    return sequences


def _check_settings(config: Any) -> None:
    """Raise for settings of the model's own generate() that it does not check."""
    for name, least in (("num_flow_steps", 1), ("min_frames_before_eos", 0)):
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InputError(name, f"must be an int >= {least}", value)
    if not isinstance(config.eos_threshold, int | float) or math.isnan(config.eos_threshold):
        raise InputError("eos_threshold", "must be a number", config.eos_threshold)


def _past_rows(prepared: PreparedLoop, per_prompt: int) -> list[CachedRow | None]:
    """The cached voice of each row, which is before its prompt."""
    given, num_rows = prepared.model_kwargs.get("past_key_values"), len(prepared.input_ids)
    if given is None or not given.get_seq_length():
        return [None] * num_rows
    length = given.get_seq_length()
    if prepared.model_kwargs.get("use_cache") is False:
        raise InputError("past_key_values", "must not be given with use_cache=False", f"{length} positions")
    mask = prepared.model_kwargs.get("attention_mask")  # None: no padding
    width = prepared.model_kwargs["position_ids"].shape[-1]
    has_padding = mask is not None and not bool(mask[:, :length].all())
    if width != length + prepared.input_ids.shape[1] or has_padding:
        must = "must hold whole voices, and come with prompts of the text alone and their `attention_mask`"
        raise InputError("past_key_values", must, f"{length} positions")
    store = cast(KVCache, to_descant_cache(given).commit_store())
    if len(store) not in (1, num_rows // per_prompt):
        must = f"must have one row, or one for each of {num_rows // per_prompt} prompts"
        raise InputError("past_key_values", must, f"{len(store)} rows")
    return [CachedRow(store, row // per_prompt if len(store) > 1 else 0) for row in range(num_rows)]


def _row_seeds(seeds: Sequence[int | None], num_rows: int, per_prompt: int) -> list[int | None]:
    """The seed of each row."""
    num_prompts = num_rows // per_prompt
    if len(seeds) not in (1, num_prompts):
        raise InputError("seed", f"must have one entry for each of {num_prompts} prompts", list(seeds))
    per_row = seeds if len(seeds) > 1 else [*seeds] * num_prompts
    return [seed for seed in per_row for _ in range(per_prompt)]


def _end_rules(config: Any, num_rows: int) -> list[EndOfSpeech]:
    """The end-of-speech rule of each row."""
    given = config.frames_after_eos
    frames_after = given.reshape(-1) if isinstance(given, Tensor) else torch.tensor([given])
    if frames_after.is_floating_point() or not len(frames_after) or num_rows % len(frames_after):
        must = f"must be an int, or a tensor of one for each of {num_rows} rows"
        raise InputError("frames_after_eos", must, given)
    # In float32, in which transformers compares it.
    threshold = float(torch.tensor(config.eos_threshold, dtype=torch.float32))
    counts = frames_after.repeat_interleave(num_rows // len(frames_after)).tolist()
    return [EndOfSpeech(threshold, int(count), config.min_frames_before_eos) for count in counts]


def _split_voices(model: Any, prepared: PreparedLoop, prompts: Sequence[Tensor]) -> list[Tensor | None]:
    """The voice latents [F, D'] of each prompt, which are given in the order of its voice positions."""
    voices, mask = (
        prepared.model_kwargs.get(name) for name in ("audio_prompt_latents", "audio_prompt_latents_mask")
    )
    if voices is None:
        return [None] * len(prompts)
    frames = voices[mask.bool()] if mask is not None else voices.flatten(0, -2)
    counts = [int((prompt == model.config.audio_prompt_token_id).sum()) for prompt in prompts]
    if sum(counts) != len(frames):
        must = f"must have a frame for each of the {sum(counts)} voice positions of the prompts"
        raise InputError("audio_prompt_latents", must, f"{len(frames)} frames")
    return list(frames.split(counts))


def audio_latents(model: Any, sequence: LatentSequence) -> Tensor:
    """The latents of a sequence [T, D] in the space of the audio tokenizer."""
    if not sequence.latents:
        return model.model.bos_latent.new_zeros(0, model.config.latent_dim)  # type: ignore[no-any-return]
    return model.denormalize_latents(torch.stack(sequence.latents))  # type: ignore[no-any-return]


def latent_output(model: Any, prepared: PreparedLoop, sequences: Sequence[LatentSequence]) -> Any:
    """A list of the latents of each row [T, D], or the output object if the config asks for it."""
    # Imported here: it loads transformers' models, which takes seconds.
    from transformers.models.pocket_tts.generation_pocket_tts import PocketTTSGenerateOutput

    config, ids = prepared.generation_config, prepared.input_ids
    latents = [audio_latents(model, sequence) for sequence in sequences]
    if not config.return_dict_in_generate:
        return latents
    counts = torch.tensor([len(latent) for latent in latents])
    mask = (torch.arange(int(counts.max())) < counts[:, None]).long().to(ids.device)
    frames = ids.new_full((len(ids), mask.shape[1]), model.config.audio_latent_token_id)
    logits = _step_logits(sequences, mask.shape[1], ids.device)
    return PocketTTSGenerateOutput(
        sequences=torch.cat((ids, frames), 1),  # type: ignore[arg-type]
        scores=logits if config.output_scores else None,  # type: ignore[arg-type]
        logits=logits if config.output_logits else None,  # type: ignore[arg-type]
        audio_latents=torch.nn.utils.rnn.pad_sequence(latents, batch_first=True),
        audio_latents_mask=mask,  # type: ignore[arg-type]
    )


def _step_logits(
    sequences: Sequence[LatentSequence], num_frames: int, device: torch.device
) -> tuple[Tensor, ...]:
    """The end-of-speech logits of each frame [B]; 0 for rows that have ended."""
    steps = torch.zeros(num_frames, len(sequences))
    for row, sequence in enumerate(sequences):
        steps[: len(sequence.eos_logits), row] = torch.tensor(sequence.eos_logits)
    return tuple(steps.to(device))
