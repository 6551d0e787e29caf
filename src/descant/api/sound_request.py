"""Requests of a Session for models that predict sound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from descant.api.call import CallOptions
from descant.api.codebook_call import PreparedFrames, own_arguments, prepare_frames
from descant.config.generation_config import FIELDS, GenerationConfig
from descant.core.records import Hypothesis
from descant.engine.latent_requests import merged_latent_requests
from descant.engine.request import Request
from descant.errors import InputError
from descant.models.codebooks.config_checks import check_codebook_config
from descant.models.codebooks.families import codebook_family_of
from descant.models.codebooks.frames import CODEBOOK_INPUT, Codebook, CodebookFamily, PreparedLoop
from descant.models.latents.latent_model import is_latent_model
from descant.models.latents.output import audio_latents
from descant.models.latents.sequence import LATENT_INPUT
from descant.models.own_loop import LoopInputs, run_with_loop

__all__ = ["SoundRequest", "sound_request"]


@dataclass(frozen=True, eq=False)
class SoundRequest:
    """One sequence of sound as requests of a Session: one for each codebook, or one for a model of latents.

    They are admitted together: `numbers = session.admit(*one.requests)`. `result` takes the first hypothesis
    of each, in this order, and returns what the model's own generate() returns for the prompt.
    """

    requests: tuple[Request, ...]
    make_result: Callable[[Sequence[Hypothesis]], Any]

    def result(self, hypotheses: Sequence[Hypothesis]) -> Any:
        """The output of the model's own generate() for these hypotheses."""
        if len(hypotheses) != len(self.requests):
            must = f"must be one for each of the {len(self.requests)} requests"
            raise InputError("hypotheses", must, f"{len(hypotheses)} of them")
        return self.make_result(hypotheses)


def sound_request(model: Any, generation_config: Any = None, **inputs: Any) -> SoundRequest:
    """The requests of one prompt for a Session of a model that predicts sound.

    `inputs` are those of generate() for a batch of one, and may hold fields of the config.
    """
    fields = {name: value for name, value in inputs.items() if name in FIELDS}
    fields["return_dict_in_generate"] = False
    family = codebook_family_of(model)
    if family is not None:
        return _codebook_request(model, family, generation_config, {**inputs, **fields})
    if is_latent_model(model):
        [config] = CallOptions.from_call(model, generation_config, fields).configs
        others = {name: value for name, value in inputs.items() if name not in FIELDS}
        return _latent_request(model, config, others)
    must = "must predict sound: several codebooks in a step, such as MusicGen, or latents, such as Pocket TTS"
    raise InputError("model", must, type(model).__name__, "use Request")


def _latent_request(model: Any, config: GenerationConfig, inputs: dict[str, Any]) -> SoundRequest:
    requests = merged_latent_requests(model, config, inputs)
    _check_single(len(requests))
    sequence = requests[0].inputs[LATENT_INPUT]
    return SoundRequest(tuple(requests), lambda _: [audio_latents(model, sequence)])


def _check_single(count: int) -> None:
    """Raise for inputs of several prompts."""
    if count != 1:
        raise InputError("inputs", "must hold one prompt", f"{count} prompts", "make a request for each")


# ------------------------------------------------------------------------ codebooks
class _Prepared(BaseException):
    """Leaves a model's own generate() where its loop would begin."""

    def __init__(self, frames: PreparedFrames) -> None:
        super().__init__()
        self.frames = frames


def _codebook_request(
    model: Any, family: CodebookFamily, config: Any, inputs: dict[str, Any]
) -> SoundRequest:
    fields = {name: value for name, value in inputs.items() if name in FIELDS}
    configs = CallOptions.from_call(model, config, fields).configs
    for one in configs:
        check_codebook_config(one, family)
    arguments = own_arguments(model, config, inputs)

    def prepare(stand_in: Any, prepared: LoopInputs) -> Any:
        raise _Prepared(prepare_frames(family, PreparedLoop(stand_in, prepared), configs))

    try:
        run_with_loop(model, prepare, arguments)
    except _Prepared as done:
        prepared = done.frames
    _check_single(len(prepared.frames))

    def make_result(hypotheses: Sequence[Hypothesis]) -> Any:
        ids = _codes_of(prepared, hypotheses)
        return run_with_loop(
            model,
            lambda stand_in, own: family.loop_result(PreparedLoop(stand_in, own), prepared.frames, ids),
            arguments,
        )

    return SoundRequest(_codebook_rows(prepared, family.num_rows), make_result)


def _codebook_rows(prepared: PreparedFrames, count: int) -> tuple[Request, ...]:
    """A request for each codebook that is a row; processors and criteria see them as one batch."""
    return tuple(
        Request(
            prepared.codes[0, row],
            prepared.configs[row],
            {CODEBOOK_INPUT: Codebook(prepared.frames[0], row)},
            prepared.changes.processors,
            prepared.changes.criteria,
            prompt_index=row,
            batch_row=row,
            batch_size=count,
            config_merged=True,
        )
        for row in range(count)
    )


def _codes_of(prepared: PreparedFrames, hypotheses: Sequence[Hypothesis]) -> Tensor:
    """The codes of a sequence [R, L], ended codebooks padded."""
    pad = prepared.frames[0].pad_token_id
    new = [one.tokens for one in hypotheses]
    tokens = torch.nn.utils.rnn.pad_sequence(new, batch_first=True, padding_value=pad)
    codes = prepared.codes[0]
    return torch.cat((codes, tokens.to(codes.device)), 1)
