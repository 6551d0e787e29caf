"""Requests on a model that generates latents, and a call that runs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from descant.config.generation_config import GenerationConfig
from descant.engine.request import MERGED, Request
from descant.engine.session import Failed, Session
from descant.errors import ConfigError
from descant.models.audio.latents import (
    END_TOKEN,
    LATENT_INPUT,
    LatentModel,
    LatentSequence,
    check_latent_config,
    check_latent_inputs,
    latent_arguments,
    latent_output,
    latent_sequences,
)
from descant.models.compat.custom_generate import PreparedLoop, run_with_loop
from descant.models.forward.no_cache import NoCache


def latent_requests(
    model: Any, generation_config: GenerationConfig | None = None, **inputs: Any
) -> list[Request]:
    """A request for each row of the inputs of the model's own generate(), for `Session(LatentModel(model))`.

    `request.inputs[LATENT_INPUT]` is its `LatentSequence`, which holds its latents after each step.
    """
    own = GenerationConfig.from_transformers(model.generation_config)
    return merged_latent_requests(model, GenerationConfig.merge({}, generation_config, own), inputs)


def merged_latent_requests(model: Any, config: GenerationConfig, inputs: Mapping[str, Any]) -> list[Request]:
    """The same with a config that is merged with the model's own already."""
    check_latent_config(config, model)
    check_latent_inputs(inputs, model)
    if config.use_cache is False:
        must = "must be True in a session, whose requests share a cache"
        raise ConfigError("use_cache", must, False, "use descant.generate")
    sequences: list[LatentSequence] = run_with_loop(
        model,
        lambda prepared: latent_sequences(model, prepared, [config.seed], shares_noise=False),
        latent_arguments(config, inputs),
    )
    return _requests_of(sequences)


def decode_latents(model: Any, configs: Sequence[GenerationConfig], inputs: Mapping[str, Any]) -> Any:
    """The output of the model's own generate(); `configs` are merged, and one for all prompts or one each.

    They differ in their seed alone.
    """
    for config in configs:
        check_latent_config(config, model)
    check_latent_inputs(inputs, model)

    def decode(prepared: PreparedLoop) -> Any:
        seeds = [config.seed for config in configs]
        sequences = latent_sequences(model, prepared, seeds, shares_noise=True)
        is_cached = prepared.model_kwargs.get("use_cache") is not False
        session = Session(LatentModel(model), cache=None if is_cached else NoCache())
        session.admit(*_requests_of(sequences))
        for event in session.drain():
            if isinstance(event, Failed):
                raise event.error.__cause__ or event.error
        return latent_output(model, prepared, sequences)

    return run_with_loop(model, decode, latent_arguments(configs[0], inputs))


def _requests_of(sequences: Sequence[LatentSequence]) -> list[Request]:
    """A request for each sequence: greedy search over whether a frame is the last."""
    return [
        Request(
            sequence.prompt,
            GenerationConfig(max_new_tokens=sequence.max_frames, do_sample=False, eos_token_id=END_TOKEN),
            inputs={LATENT_INPUT: sequence},
            past_key_values=sequence.past,
            _call=MERGED,
        )
        for sequence in sequences
    ]
