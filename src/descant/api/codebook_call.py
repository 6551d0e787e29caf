"""generate() for models that predict several codebooks in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from descant.api.call import CallOptions
from descant.api.generate_call import GenerateCall
from descant.config.generation_config import FIELDS, GenerationConfig
from descant.errors import InputError
from descant.models.codebooks.codebook_model import CodebookModel
from descant.models.codebooks.config_checks import check_codebook_config, codebook_config, row_seed
from descant.models.codebooks.frames import (
    CODEBOOK_INPUT,
    Codebook,
    CodebookFamily,
    FrameInputs,
    LoopChanges,
    PreparedLoop,
)
from descant.models.own_loop import LoopInputs, known_fields, run_with_loop

__all__ = ["CodebookCall", "PreparedFrames", "own_arguments", "prepare_frames"]


class CodebookCall:
    """One call of generate(): the model's own code prepares it and makes the output, Descant decodes."""

    def __init__(
        self, model: Any, family: CodebookFamily, options: CallOptions, streamer: Any = None
    ) -> None:
        self.model, self.family, self.options, self.streamer = model, family, options, streamer
        for config in options.configs:
            check_codebook_config(config, family, options.assistant_model)

    def run(self, arguments: Mapping[str, Any]) -> Any:
        """What the model's own generate() returns, for its inputs and its fields of the config."""
        return run_with_loop(self.model, self._decode, arguments)

    def _decode(self, model: Any, inputs: LoopInputs) -> Any:
        prepared = prepare_frames(self.family, PreparedLoop(model, inputs), self.options.configs)
        changes = prepared.changes
        options = replace(
            self.options,
            configs=prepared.configs,
            processors=(*self.options.processors, *changes.processors),
            criteria=(*self.options.criteria, *changes.criteria),
        )
        ids = prepared.codes.flatten(0, 1)
        codebooks = [Codebook(one, row) for one in prepared.frames for row in range(self.family.num_rows)]
        # The mask is given, since pad tokens are codes here: those before the start of a delayed codebook.
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), CODEBOOK_INPUT: codebooks}
        output = GenerateCall(CodebookModel(self.family), options, self.streamer).run(given)
        return self.family.loop_result(prepared.loop, prepared.frames, output)


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
    for index, one in enumerate(frames):
        one.state.seed, one.state.decode = configs[index % len(configs)].seed, decode
    changes = family.loop_changes(loop, frames)
    new = loop.inputs.generation_config.max_length - loop.inputs.input_ids.shape[-1]
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
    """Decodes the other codes of frames by calls of generate(), whose options are merged once."""

    def __init__(self) -> None:
        self._options: CallOptions | None = None

    def __call__(self, model: Any, config: Any, prompts: Tensor, seeds: list[int] | None) -> Tensor:
        """A place and all codes of each frame [B, 1 + C], decoded behind prompts [B, 2] by a depth model."""
        if self._options is None:
            self._options = CallOptions.from_call(model, config, {"return_dict_in_generate": False})
        options = self._options
        if seeds is not None:
            configs = [options.config.replace(seed=seed) for seed in seeds]
            options = replace(options, configs=configs, list_argument="seed")
        inputs = {"input_ids": prompts, "attention_mask": torch.ones_like(prompts)}
        codes = GenerateCall(model, options, None).run(inputs)
        assert isinstance(codes, Tensor)
        return codes
