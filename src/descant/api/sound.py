"""Requests of a Session for models that predict sound."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from descant.api.call import CallOptions, merge_configs
from descant.api.generate_call import GenerateCall
from descant.api.inputs import bind_inputs
from descant.config.generation_config import FIELDS, GenerationConfig
from descant.core.records import Hypothesis
from descant.engine.latent_requests import merged_latent_requests
from descant.engine.request import CallPlace, Request
from descant.errors import InputError
from descant.models.audio.codebooks.codebook_model import CodebookModel, codebook_family_of
from descant.models.audio.codebooks.frames import (
    CODEBOOK_INPUT,
    Codebook,
    CodebookFamily,
    FrameInputs,
    LoopChanges,
    check_codebook_config,
    codebook_config,
    row_seed,
)
from descant.models.audio.latents import LATENT_INPUT, audio_latents, is_latent_model
from descant.models.compat.custom_generate import PreparedLoop, known_fields, run_with_loop


def generate_codebooks(model: Any, call: CallOptions) -> Any:
    """The result of the model's own generate(), whose code prepares the call and makes the output."""
    family, call = codebook_family_of(model), call.merged(model)
    assert family is not None
    for config in call.configs:
        check_codebook_config(config, family, call.assistant_model)

    def decode(loop: PreparedLoop) -> Any:
        prepared = prepare_frames(family, loop, call.configs)
        options = replace(
            call,
            configs=prepared.configs,
            logits_processor=(*call.processors, *prepared.changes.processors),
            stopping_criteria=(*call.criteria, *prepared.changes.criteria),
        )
        ids = prepared.codes.flatten(0, 1)
        codebooks = [Codebook(frame, row) for frame in prepared.frames for row in range(family.num_rows)]
        # The mask is given, since pad tokens are codes here: those before the start of a delayed codebook.
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), CODEBOOK_INPUT: codebooks}
        output = GenerateCall(CodebookModel(family), options).run(given)
        return family.loop_result(prepared.loop, prepared.frames, output)

    arguments = bind_inputs(model, call.inputs, {**call.fields, **call.others})
    return run_with_loop(model, decode, own_arguments(model, call.generation_config, arguments))


class PreparedFrames(NamedTuple):
    """The sequences of a call, as its model's own generate() has prepared them."""

    loop: PreparedLoop
    codes: Tensor  # [B, R, L] before the first step
    frames: list[FrameInputs]
    changes: LoopChanges
    configs: list[GenerationConfig]  # of each row


def prepare_frames(
    family: CodebookFamily, loop: PreparedLoop, configs: Sequence[GenerationConfig]
) -> PreparedFrames:
    """The sequences of a call with one config for all of them, or one each."""
    codes, frames = family.frame_inputs(loop)
    if len(configs) not in (1, len(frames)):
        must = f"must be one for each of the {len(frames)} prompts, or one for all"
        raise InputError("seed", must, f"{len(configs)} of them")
    decode = DepthDecoding()
    for index, frame in enumerate(frames):
        frame.state.seed, frame.state.decode = configs[index % len(configs)].seed, decode
    changes = family.loop_changes(loop, frames)
    new = loop.generation_config.max_length - loop.input_ids.shape[-1]
    by_seed: dict[tuple[int, int | None], GenerationConfig] = {}  # equal configs stay one object
    row_configs = []
    for index in range(len(frames)):
        config = configs[index % len(configs)]
        for row in range(family.num_rows):
            seed = None if config.seed is None else row_seed(config.seed, row)
            key = (id(config), seed)
            if key not in by_seed:
                by_seed[key] = codebook_config(config, new, seed=seed, **changes.fields)
            row_configs.append(by_seed[key])
    return PreparedFrames(loop, codes, frames, changes, row_configs)


def own_arguments(model: Any, config: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a model's own generate(): its inputs, and the fields that transformers knows."""
    fields = {name: value for name, value in arguments.items() if name in FIELDS}
    own = {name: value for name, value in arguments.items() if name not in FIELDS and value is not None}
    if isinstance(config, GenerationConfig):
        fields = {name: getattr(config, name) for name in config.given} | fields
    elif isinstance(config, list | tuple):
        must = f"must be one config for all prompts of {type(model).__name__}"
        raise InputError("generation_config", must, config)
    elif config is not None:
        own["generation_config"] = config
    return {**own, **known_fields(fields), "num_return_sequences": 1}


class DepthDecoding:
    """Decodes the other codes of frames by calls of generate(), whose config is merged once."""

    def __init__(self) -> None:
        self._config: GenerationConfig | None = None

    def __call__(self, model: Any, config: Any, prompts: Tensor, seeds: list[int] | None) -> Tensor:
        """A place and all codes of each frame [B, 1 + C], decoded behind prompts [B, 2] by a depth model."""
        if self._config is None:
            [self._config] = merge_configs(model, config, {"return_dict_in_generate": False})
        merged = self._config
        configs = [merged] if seeds is None else [merged.replace(seed=seed) for seed in seeds]
        inputs = {"input_ids": prompts, "attention_mask": torch.ones_like(prompts)}
        codes = GenerateCall(model, CallOptions(configs=configs)).run(inputs)
        assert isinstance(codes, Tensor)
        return codes


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
        [config] = merge_configs(model, generation_config, fields)
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
    configs = merge_configs(model, config, fields)
    for merged_config in configs:
        check_codebook_config(merged_config, family)
    arguments = own_arguments(model, config, inputs)

    def prepare(loop: PreparedLoop) -> Any:
        raise _Prepared(prepare_frames(family, loop, configs))

    try:
        run_with_loop(model, prepare, arguments)
    except _Prepared as done:
        prepared = done.frames
    _check_single(len(prepared.frames))

    def make_result(hypotheses: Sequence[Hypothesis]) -> Any:
        ids = _codes_of(prepared, hypotheses)
        return run_with_loop(model, lambda loop: family.loop_result(loop, prepared.frames, ids), arguments)

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
            _call=CallPlace(prompt_index=row, batch_row=row, batch_size=count, config_merged=True),
        )
        for row in range(count)
    )


def _codes_of(prepared: PreparedFrames, hypotheses: Sequence[Hypothesis]) -> Tensor:
    """The codes of a sequence [R, L], ended codebooks padded."""
    pad = prepared.frames[0].pad_token_id
    new = [hypothesis.tokens for hypothesis in hypotheses]
    tokens = torch.nn.utils.rnn.pad_sequence(new, batch_first=True, padding_value=pad)
    codes = prepared.codes[0]
    return torch.cat((codes, tokens.to(codes.device)), 1)
