"""What a model's own generate() has prepared, as one latent sequence for each row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor

from descant.config.generation_config import FIELDS, GenerationConfig
from descant.core.interfaces import KVCache
from descant.errors import InputError, NotInThisVersion
from descant.kv_cache.cached_row import CachedRow
from descant.models.audio.latents.sequence import EndOfSpeech, LatentSequence, SharedNoise
from descant.models.compat.hf_caches.convert import to_descant_cache

if TYPE_CHECKING:
    from descant.models.compat.custom_generate import LoopInputs

__all__ = ["check_latent_config", "check_latent_inputs", "latent_arguments", "latent_sequences"]

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
_MAX_SEED: Final = 2**62


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
    model: Any, prepared: LoopInputs, seeds: Sequence[int | None], shares_noise: bool
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
            seed = int(torch.randint(_MAX_SEED, ()))
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


def _past_rows(prepared: LoopInputs, per_prompt: int) -> list[CachedRow | None]:
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


def _split_voices(model: Any, prepared: LoopInputs, prompts: Sequence[Tensor]) -> list[Tensor | None]:
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
